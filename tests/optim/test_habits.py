"""Each optimizer in the hands of people: a table of habits, beside torch's own optimizers."""

from __future__ import annotations

import inspect

import pytest
import torch

import fsdp_overlap
from fsdp_overlap import optim
from fsdp_overlap.optim import AdamW, LayerWise, Muon, OverlapPolicy
from support.habits import COLUMNS, HABITS, outcomes
from support.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS)
def test_habits(column: str) -> None:
    for of_rank in run_ranks(outcomes, 2, column, timeout=200):
        wrong = {k: v for k, v in of_rank.items() if v not in ("right", "refused", "freed")}
        assert not wrong, f"wrong in {column}: {wrong}"
        assert len(of_rank) == len(HABITS)


ELSEWHERE = {
    "moment_dtype": "tests/optim/test_own_optimizers.py compares with torch's of that dtype",
    "ns_dtype": "a precision",
    "algorithms": "names of parameters, tests/optim/test_muon_groups.py",
    "layer_wise": "names of parameters",
    "split": "parts of matrices, which torch's Muon does not have",
    "adamw": "options of AdamW",
    "cost": "which rank steps what",
}
"""Options without a column, and why."""


def test_each_option_and_layout_has_a_column() -> None:
    """A new feature of an optimizer gets a column, so that it is tried as people use it."""
    optimizers = {
        each
        for name in optim.__all__
        if isinstance(each := getattr(optim, name), type)
        and issubclass(each, torch.optim.Optimizer)
    }
    assert optimizers == {AdamW, Muon, LayerWise}
    used = [
        (getattr(column.make, "func", column.make), option, value)
        for column in COLUMNS.values()
        for option, value in {"": None, **getattr(column.make, "keywords", {})}.items()
    ]
    named = {(make, option) for make, option, _ in used}
    for each in optimizers:
        parameters = inspect.signature(each).parameters.values()
        own = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} | {""}
        torchs = set(inspect.signature(torch.optim.AdamW).parameters)
        lacking = {name for name in own - torchs - ELSEWHERE.keys() if (each, name) not in named}
        assert not lacking, f"give {each.__name__} columns in support/habits.py for {lacking}"
    policies = [value for _, _, value in used if isinstance(value, OverlapPolicy)]
    for name, default in vars(OverlapPolicy()).items():
        assert any(getattr(policy, name) != default for policy in policies), name
    layouts = {
        each
        for name in fsdp_overlap.__all__
        if isinstance(each := getattr(fsdp_overlap, name), type) and hasattr(each, "block_size")
    }
    assert layouts == {type(column.layout) for column in COLUMNS.values()}


def test_parameters_that_change_their_kind_are_refused() -> None:
    """Nothing is stepped then, and a state that is deleted begins anew."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3)]

    def groups(option: str, kinds: tuple[object, object]) -> list[dict[str, object]]:
        pairs = zip(kinds, (weights[:2], weights[2:]), strict=True)
        return [{"params": list(members), option: kind} for kind, members in pairs]

    muon = Muon(groups("algorithm", ("muon", "adamw")))
    layer_wise = LayerWise(groups("layer_wise", (True, False)), torch.optim.Muon)
    for optimizer, error in ((muon, "delete its state"), (layer_wise, "Make a new LayerWise")):
        for weight in weights:
            weight.grad = torch.ones(4, 4)
        optimizer.step()
        before = [weight.detach().clone() for weight in weights]
        one, other = optimizer.param_groups
        one["params"].append(other["params"].pop())
        with pytest.raises(ValueError, match=error):
            optimizer.step()
        assert all(map(torch.equal, before, weights))
    del muon.state[weights[2]]
    muon.step()
    assert not torch.equal(before[2], weights[2])
