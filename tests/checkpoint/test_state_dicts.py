"""State dicts of sharded models: loading, saving, copying, and what is refused."""

from __future__ import annotations

import copy
import io
import operator
import tempfile
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from fsdp_overlap import FsdpContext, RaggedDTensor, fully_shard
from support.ranks import run_ranks
from support.twins import Twins, same
from support.zoo import ZOO, Model, shard_layers


def pair() -> tuple[Model, Model]:
    """A sharded model and a plain one, of different weights."""
    torch.manual_seed(dist.get_world_size())
    model, plain = Model(), Model()
    shard_layers(model, FsdpContext())
    return model, plain


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, RaggedDTensor) else p for p in model.parameters()]


def load_forms() -> None:
    model, plain = pair()
    whole = plain.state_dict()
    original = copy.deepcopy(model.state_dict())
    mesh = model.head.weight.device_mesh
    standard = {key: torch_distribute_tensor(v, mesh, [Shard(0)]) for key, v in whole.items()}
    twin = Model()
    shard_layers(twin, FsdpContext())
    twin.load_state_dict(whole)
    otherwise = Model()  # all of it one unit, so that most parameters are cut elsewhere
    fully_shard(otherwise, FsdpContext())
    otherwise.load_state_dict(whole)
    for state in (whole, standard, twin.state_dict(), otherwise.state_dict()):
        model.load_state_dict(original)
        assert not torch.equal(model.head.weight.full_tensor(), plain.head.weight)
        keys = model.load_state_dict(state)
        assert not keys.missing_keys
        assert not keys.unexpected_keys
        assert all(map(torch.equal, values(model), values(plain)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whole_row_sharded_and_sharded_tensors_load(world_size: int) -> None:
    run_ranks(load_forms, world_size)


def load_wrong() -> None:
    """Says of a wrong state dict what a plain module says, and does to the rest the same."""
    for change in ("missing", "unexpected", "shape", "not a tensor"):
        model, plain = pair()
        other = copy.deepcopy(plain)
        other.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
        state = dict(plain.state_dict())
        if change == "missing":
            del state["layers.1.up.weight"]
        elif change == "unexpected":
            state["layers.1.nothing"] = torch.zeros(2)
        elif change == "shape":
            state["layers.1.up.weight"] = torch.zeros(3, 3)
        else:
            state["layers.1.up.weight"] = 3
        messages = []
        for module in (model, other):
            with pytest.raises(RuntimeError) as caught:
                module.load_state_dict(state)
            messages.append(str(caught.value).replace("FSDP", ""))
        assert messages[0] == messages[1]
        assert all(map(torch.equal, values(model), values(other))), change
        if change in ("missing", "unexpected"):
            keys = [module.load_state_dict(state, strict=False) for module in (model, other)]
            assert keys[0] == keys[1]
            assert all(map(torch.equal, values(model), values(other))), change


def test_wrong_state_dicts_are_refused_as_by_a_plain_module() -> None:
    run_ranks(load_wrong, 2)


def assign() -> None:
    model, plain = pair()
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    parameters = list(model.parameters())
    model.layers[0].unshard()
    for prefix, module in (("", model), ("0.", nn.Sequential(model))):
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        state = {prefix + key: value.clone() for key, value in plain.state_dict().items()}
        module.load_state_dict(state, assign=True)
        assert all(map(torch.equal, values(model), values(plain)))
        assert all(map(operator.is_, model.parameters(), parameters))  # an optimizer has these
        state[f"{prefix}head.weight"].zero_()  # whose memory it was and is
        torch.testing.assert_close(model(tokens), plain(tokens))
    assert model._fsdp_unit.context.was_initialized
    half = {key: value.half() for key, value in plain.state_dict().items()}
    before = values(model)
    with pytest.raises(RuntimeError, match=r"'norm.weight' of Block as torch.float16, and"):
        model.load_state_dict(half, assign=True)
    assert all(map(torch.equal, values(model.layers[0]), values(plain.layers[0])))
    model.load_state_dict(plain.state_dict())
    assert all(map(torch.equal, values(model), before))
    model.layers[0].up.load_state_dict(plain.layers[0].up.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"'weight' of unit 'layers.0' was replaced after"):
        model(tokens)


def replaced_anywhere() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])  # with a context of its own, until the first forward of the root
    fully_shard(model)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    for use in (lambda: model(torch.ones(1, 4)), model.state_dict, model[0].reshard):
        with pytest.raises(RuntimeError, match=r"'weight' of unit .* was replaced after"):
            use()


def test_a_parameter_that_was_replaced_is_an_error_and_never_lost() -> None:
    run_ranks(replaced_anywhere, 2)


def test_what_is_assigned_is_copied() -> None:
    run_ranks(assign, 2)


def assign_to_meta() -> None:
    """Of whole tensors and of sharded ones, to units that lie otherwise, also one of a list."""
    tokens = torch.arange(4).view(2, 2)
    for name in ("layers", "nested units", "tied parameters", "recurrent", "odd parameters"):
        build, shard = ZOO[name]
        torch.manual_seed(4)
        plain, other = build(), build()
        fully_shard(other, FsdpContext())
        other.load_state_dict(plain.state_dict())
        for state in (plain.state_dict(), other.state_dict()):
            with torch.device("meta"):
                model = build()
            shard(model, FsdpContext())
            model.load_state_dict(state, assign=True)
            assert all(isinstance(parameter, RaggedDTensor) for parameter in model.parameters())
            assert all(map(torch.equal, values(model), values(plain))), name
            torch.testing.assert_close(model(tokens), plain(tokens))
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.device("meta"):
        model = copy.deepcopy(plain).to("meta")
    fully_shard([model[0], model[2]], FsdpContext())
    state = plain.state_dict()
    model[0].load_state_dict(plain[0].state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="is on the meta device"):
        model(torch.ones(1, 4))
    bias = state.pop("2.bias")
    model.load_state_dict(state, strict=False, assign=True)
    with pytest.raises(RuntimeError, match="is on the meta device"):
        model(torch.ones(1, 4))
    model.load_state_dict({**state, "2.bias": bias}, assign=True)
    assert torch.equal(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    duplicate = copy.deepcopy(model)
    duplicate.load_state_dict({key: value + 1 for key, value in state.items()}, False, True)
    assert torch.equal(duplicate[0].weight.full_tensor(), plain[0].weight + 1)
    assert torch.equal(model[0].weight.full_tensor(), plain[0].weight)


def test_assigning_gives_memory_to_units_on_the_meta_device() -> None:
    run_ranks(assign_to_meta, 2)


def replaced() -> None:
    model, _ = pair()
    model.layers[0].norm.weight = model.layers[1].norm.weight
    with pytest.raises(RuntimeError, match=r"'weight' of unit 'layers.0' was replaced"):
        model(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"move or cast a module before fully_shard"):
        model.layers[0].up.to(torch.float64)


def test_parameters_replaced_after_sharding_are_noticed() -> None:
    run_ranks(replaced, 2)


def unsharded_by_hand() -> None:
    """state_dict() and load_state_dict() are about the shards, whatever is unsharded."""
    model, plain = pair()
    model.unshard()
    assert all(isinstance(value, RaggedDTensor) for value in model.state_dict().values())
    model.unshard()
    model.load_state_dict(plain.state_dict())
    assert all(map(torch.equal, values(model), values(plain)))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    torch.testing.assert_close(model(tokens), plain(tokens))


def test_state_dicts_of_an_unsharded_model_are_sharded() -> None:
    run_ranks(unsharded_by_hand, 2)


EDITS: dict[str, Any] = {
    "copy_": lambda p: p.copy_(torch.full(p.shape, 0.5)),
    "data": lambda p: p.data.mul_(0.5),
    "rows": lambda p: p[: max(1, len(p) // 2)].fill_(0.3),
    "view": lambda p: p.view(-1)[1:].neg_(),
    "foreach": lambda p: torch._foreach_add_([p], 0.1),
    "whole tensor": lambda p: p.add_(torch.full(p.shape, 0.2)),
    "local": lambda p: p.to_local().mul_(1.5),
    "init": lambda p: nn.init.constant_(p, 0.25),
    "random": lambda p: (torch.manual_seed(3), p.normal_()),
    "mask": lambda p: p.masked_fill_(p > 0, 0.1),
    "lerp_": lambda p: p.lerp_(torch.ones_like(p), 0.5),
}


def edit(reshard: bool) -> None:
    twins = Twins.of("layers")
    twins.model.set_reshard_after_forward(reshard)
    twins.model.set_reshard_after_backward(reshard)
    for number, (name, change) in enumerate(EDITS.items()):
        for batch in twins.batches(1):
            twins.backward(*batch)
            twins.step()
        for model in (twins.model, twins.twin):
            with torch.no_grad():
                for parameter in model.parameters():
                    if name == "local" and model is twins.twin:
                        parameter.mul_(1.5)
                    else:
                        change(parameter)
        twins.check_parameters()
        with torch.no_grad() if number % 2 else torch.enable_grad():
            loss, expected = twins.losses(*next(twins.batches(1)))
        twins.check_loss(loss, expected)
        twins.ctx.reset()


@pytest.mark.parametrize("reshard", [True, False])
def test_edits_of_any_kind_are_seen_by_the_next_forward(reshard: bool) -> None:
    run_ranks(edit, 2, reshard)


def travel() -> None:
    """deepcopy and torch.save keep values, layouts and what makes a parameter one."""
    model, plain = pair()
    state = model.state_dict()
    copied = copy.deepcopy(state)
    stream = io.BytesIO()
    torch.save({"state": state, "parameter": model.head.weight}, stream)
    stream.seek(0)
    loaded = torch.load(stream)
    for other in (copied, loaded["state"]):
        assert other.keys() == state.keys()
        for key, value in other.items():
            assert isinstance(value, RaggedDTensor)
            assert value.placement == state[key].placement
            assert torch.equal(value.to_local(), state[key].to_local())
    assert isinstance(loaded["parameter"], nn.Parameter)
    assert loaded["parameter"].requires_grad
    model.load_state_dict(plain.state_dict())
    assert not torch.equal(copied["head.weight"].full_tensor(), plain.head.weight)
    model.load_state_dict(loaded["state"])
    assert all(torch.equal(v.full_tensor(), copied[k].full_tensor()) for k, v in state.items())


@pytest.mark.parametrize("world_size", [1, 3])
def test_state_dicts_are_copied_and_saved_locally(world_size: int) -> None:
    run_ranks(travel, world_size)


def copy_model(name: str) -> None:
    """A copied model trains on, apart from its original."""
    twins = Twins.of(name)
    twins.train(1)
    model, optimizer = twins.model, twins.optimizer
    kept = values(model)
    duplicate = copy.deepcopy(model)
    duplicate.registered_later = True
    twins.twin, expected = copy.deepcopy(twins.twin), twins.twin
    twins.model = duplicate
    twins.optimizer = torch.optim.AdamW(duplicate.parameters(), lr=0.05)
    twins.twin_optimizer = torch.optim.AdamW(twins.twin.parameters(), lr=0.05)
    twins.train(2)
    assert all(map(torch.equal, values(model), kept))
    for parameter, twin in zip(model.parameters(), expected.parameters(), strict=True):
        same(parameter.full_tensor(), twin.detach(), name)
    del optimizer


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        "layers",
        "nested units",
        "without a context",
        "tied parameters",
        "frozen and partly frozen units",
        "odd parameters",
        "recurrent",
        "buffers",
    ],
)
def test_a_sharded_model_is_copied(name: str) -> None:
    run_ranks(copy_model, 2, name)


def copy_details() -> None:
    model, _ = pair()
    model.layers[0].requires_grad_(False)
    model.set_requires_gradient_sync(False)
    model.head.weight.note = "mine"
    model._forward_cache = defaultdict(list)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    duplicate = copy.deepcopy(model)
    assert type(duplicate) is type(model)
    assert duplicate._forward_cache == {}
    assert duplicate.head.weight.note == "mine"
    assert not duplicate.layers[0].up.weight.requires_grad
    for first, second in zip(model.parameters(), duplicate.parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None)
        if first.grad is not None:
            assert first.grad is not second.grad
            assert torch.equal(first.grad.to_local(), second.grad.to_local())


def test_a_copy_keeps_gradients_and_settings() -> None:
    run_ranks(copy_details, 2)


def save(folder: str) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = Model()
    whole = [value.clone() for value in model.state_dict().values()]
    shard_layers(model, FsdpContext())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return whole


def load(folder: str) -> list[torch.Tensor]:
    model = Model()
    ctx = FsdpContext()
    fully_shard(model.layers[0], ctx)
    fully_shard(model, ctx)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return [value.full_tensor() for value in model.state_dict().values()]


def load_into_kept(folder: str) -> None:
    """Ranks that hold nothing of a parameter notice the load like the others."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    ctx = FsdpContext()
    fully_shard(model[1], ctx)
    fully_shard(model, ctx)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    x = torch.ones(1, 1)
    expected = model(x).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    loss = model(x)  # the root is kept
    dcp.save(model.state_dict(), checkpoint_id=folder + "/other")
    loss.sum().backward()  # saving edits nothing
    model(x)
    dcp.load(model.state_dict(), checkpoint_id=folder)
    assert torch.equal(model(x), expected)


def test_a_load_is_noticed_on_every_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(load_into_kept, 2, folder)


def test_checkpoints_load_at_another_world_size_and_grouping() -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(save, 3, folder)[0]
        for world_size in (1, 2, 4):
            for loaded in run_ranks(load, world_size, folder):
                assert all(map(torch.equal, loaded, expected))
