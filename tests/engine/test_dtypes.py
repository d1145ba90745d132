"""Parameters of every dtype, also of those that backends have not: gathered, reduced and read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap import FsdpContext, RaggedDTensor, distribute_tensor, fully_shard
from fsdp_overlap.layout import Flat, LayoutRule, TensorAtomic
from fsdp_overlap.tools.emulator.nccl_like import BACKEND
from support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TRAINED = (torch.complex64, torch.complex32)
FROZEN = (torch.int16, torch.uint64, torch.bool, torch.float8_e5m2)
# What is read is read one by one, and so cheap.
OTHERS = (
    *(torch.complex128, torch.float16, torch.bfloat16, torch.int8, torch.uint16, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e8m0fnu),
)
LAYOUTS: list[LayoutRule] = [Flat(), TensorAtomic()]


def values_of(dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    """Numbers that need every bit of an integer."""
    numbers = torch.arange(shape[0] * shape[1]).view(shape)
    if dtype.is_complex:
        return (numbers * (1 - 1j)).to(dtype)
    if dtype.is_floating_point or dtype.itemsize == 1:
        return numbers.to(dtype)
    return numbers.mul(2 ** (8 * dtype.itemsize - 5)).to(dtype)


class Zoo(nn.Module):
    """A weight of each dtype; the complex ones are trained."""

    def __init__(self) -> None:
        super().__init__()
        for index, dtype in enumerate((*TRAINED, *FROZEN)):
            weight = nn.Parameter(values_of(dtype, (5, 3 + index)), requires_grad=dtype in TRAINED)
            self.register_parameter(str(dtype).replace("torch.", "of_"), weight)

    def forward(self, factor: float) -> torch.Tensor:
        loss = torch.zeros(())
        for weight in self._parameters.values():
            assert weight is not None
            if weight.dtype in FROZEN:
                assert same_bytes(weight, values_of(weight.dtype, tuple(weight.shape)))
            else:
                loss = loss + (weight.to(torch.complex64) * complex(factor, 2.0)).real.sum()
        return loss


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(t.detach().contiguous().view(torch.uint8) for t in (one, other)))


def train(
    layout: LayoutRule, mesh: tuple[int, ...], shard_optimizer_over_replicas: bool, reshard: Any
) -> None:
    names = ("replicate", "shard")[-len(mesh) :]
    ctx = FsdpContext(
        init_device_mesh("cpu", mesh, mesh_dim_names=names),
        layout=layout,
        shard_optimizer_over_replicas=shard_optimizer_over_replicas,
    )
    model = fully_shard(Zoo(), ctx, reshard_after_forward=reshard)
    fully_shard(outer := nn.Sequential(model), ctx)
    for divisor in (4.0, 2.0):
        if divisor != 4.0:  # of as many ranks
            model.set_gradient_divide_factor(divisor)
        outer(1.0 + dist.get_rank()).backward()
        for name, weight in model.named_parameters():
            assert isinstance(weight, RaggedDTensor)
            if weight.dtype in FROZEN:
                assert weight.grad is None
                continue
            assert same_bytes(weight.full_tensor(), values_of(weight.dtype, tuple(weight.shape)))
            assert weight.grad is not None, name
            assert weight.grad.dtype == weight.dtype
            gradient = weight.grad.full_tensor()
            mean = complex(1 + 2 + 3 + 4, -4 * 2) / divisor
            assert same_bytes(gradient, torch.full_like(gradient, mean)), name
        model.zero_grad()


MODES: list[Callable[[LayoutRule], None]] = [
    partial(train, mesh=(4,), shard_optimizer_over_replicas=False, reshard=None),
    partial(train, mesh=(4,), shard_optimizer_over_replicas=False, reshard=2),
    partial(train, mesh=(2, 2), shard_optimizer_over_replicas=False, reshard=True),
    partial(train, mesh=(2, 2), shard_optimizer_over_replicas=True, reshard=True),
]


def train_all() -> None:
    for mode in MODES:
        for layout in LAYOUTS:
            mode(layout)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["gloo", BACKEND])
def test_every_dtype_is_gathered_and_reduced_in_every_mode(backend: str) -> None:
    run_ranks(train_all, 4, backend=backend)


def read() -> None:
    """What else sends values of a parameter's dtype."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rank = dist.get_rank()
    for dtype in (*TRAINED, *FROZEN, *OTHERS):
        values = values_of(dtype, (5, 3))
        mine = values if rank == 0 else torch.zeros_like(values)
        like = fully_shard(nn.Linear(3, 5, bias=False), FsdpContext(mesh)).weight
        sharded = distribute_tensor(mine, mesh, like.placements, src_data_rank=0)
        assert same_bytes(sharded.full_tensor(), values)
    numbers = values_of(torch.complex64, (5, 3))
    for lazy in (numbers.conj(), torch._neg_view(numbers.real.contiguous())):
        sharded = distribute_tensor(lazy, mesh, like.placements, src_data_rank=0)
        assert torch.equal(sharded.full_tensor(), lazy.clone())
    for dtype in (torch.int16, torch.int8, torch.bool):
        whole = values_of(dtype, (5, 3))
        sharded = distribute_tensor(whole, mesh, like.placements, src_data_rank=None)
        assert torch.equal(sharded.amax(), whole.amax())
        assert torch.equal(sharded.amin(), whole.amin())
        torch.manual_seed(rank)  # where there are copies they are those of the first
        first = sharded.random_().full_tensor()
        held = [torch.empty_like(first) for _ in range(4)]
        dist.all_gather_object(held, first)
        assert all(torch.equal(each, first) for each in held)


@pytest.mark.parametrize("backend", ["gloo", BACKEND])
def test_tensors_of_every_dtype_are_distributed_read_and_drawn(backend: str) -> None:
    run_ranks(read, 4, backend=backend)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4).to(torch.float8_e5m2))

    def forward(self, factor: float) -> torch.Tensor:
        return self.weight.float().sum() * factor


def refuse() -> None:
    model = Narrow()
    weight = model.weight
    for dtype, options in (
        ("float8_e5m2", {}),
        ("int32", {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.int32)}),
    ):
        with pytest.raises(ValueError, match=rf"'weight' of Narrow would be .* torch\.{dtype}, in"):
            fully_shard(model, **options)
        assert type(model) is Narrow
        assert model.weight is weight
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    model(1.0 + 2 * dist.get_rank()).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.full_tensor().float().tolist() == [2.0] * 4


def test_dtypes_in_which_nothing_can_be_summed_are_refused() -> None:
    run_ranks(refuse, 2)
