"""Dtypes of compute, of reductions, of inputs and outputs: as in FSDP2, to the bit on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, fully_shard
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import loss_of
from support.zoo import Model

BF16, FP32 = torch.bfloat16, torch.float32
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Those whose meaning is the same in every release.
POLICIES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "bf16, reduced in fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "bf16, reduced in bf16": {"param_dtype": BF16, "reduce_dtype": BF16},
    "fp32, reduced in bf16": {"reduce_dtype": BF16},
    "fp32, the dtype it has": {"param_dtype": FP32, "reduce_dtype": FP32},
    "outputs cast": {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32},
    "inputs as they come": {
        "param_dtype": BF16,
        "reduce_dtype": FP32,
        "cast_forward_inputs": False,
    },
}
NEW = {"reduce_dtype left out": {"param_dtype": BF16}} if TORCH >= (2, 15) else {}


def train(
    shard: Callable[[nn.Module], None], build: Callable[[], nn.Module], microbatches: int = 2
) -> list[torch.Tensor]:
    """Losses, gradients and parameters of three steps, of which only the last microbatch is
    synchronized."""
    torch.manual_seed(5)
    model: Any = build()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(3):
        for index in range(microbatches):
            model.set_requires_gradient_sync(index == microbatches - 1)
            tokens, targets = torch.randint(13, (2, 3, 5), generator=generator)
            scores = model(tokens)
            loss = loss_of(scores.float(), targets)
            loss.backward()
            found += [scores.detach(), loss.detach()]
        found += [parameter.grad.full_tensor() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found += [parameter.detach().full_tensor() for parameter in model.parameters()]
    return found


def check(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype is its.dtype
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


def shard_theirs(policy: MixedPrecisionPolicy) -> Callable[[nn.Module], None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(model: Any) -> None:
        for layer in model.layers:
            torch_fully_shard(layer, mesh=mesh, mp_policy=replace(policy, output_dtype=None))
        torch_fully_shard(model, mesh=mesh, mp_policy=policy)

    return shard


def shard_ours(policy: MixedPrecisionPolicy) -> Callable[[nn.Module], None]:
    def shard(model: Any) -> None:
        ctx = FsdpContext()
        for layer in model.layers:
            fully_shard(layer, ctx, mp_policy=replace(policy, output_dtype=None))
        fully_shard(model, ctx, mp_policy=policy)

    return shard


def against_fsdp2(policy: MixedPrecisionPolicy, build: Callable[[], nn.Module] = Model) -> None:
    # Gradients in fp32 that are added up in bf16 are rounded once by us and by FSDP2 of 2.13,
    # and twice by that of 2.15.
    has_wide = policy.param_dtype is None or build is not Model
    microbatches = 1 if has_wide and policy.reduce_dtype is BF16 else 2
    ours, theirs = (
        train(shard(policy), build, microbatches) for shard in (shard_ours, shard_theirs)
    )
    check(ours, theirs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*POLICIES, *NEW])
def test_training_is_fsdp2s_to_the_bit(name: str) -> None:
    run_ranks(against_fsdp2, 2, MixedPrecisionPolicy(**(POLICIES | NEW)[name]))


def without_a_reduce_dtype() -> None:
    """Whatever torch's release: in the dtype of the parameters, not of compute."""
    ours = train(shard_ours(MixedPrecisionPolicy(BF16)), Model)
    check(ours, train(shard_theirs(MixedPrecisionPolicy(BF16, FP32)), Model))


def test_without_a_reduce_dtype_gradients_are_reduced_in_the_parameters_own() -> None:
    run_ranks(without_a_reduce_dtype, 2)


class Sees(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
        self.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("mean", torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        values = [x, *rest, *named.values(), self.weight, self.count, self.wave, self.mean]
        self.seen = [value.dtype for value in values]
        return {"y": x.to(self.weight.dtype) @ self.weight, "index": rest[0]}


def sees_as_fsdp2() -> None:
    policy = MixedPrecisionPolicy(BF16, FP32, torch.float64)
    mesh = init_device_mesh("cpu", (2,))
    results: list[Any] = []
    # FSDP2 of 2.11 shards no parameters of integers.
    shards: list[Any] = [fully_shard, torch_fully_shard] if TORCH >= (2, 13) else [fully_shard]
    for shard in shards:
        model = Sees()
        shard(model, mesh=mesh, mp_policy=policy)
        output = model(torch.ones(2, 4), torch.ones(3).int(), mask=torch.ones(2, 4))
        results.append((model.seen, output["y"].dtype, output["index"].dtype))
    assert results[0] == results[-1]
    # Arguments and keywords of floating point alone, and no buffers.
    assert results[0] == (
        [BF16, torch.int32, BF16, BF16, torch.int64, torch.complex64, FP32],
        torch.float64,
        torch.int32,
    )


def test_what_is_cast_is_what_fsdp2_casts() -> None:
    run_on_fake_group(sees_as_fsdp2, 2)


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def complex_gradients() -> None:
    model = fully_shard(Wave(), FsdpContext(), mp_policy=MixedPrecisionPolicy(BF16, BF16))
    model(torch.full((4,), 1 + 2j)).imag.backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4,), 2 + 1j))


def test_a_reduce_dtype_does_not_take_the_imaginary_part_of_gradients() -> None:
    run_ranks(complex_gradients, 2)


# param_dtype_override_fn, of torch 2.15.

needs_override = pytest.mark.skipif(
    not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"),
    reason="this torch has no param_dtype_override_fn",
)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 13)
        self.scale = nn.Parameter(torch.rand(1, 13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scale.dtype is FP32
        return (self.linear(x) * self.scale).to(x.dtype)


class ScaledModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 13)
        self.layers = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def overriding(**options: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        BF16,
        param_dtype_override_fn=lambda p: p.dtype if len(p) == 1 else None,
        **options,
    )


def override(options: dict[str, Any]) -> None:
    against_fsdp2(overriding(**options), ScaledModel)


@needs_override
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": FP32}, {"reduce_dtype": BF16}])
def test_parameters_that_keep_their_dtype_train_as_in_fsdp2(options: dict[str, Any]) -> None:
    run_ranks(override, 2, options)


def overridden_param_groups() -> None:
    layer = Scaled()
    kept = {layer.scale}
    policy = MixedPrecisionPolicy(
        BF16,
        param_dtype_override_fn=lambda p: p.dtype if p in kept else None,  # type: ignore[call-arg]
    )
    layer = fully_shard(layer, FsdpContext(), mp_policy=policy)
    for module in (layer, copy.deepcopy(layer), copy.deepcopy(copy.deepcopy(layer))):
        module(torch.ones(2, 13)).sum().backward()  # which looks at the dtype
        param_groups = module._fsdp_unit.param_groups
        assert [param_group.compute_dtype for param_group in param_groups] == [FP32, BF16] or [
            param_group.compute_dtype for param_group in param_groups
        ] == [BF16, FP32]
        assert {param_group.label for param_group in param_groups} == {
            "Scaled [float32 as bfloat16]",
            "Scaled [float32]",
        }


@needs_override
def test_parameters_that_keep_their_dtype_are_a_bucket_of_their_own() -> None:
    run_ranks(overridden_param_groups, 1)


def refused_override(where: str) -> None:
    layer = nn.Linear(4, 4)
    policy: Any
    if where == "another dtype":
        policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda p: torch.float16)
        message = "param_dtype_override_fn gave torch.float16 for parameter 'weight' of Linear: "
    else:
        policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda p: p.dtype)
        message = "units with a param_dtype_override_fn cannot be planned ahead"
    ctx = FsdpContext()
    if where == "planned ahead":
        ctx.plan_layout([layer])
    with pytest.raises(ValueError, match=message):
        fully_shard(layer, ctx, mp_policy=policy)
    assert type(layer.weight) is nn.Parameter


@needs_override
@pytest.mark.parametrize("where", ["another dtype", "planned ahead"])
def test_an_override_that_cannot_be_followed_is_refused(where: str) -> None:
    run_ranks(refused_override, 1, where)
