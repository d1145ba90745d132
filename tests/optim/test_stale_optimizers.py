"""An optimizer whose parameters were replaced by others says so in its next step, and no other
optimizer hears of it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard, optim
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks


def build(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def shard(model: nn.Sequential, **options: Any) -> None:
    ctx = FsdpContext()
    fully_shard(model[0], ctx)
    fully_shard(model, ctx, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def made_before() -> None:
    for make in (torch.optim.AdamW, torch.optim.SGD, optim.AdamW):
        model = build()
        optimizer = make(model.parameters(), lr=0.1)
        twin = make(build().parameters(), lr=0.1)
        is_warm = make is torch.optim.SGD
        if is_warm:  # looked at while it was right
            train(model, optimizer)
        shard(model)
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        with pytest.raises(
            RuntimeError,
            match=r"was made before fully_shard\(\), which .* the place of 'weight' of Linear: .* "
            r"make the optimizer afterwards, from model\.parameters\(\)",
        ):
            train(model, optimizer)
        with pytest.raises(RuntimeError, match="was made before"):
            optimizer.step()  # again, until it is right
        twin.step()
        train(model, make(model.parameters(), lr=0.1))
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert not old.numel() or not torch.equal(parameter.to_local(), old)


def added_later() -> None:
    model, more = build(), build()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    old = list(more.parameters())
    shard(more)
    train(model, optimizer)
    optimizer.add_param_group({"params": old})
    with pytest.raises(RuntimeError, match="was made before"):
        optimizer.step()


def given_memory() -> None:
    """Parameters on the meta device are replaced when they are given memory."""
    for assign in (False, True):
        model = build("meta")
        oldest = torch.optim.SGD(model.parameters(), lr=0.1)
        shard(model)
        old = torch.optim.SGD(model.parameters(), lr=0.1)
        if assign:
            model.load_state_dict(build().state_dict(), assign=True)
        else:
            model.to_empty(device="cpu")
            for parameter in model.parameters():
                nn.init.ones_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        with pytest.raises(RuntimeError, match="before the model was given memory, which put"):
            old.step()
        with pytest.raises(RuntimeError, match=r"before fully_shard\(\)"):
            oldest.step()
        model.load_state_dict(build().state_dict(), assign=True)  # into the shards that there are
        train(model, optimizer)


def not_concerned() -> None:
    model = build()
    ignored = set(model[1].parameters())
    plain = torch.optim.SGD([*ignored, *build().parameters()], lr=0.1)
    shard(model, ignored_params=ignored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    train(model, plain)
    duplicate, its = copy.deepcopy((model, optimizer))
    train(duplicate, its)
    restored = torch.optim.SGD(model.parameters(), lr=0.1)
    restored.load_state_dict(optimizer.state_dict())
    train(model, restored)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


def test_an_optimizer_made_before_its_parameters_were_replaced_says_so() -> None:
    run_on_fake_group(made_before, 2)
    run_on_fake_group(added_later, 1)
    run_on_fake_group(given_memory, 2)


def test_optimizers_of_other_parameters_hear_nothing() -> None:
    run_ranks(not_concerned, 2)
