"""Models that tensor parallelism has cut already: trained, copied and saved as others are."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import (
    FsdpContext,
    FsdpModule,
    RaggedDTensor,
    RaggedShard,
    TensorAtomic,
    fully_shard,
)
from fsdp_overlap.checkpoint import SafeFileSystemReader
from fsdp_overlap.engine import grads
from fsdp_overlap.optim import Muon, clip_grad_norm_
from support.ranks import run_ranks
from support.tensor_parallel import (
    ROWS,
    Transformer,
    adamw,
    batches,
    grad,
    loss_of,
    make_mesh,
    mine,
    parallelize,
    plain,
    same,
    shard,
    train,
    whole,
)

MP = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def ours(mesh: DeviceMesh, seed: int = 7, **options: Any) -> Transformer:
    return shard(parallelize(plain(seed), mesh["tp"]), FsdpContext(mesh["dp"]), **options)


def torchs(mesh: DeviceMesh, seed: int = 7, **options: Any) -> Transformer:
    model = parallelize(plain(seed), mesh["tp"])
    for layer in model.layers:
        torch_fully_shard(layer, mesh=mesh["dp"], **options)
    return torch_fully_shard(model, mesh=mesh["dp"], **options)


def parity() -> None:
    mesh = make_mesh()
    for optimizer in (adamw, partial(torch.optim.AdamW, lr=0.05, foreach=True)):
        model = ours(mesh)
        kinds = {parameter.placements[1:] for parameter in model.parameters()}
        assert kinds == {(Shard(0),), (Shard(1),), (Replicate(),), ()}
        train(mesh, model, plain(), optimizer)


@pytest.mark.slow
def test_training_equals_unsharded_training() -> None:
    run_ranks(parity, 4)


def modes() -> None:
    mesh = make_mesh()
    grads.LARGE_BYTES = 1  # all leave autograd's hands as they arrive, to be reduced one by one
    try:
        for prefetch in (0, 2):
            model = parallelize(plain(), mesh["tp"])
            shard(model, FsdpContext(mesh["dp"], prefetch=prefetch, layout=TensorAtomic()))
            train(mesh, model, plain(), adamw, steps=1)
    finally:
        grads.LARGE_BYTES = 1 << 20
    model = ours(mesh)
    model.set_zero_stage(2)
    train(mesh, model, plain(), adamw)
    implicit = parallelize(plain(), mesh["tp"])
    # Of which some return DTensors.
    for module in (*implicit.layers[0].children(), implicit.layers[1], implicit.norm):
        fully_shard(module, mesh=mesh["dp"])
    train(mesh, fully_shard(implicit, mesh=mesh["dp"]), plain(), adamw)


@pytest.mark.slow
def test_in_every_mode() -> None:
    run_ranks(modes, 4)


def copies(shape: tuple[int, int, int], divided: bool) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]
    model = shard(
        parallelize(plain(), mesh["tp"]), FsdpContext(data, shard_optimizer_over_replicas=divided)
    )
    optimizer, twin = adamw(model.parameters()), plain()
    twin_optimizer = adamw(twin.parameters())
    rank = mesh["replicate"].get_local_rank() * shape[1] + mesh["shard"].get_local_rank()
    for tokens, targets in batches(2, 2):
        loss_of(model, tokens.split(ROWS)[rank], targets.split(ROWS)[rank]).backward()
        loss_of(twin, tokens, targets).backward()
        same(model, twin, "gradient", grad)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
        same(model, twin, "value")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_with_copies_too(shape: tuple[int, int, int]) -> None:
    run_ranks(copies, 4, shape, False)


def test_with_copies_that_divide_their_shards() -> None:
    run_ranks(copies, 4, (2, 1, 2), True)


class ByHand(nn.Module):
    """Takes what this rank has of its parameters out of the DTensors itself."""

    def __init__(self, mesh: DeviceMesh, width: int) -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, 4 * width, dtype=torch.float64).view(width, 4)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)]))
        self.scale = nn.Parameter(distribute_tensor(weight.new_ones(4), mesh["tp"], [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Each rank of tensor parallelism adds what its rows of the weight make of x.
        hidden = torch.tanh(x * self.scale.to_local(grad_placements=[Partial()]))
        weight = self.weight.to_local()
        out = DTensor.from_local(
            hidden @ weight.t() @ weight, self.weight.device_mesh, [Partial()], run_check=False
        )
        return x + out.redistribute(placements=[Replicate()]).to_local()


def by_hand() -> None:
    """Saved views of parameters outlive that these are freed and gathered anew; a width of 1 leaves
    one rank nothing."""
    mesh = make_mesh()
    for width in (1, 3, 4):
        model = nn.Sequential(*(ByHand(mesh, width) for _ in range(3)))
        twin = copy.deepcopy(model)
        ctx = FsdpContext(mesh["dp"])
        for layer in model:
            fully_shard(layer, ctx)
        fully_shard(model, ctx, reshard_after_forward=True)
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            model(x[mesh["dp"].get_local_rank() :: 2]).square().mean().backward()
            twin(x).square().mean().backward()
        same(model, twin, "gradient", grad)


def test_what_takes_local_tensors_by_hand() -> None:
    run_ranks(by_hand, 4)


def accumulate() -> None:
    """Two batches, the first without reduction, both recomputed."""
    mesh = make_mesh()
    model, twin = ours(mesh), plain()
    assert isinstance(model, FsdpModule)
    for index, layer in enumerate(model.layers):
        forward = layer.forward
        layer.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)  # type: ignore
        assert index < 2
    for index, (tokens, targets) in enumerate(batches(2, 2)):
        model.set_requires_gradient_sync(index == 1)
        loss_of(model, mine(mesh, tokens), mine(mesh, targets)).backward()
        loss_of(twin, tokens, targets).backward()
    same(model, twin, "gradient", grad)


def test_accumulation_and_recomputation() -> None:
    run_ranks(accumulate, 4)


def over_both(model: nn.Module) -> list[nn.Parameter]:
    """FSDP2's gradients cannot be clipped together where some parameters are no DTensors."""
    return [p for name, p in model.named_parameters() if name != "temperature"]


def against_torch(policy: MixedPrecisionPolicy) -> None:
    mesh = make_mesh()
    models = [make(mesh, mp_policy=policy) for make in (ours, torchs)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05, fused=True) for model in models]
    # Before, FSDP2 summed over tensor-parallel ranks in the dtype of compute.
    is_exact = policy.param_dtype is None or hasattr(FSDPParam, "may_reduce_grad_outside_dp")
    for tokens, targets in batches(2 if is_exact else 1, 2):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(loss_of(model, mine(mesh, tokens), mine(mesh, targets)))
            losses[-1].backward()
        assert torch.equal(*losses)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            if is_exact or one.placements[-1] != Replicate():  # type: ignore[attr-defined]
                assert torch.equal(whole(one.grad), whole(other.grad))
        for optimizer in optimizers:
            optimizer.step()
    if not is_exact:
        return
    norms = [whole(nn.utils.clip_grad_norm_(over_both(model), 0.1)) for model in models]
    torch.testing.assert_close(*norms)
    same(*models, "clipped gradient", grad)
    same(*models, "value")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MP], ids=["full", "mixed"])
def test_losses_and_gradients_are_those_of_torch_to_the_bit(policy: MixedPrecisionPolicy) -> None:
    run_ranks(against_torch, 4, policy)


def from_meta() -> None:
    mesh = make_mesh()
    with torch.device("meta"):
        model = Transformer()
    model.head.weight.tag = "kept"  # type: ignore[attr-defined]
    parallelize(model, mesh["tp"])
    shard(model, FsdpContext(mesh["dp"]))
    model.to_empty(device="cpu")
    twin = Transformer()
    for each in (model, twin):
        torch.manual_seed(3)
        for module in each.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        with torch.no_grad():
            each.temperature.fill_(0.5)
    for parameter, whole_one in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(parameter), whole_one)
    tokens, targets = batches(1, 1)[0]
    torch.testing.assert_close(loss_of(model, tokens, targets), loss_of(twin, tokens, targets))


def test_a_model_from_the_meta_device_starts_as_an_unsharded_one() -> None:
    run_ranks(from_meta, 4)


def forms() -> None:
    mesh = make_mesh()
    model = parallelize(plain(), mesh["tp"])
    model.head.weight.tag = "kept"  # type: ignore[attr-defined]
    original = model.head.weight
    shard(model, FsdpContext(mesh["dp"]))
    weight: Any = model.head.weight
    assert type(weight) is RaggedDTensor
    assert isinstance(weight, nn.Parameter)
    assert weight.tag == "kept"
    assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert isinstance(weight.placements[0], RaggedShard)
    assert weight.placements[1:] == (Shard(0),)
    assert weight.shape == plain().head.weight.shape
    model.unshard()
    assert model.head.weight is original
    assert type(original) is DTensor
    assert original.placements == (Shard(0),)
    assert torch.equal(original.full_tensor(), plain().head.weight)
    model.reshard()
    tokens, targets = batches(1, 1)[0]
    loss_of(model, tokens, targets).backward()
    duplicate = copy.deepcopy(model)
    assert duplicate.head.weight.tag == "kept"  # type: ignore[attr-defined]
    same(duplicate, model, "gradient", grad)
    duplicate.zero_grad()
    train(mesh, duplicate, plain(), adamw, steps=1)
    same(model, plain(), "value")
    state = model.state_dict()
    duplicate.load_state_dict(state)
    same(duplicate, model, "value")
    duplicate.load_state_dict(plain(8).state_dict())
    same(duplicate, plain(8), "value")
    duplicate.load_state_dict(parallelize(plain(9), mesh["tp"]).state_dict())
    same(duplicate, plain(9), "value")
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    duplicate.load_state_dict(torch.load(file))
    same(duplicate, model, "value")


@pytest.mark.slow
def test_what_users_see_of_them() -> None:
    run_ranks(forms, 4)


class Leaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self) -> torch.Tensor:
        return self.linear.weight


def refused() -> None:
    mesh = make_mesh()

    def linear(placement: Any, over: DeviceMesh) -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4, bias=False))
        tensor = DTensor.from_local(torch.ones(4, 4), over, [placement] * over.ndim)
        module[0].weight = nn.Parameter(tensor)
        return module

    data, strided = FsdpContext(mesh["dp"]), _StridedShard(0, split_factor=2)
    for module, ctx, error, match in (
        (linear(Partial(), mesh["tp"]), data, TypeError, "only Shard"),
        (linear(strided, mesh["tp"]), data, TypeError, "only Shard"),
        (linear(Replicate(), mesh["tp"]), FsdpContext(), ValueError, "make one mesh"),
        (linear(Replicate(), mesh["tp"]), FsdpContext(mesh["tp"]), ValueError, "make one mesh"),
        (linear(Replicate(), mesh), data, ValueError, "make one mesh"),
    ):
        weight = module[0].weight
        with pytest.raises(error, match=match):
            fully_shard(module, ctx)
        assert module[0].weight is weight
    odd = nn.Linear(4, 5, bias=False)
    rows = 1 + 3 * mesh["tp"].get_local_rank()
    odd.weight = nn.Parameter(
        DTensor.from_local(
            torch.ones(rows, 4), mesh["tp"], [Shard(0)], shape=torch.Size([5, 4]), stride=(4, 1)
        )
    )
    with pytest.raises(ValueError, match="this rank holds"):
        fully_shard(odd, data)
    leaks = Leaks()
    leaks.linear.weight = nn.Parameter(
        distribute_tensor(leaks.linear.weight.detach(), mesh["tp"], [Shard(0)])
    )
    fully_shard(leaks, FsdpContext(mesh["dp"]))
    with pytest.raises(RuntimeError, match="returned a parameter of its own"):
        leaks()


def test_what_cannot_be_right_is_refused() -> None:
    run_ranks(refused, 4)


def orthogonalize() -> None:
    mesh = make_mesh()
    module, twin = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    twin.load_state_dict(module.state_dict())
    copied = distribute_tensor(module.weight.detach(), mesh["tp"], [Replicate()])
    module.weight = nn.Parameter(copied)
    fully_shard(module, FsdpContext(mesh["dp"]))
    steps = [Muon(each.parameters(), lr=0.1) for each in (module, twin)]
    for _ in range(2):
        weight: Any = module.weight
        weight.grad = weight.detach() * 3
        twin.weight.grad = twin.weight.detach() * 3
        for each in steps:
            each.step()
    torch.testing.assert_close(whole(module.weight), twin.weight.detach())


def test_muon_steps_matrices_that_tensor_parallelism_copies() -> None:
    run_ranks(orthogonalize, 4)


# Checkpoints

MAKES: dict[str, Callable[..., Any]] = {"ours": ours, "FSDP2": torchs}


def trained(model: nn.Module, data_ranks: int, rank: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for tokens, targets in batches(1, data_ranks):
        loss_of(model, tokens.split(ROWS)[rank], targets.split(ROWS)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save(folder: Path, make: str) -> Any:
    mesh = make_mesh()
    model = MAKES[make](mesh)
    optimizer = trained(model, 2, mesh["dp"].get_local_rank())
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    return everything(model, optimizer)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = whole(value)
    return found


def load_all(folder: Path, makes: list[str], expected: dict[str, Any], safely: bool) -> None:
    for make in makes:
        load(folder, make, expected, safely)


def load(folder: Path, make: str, expected: dict[str, Any], safely: bool) -> None:
    if make == "data parallel":
        model = shard(plain(8), FsdpContext())
    elif make == "not sharded":
        model = plain(8)
    else:
        model = MAKES[make](make_mesh(), seed=8)
    optimizer = trained(model, 1, 0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    reader = SafeFileSystemReader(folder) if safely else dcp.FileSystemReader(folder)
    dcp.load(states, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    loaded = everything(model, optimizer)
    assert loaded.keys() == expected.keys()
    for name, value in loaded.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES)
def test_checkpoints_move_to_other_ranks_and_to_torch(tmp_path: Path, make: str) -> None:
    expected = run_ranks(save, 4, tmp_path, make)[0]
    run_ranks(load_all, 4, tmp_path, ["ours"], expected, True)
    if make == "ours":
        run_ranks(load_all, 4, tmp_path, ["FSDP2", "data parallel"], expected, False)
        run_ranks(load_all, 2, tmp_path, ["ours"], expected, True)
        run_ranks(load_all, 1, tmp_path, ["not sharded"], expected, False)


def full_state_dicts() -> None:
    mesh = make_mesh()
    model = ours(mesh)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    expected = plain().state_dict()
    assert full.keys() == expected.keys()
    assert all(torch.equal(full[name], expected[name]) for name in full)
    for broadcast in (False, True):
        other = ours(mesh, seed=8)
        given = dict(full) if not broadcast or dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(other, given, options=options)
        same(other, model, f"value, broadcast={broadcast}")


def test_full_state_dicts_go_out_and_in() -> None:
    run_ranks(full_state_dicts, 4)
