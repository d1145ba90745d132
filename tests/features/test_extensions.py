"""Tensor extensions: parameters whose class says how they are gathered, beside FSDP2."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from fsdp_overlap.features.extensions.gather import ExtensionGather
from fsdp_overlap.optim import AdamW, Muon
from support.extension_twins import LOW, batches, both, check, train
from support.extensions import TOLD, WIDTH, Net, Rounded, parts
from support.one_process import OneProcessCollectives
from support.ranks import run_ranks


def trains(micro: int = 1, **options: Any) -> None:
    ours, theirs, ctx = both(**options)
    check(ours, theirs)
    train(ours, theirs, micro=micro)
    assert ctx.stats.current_full_buffers == 0


def trains_in_two_modes(kind: str) -> None:
    low = {"mp_policy": LOW}
    first, second = (low, {}) if kind in ("rounded", "pair") else ({}, low)
    trains(kind=kind, reshard_after_forward=True, **first)
    trains(kind=kind, reshard_after_forward=False, **second)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["rounded", "coded", "pair", "early"])
def test_training_equals_fsdp2s(kind: str) -> None:
    """Resharded after forward and not, and in bfloat16."""
    run_ranks(partial(trains_in_two_modes, kind), 2)


def keeps_full_buffers() -> None:
    """What is gathered stands in memory that was never freed. FSDP2 frees it."""
    ours, theirs, _ = both("early")
    ours.set_zero_stage(2)
    train(ours, theirs)
    ours.set_zero_stage(3)
    ours.set_keep_unsharded_storage(True)
    train(ours, theirs)


def test_full_buffers_may_be_kept_where_outputs_are_released_early() -> None:
    run_ranks(keeps_full_buffers, 2)


@pytest.mark.parametrize("inner", [5, 3])
def test_rows_may_be_uneven_or_missing(inner: int) -> None:
    run_ranks(partial(trains, inner=inner), 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["rounded", "pair"])
def test_ranks_may_hold_copies(kind: str) -> None:
    run_ranks(partial(trains, kind=kind, mesh=(2, 2)), 4)


@pytest.mark.parametrize("kind", ["rounded", "pair"])
def test_gradients_accumulate(kind: str) -> None:
    run_ranks(partial(trains, kind=kind, micro=3), 2)


class Columns(nn.Module):
    """A linear layer whose rows tensor parallelism has cut."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(4)
        tile = torch.randn(12, WIDTH).chunk(2)[mesh.get_local_rank()]
        whole = DTensor.from_local(Rounded(tile), mesh, [Shard(0)])  # type: ignore[arg-type]
        self.weight = nn.Parameter(whole)
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replicated = DTensor.from_local(x, self.mesh, [Replicate()])
        return nn.functional.linear(replicated, self.weight).full_tensor()


def lies_over_both() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours, theirs = Columns(mesh["tp"]), Columns(mesh["tp"])
    fully_shard(ours, FsdpContext(mesh["dp"], layout=PerTensor()))
    torchs_fully_shard(theirs, mesh=mesh["dp"])
    train(ours, theirs)


def test_tensor_parallelism_may_have_cut_them() -> None:
    run_ranks(lies_over_both, 4)


DTYPES = [torch.float64, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool, torch.uint8]
SENT = st.lists(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), max_size=3),
    min_size=1,
    max_size=4,
)


@given(SENT, st.integers(1, 3))
def test_what_is_sent_arrives_in_every_dtype_and_size(
    sent: list[list[tuple[torch.dtype, int]]], ranks: int
) -> None:
    collectives = OneProcessCollectives()
    gathers, issued = [], []
    of_all: list[list[list[torch.Tensor]]] = []
    for rank in range(ranks):
        of_all.append(
            [
                [torch.randint(0, 2, (size,)).to(dtype) for dtype, size in tensors]
                for tensors in sent
            ]
        )
        gather = ExtensionGather([])
        gather.others = collectives
        group: Any = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: ranks)
        issued.append(gather.all_gather_first(of_all[-1], torch.empty(0), group))
        gathers.append(gather)
    for gather, each in zip(gathers, issued, strict=True):
        each.finish()
        for index, tensors in enumerate(gather.outputs):
            for number, output in enumerate(tensors):
                expected = torch.cat([rank[index][number] for rank in of_all])
                assert output.dtype == expected.dtype
                assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))


def is_told() -> None:
    """As FSDP2 tells, whatever mesh has copies."""
    TOLD.clear()
    ours, theirs, _ = both(mesh=(2, 2), mp_policy=LOW)
    heard = []
    for model in (ours, theirs):
        model(batches(1)[0])
        heard.append([*dict.fromkeys(TOLD)])
        TOLD.clear()
    assert heard[0] == heard[1]
    assert len(heard[0]) == 2  # of up and of down
    assert heard[0][0][1:] == ((16, WIDTH), (WIDTH, 1), nn.Linear, LOW)


def test_an_extension_is_told_of_the_parameter_and_of_its_unit() -> None:
    run_ranks(is_told, 4)


def travels_alone() -> None:
    ours, theirs, ctx = both("coded")
    unit = ours.layers[0]._fsdp_unit
    names = [[spec.fqn for spec in param_group.plan.specs] for param_group in unit.param_groups]
    assert names == [["norm.weight", "norm.bias", "down.bias"], ["up.weight", "down.weight"]]
    train(ours, theirs, steps=1)
    ctx.stats.reset()
    with torch.no_grad():
        ours(batches(1)[0])
    assert ctx.stats.all_gathers == 4  # one for each layer and the head
    codes, scales = 2 * 16 * WIDTH, (16 + WIDTH) * 8
    gathered = [
        param_group.gathered_nbytes
        for layer in ours.layers
        for param_group in layer._fsdp_unit.param_groups
    ]
    assert gathered[1::2] == [codes + scales] * 3


def test_all_extensions_of_a_unit_travel_in_one_gather_as_bytes() -> None:
    run_ranks(travels_alone, 2)


def frees_the_whole(kind: str) -> None:
    model, ctx = Net(kind), FsdpContext(layout=PerTensor())
    weights = [linear.weight for layer in model.layers for linear in (layer.up, layer.down)]
    weights[0].mine = "a user's"
    wholes = [weakref.ref(part.untyped_storage()) for each in weights for part in parts(each)]
    del weights
    for module in (*model.layers, model):
        fully_shard(module, ctx)
    gc.collect()
    assert not any(whole() for whole in wholes)
    with torch.no_grad():
        model(batches(1)[0])
    model.layers[0].unshard()
    assert model.layers[0].up.weight.mine == "a user's"


@pytest.mark.parametrize("kind", ["rounded", "coded", "pair"])
def test_whole_parameters_are_freed_once_they_are_sharded(kind: str) -> None:
    run_ranks(partial(frees_the_whole, kind), 2)


def starts_on_meta(kind: str) -> None:
    with torch.device("meta"):
        ours, theirs = Net(kind), Net(kind)
    ctx = FsdpContext(layout=PerTensor())
    for shard, model in ((partial(fully_shard, ctx=ctx), ours), (torchs_fully_shard, theirs)):
        for module in (*model.layers, model):
            shard(module)
        if model is ours:
            with pytest.raises(RuntimeError, match="is on the meta device: call to_empty"):
                model(batches(1)[0])
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            for part in parts(parameter._local_tensor):
                torch.nn.init.normal_(part, std=0.1, generator=generator)
    ctx.reset()
    train(ours, theirs)


@pytest.mark.parametrize("kind", ["rounded", "coded"])
def test_a_unit_may_start_on_the_meta_device(kind: str) -> None:
    run_ranks(partial(starts_on_meta, kind), 2)


def steps_as_plain(kind: str) -> None:
    """Beside plain parameters with the same gradients, by torch's AdamW."""
    ours, _, _ = both(kind)
    twin = Net("plain")
    ctx = FsdpContext(layout=PerTensor())
    for module in (*twin.layers, twin):
        fully_shard(module, ctx)
    pairs = list(zip(ours.parameters(), twin.parameters(), strict=True))
    with torch.no_grad():
        for mine, its in pairs:
            its._local_tensor.copy_(parts(mine._local_tensor)[0])
    optimizers = AdamW(ours.parameters()), torch.optim.AdamW(twin.parameters())
    for batch in batches(3):
        ours(batch).square().mean().backward()
        for mine, its in pairs:
            its.grad = copy.deepcopy(mine.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, its in pairs:
        for part in parts(mine._local_tensor):
            torch.testing.assert_close(part, its._local_tensor, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="and Muon computes with plain tensors: give it to AdamW"):
        Muon(ours)


@pytest.mark.parametrize("kind", ["rounded", "pair"])
def test_own_adamw_steps_them_as_plain_ones(kind: str) -> None:
    run_ranks(partial(steps_as_plain, kind), 2)


def is_copied() -> None:
    ours, theirs, _ = both("rounded")
    train(ours, theirs, steps=1)
    train(copy.deepcopy(ours), theirs, steps=1)


def test_a_sharded_model_can_be_copied() -> None:
    run_ranks(is_copied, 2)


def puts_together() -> None:
    ours, theirs, _ = both("rounded")
    saved = {name: tensor.full_tensor() for name, tensor in ours.state_dict().items()}
    before = {name: [part.clone() for part in parts(whole)] for name, whole in saved.items()}
    train(ours, theirs, steps=1)
    for name, whole in saved.items():
        for part, its in zip(parts(whole), before[name], strict=True):
            assert torch.equal(part, its), name


def test_what_is_put_together_on_one_rank_does_not_follow_the_parameter() -> None:
    run_ranks(puts_together, 1)


def takes_states(kind: str, path: str) -> None:
    ours, theirs, _ = both(kind)
    train(ours, theirs, steps=1)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    other, _, _ = both(kind)
    other.load_state_dict(ours.state_dict())
    check(other, theirs)
    # As FSDP2 has it: DCP saves what the class is to the pickle of torch.
    dcp.save({"model": ours.state_dict()}, checkpoint_id=path)
    with torch.no_grad():
        for parameter in other.parameters():
            for part in parts(parameter._local_tensor):
                part.zero_()
    dcp.load({"model": other.state_dict()}, checkpoint_id=path)
    check(other, theirs)
    train(other, theirs, steps=1)


@pytest.mark.parametrize("kind", ["rounded", "pair"])
def test_states_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    run_ranks(partial(takes_states, kind, str(tmp_path)), 2)


def starts_from_the_first() -> None:
    torch.manual_seed(dist.get_rank())
    model = Net("pair")
    ctx = FsdpContext(layout=PerTensor(), sync_module_states=True)
    fully_shard(model, ctx)
    torch.manual_seed(0)
    expected = Net("pair")
    for mine, whole in zip(model.parameters(), expected.parameters(), strict=True):
        local = mine._local_tensor
        for one, other in zip(parts(local), parts(whole), strict=True):
            rank, rows = dist.get_rank(), len(other) // 2
            assert torch.equal(one, other[rank * rows : (rank + 1) * rows])
    model(batches(1)[0])


def test_ranks_may_take_the_values_of_the_first() -> None:
    run_ranks(starts_from_the_first, 2)
