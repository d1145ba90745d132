"""Implicit units: large modules of what no other unit takes are units of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap import (
    BlockAtomic,
    Flat,
    FsdpContext,
    PerTensor,
    TensorAtomic,
    fully_shard,
)
from fsdp_overlap.engine.unit import Unit, unit_of
from fsdp_overlap.features import implicit_units
from fsdp_overlap.fsdp_module import FSDPModule
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.optim import AdamW
from fsdp_overlap.tools.emulator import EmulatedDevice, fake_ranks, running
from fsdp_overlap.tools.simulator.simulate import BACKEND
from support.fake_group import run_on_fake_group
from support.ranks import expect_rank_errors, run_ranks

VOCABULARY, WIDTH = 64, 32
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def small() -> Any:
    """Let parameters of 1 KiB be large."""
    return patch.object(implicit_units, "LARGE", 1 << 10)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.hidden(ids))
        return scores

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h).relu()
        normed: torch.Tensor = self.norm(h)
        return normed


class Tied(Model):
    """Its forward reads the embedding's parameter, which is no other module's."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(ids), self.embed.weight)


LAYOUTS: list[LayoutRule] = [Flat(), BlockAtomic(rows=1), TensorAtomic(), PerTensor()]


def shard(model: Any, implicit: bool, layout: LayoutRule = Flat(), **options: Any) -> FsdpContext:  # noqa: B008, frozen
    ctx = FsdpContext(layout=layout, implicit_units=implicit)
    ctx.plan_layout([*model.blocks, model])
    for block in model.blocks:
        fully_shard(block, ctx, **options)
    fully_shard(model, ctx, **options)
    return ctx


def batch(step: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(VOCABULARY, (3, 4), generator=seed)


def same(models: list[Any], of: Callable[[Any], Any]) -> None:
    for first, *others in zip(*(model.named_parameters() for model in models), strict=True):
        for name, value in others:
            assert torch.equal(of(first[1]), of(value)), name


def trains_alike(layout: LayoutRule, policy: Any, options: dict[str, Any]) -> None:
    """Train with and without implicit units: the same bits, also of copies."""
    torch.manual_seed(0)
    plain = Model()
    models: list[Any] = [copy.deepcopy(plain), plain]
    if policy is not None:
        options = {**options, "mp_policy": policy}
    with small():
        contexts = [shard(m, m is not plain, layout, **options) for m in models]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
        for step in range(4):
            for model in models:
                for is_last in (False, True):
                    model.set_requires_gradient_sync(is_last)
                    model(batch(step)).float().square().mean().backward()
            same(models, lambda parameter: parameter.grad.full_tensor())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                outputs = [model.eval()(batch(step)) for model in models]
            assert torch.equal(*outputs)
            for model in models:
                model.train()
        units = {unit.name: unit for unit in contexts[0].units}
        assert {"embed", "head"} <= units.keys()
        assert len(contexts[1].units) == 4
        assert ["implicit units" in str(ctx) for ctx in contexts] == [True, False]
        if options.get("reshard_after_forward", True) is not False:
            assert not any(unit.is_gathered for unit in units.values())
        models.append(copy.deepcopy(models[0]))
        for model in models:
            model(batch(9)).float().square().mean().backward()
        same(models, lambda parameter: parameter.grad.full_tensor())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)
def test_training_is_the_same_to_the_bit(layout: LayoutRule) -> None:
    run_ranks(trains_alike, 2, layout, None, {})


@pytest.mark.parametrize("reshards", [False, True, 2])
def test_whatever_is_kept_after_forward(reshards: bool | int) -> None:
    run_ranks(trains_alike, 2, Flat(), LOW, {"reshard_after_forward": reshards})


class FusedHead(torch.autograd.Function):
    """As fused losses are, which torch asks no tensor class about."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.of_weight = h.flatten(0, 1).sum(0).expand(weight.shape)
        return h @ weight.t()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, ctx.of_weight


class Fused(Model):
    def forward(self, ids: torch.Tensor) -> Any:
        return FusedHead.apply(self.hidden(ids), self.head.weight)


def reads_another(build: Callable[[], Any]) -> None:
    with small():
        model = build()
        shard(model, implicit=True)
    model(batch(0)).sum().backward()


@pytest.mark.parametrize("build", [Tied, Fused])
def test_a_read_outside_of_the_module_is_refused(build: Callable[[], Any]) -> None:
    expect_rank_errors(reads_another, 2, build, match="is not supported on a RaggedDTensor")


def reads_in_hooks() -> None:
    with small():
        model: Any = Model()
        model.embed.register_forward_hook(lambda module, args, output: output * module.weight[0])
        shard(model, implicit=True)
        model(batch(0)).sum().backward()


def test_an_embedding_with_hooks_is_gathered_for_backward() -> None:
    run_ranks(reads_in_hooks, 2)


def trains_in_stages() -> None:
    torch.manual_seed(0)
    models: list[Any] = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    with small():
        contexts = [shard(model, model is models[0]) for model in models]
    optimizers = [AdamW(model.parameters(), lr=0.01) for model in models]
    for step, stage in enumerate((3, 2, 2, 1, 1, 3, 3)):
        for model, ctx, optimizer in zip(models, contexts, optimizers, strict=True):
            model.set_zero_stage(stage)
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                ctx.start_param_sync()
        same(models, lambda parameter: parameter.full_tensor())


def test_stages_and_gathers_between_steps() -> None:
    run_ranks(trains_in_stages, 2)


def order_of_collectives() -> list[str]:
    with small():
        model = Model()
        ctx = shard(model, implicit=True)
    issued: list[str] = []
    comm = ctx.comm_context
    gather, reduce = comm.gather, comm.reduce

    def noted_gather(unit: Unit, shadow: bool = False) -> None:
        issued.append(f"gather {unit.name}")
        gather(unit, shadow=shadow)

    def noted_reduce(gradients: Any) -> Any:
        issued.append(f"reduce {gradients.param_group.label}")
        return reduce(gradients)

    with patch.object(comm, "gather", noted_gather), patch.object(comm, "reduce", noted_reduce):
        for _ in range(2):
            issued.clear()
            model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
            ctx.release_unsharded()
    return issued


def test_each_is_gathered_before_its_use_and_reduced_after_it() -> None:
    assert run_on_fake_group(order_of_collectives, 4) == [
        *(f"gather {name}" for name in ["Model", "embed", *BLOCKS, "head"]),
        "gather blocks.1",
        "reduce head",
        "gather blocks.0",
        "reduce blocks.2",
        "reduce blocks.1",
        "reduce blocks.0",
        "reduce embed",
        "reduce Model",
    ]


def set_on_root(model: Any) -> None:
    model.set_gradient_divide_factor(3.0)
    model.set_reshard_after_backward(False, recurse=False)


def settings_reach_them() -> None:
    with small():
        model: Any = Model()
        shard(model, implicit=True)
    set_on_root(model)
    for module in (model, model.embed, model.head):
        settings = unit_of(module).settings  # type: ignore[union-attr]
        assert settings.reduce_options.divisor == 3.0
        assert not settings.reshard_after_backward
    assert unit_of(model.blocks[0]).settings.reshard_after_backward  # type: ignore[union-attr]
    model.unshard()
    assert type(model.embed.weight) is type(model.head.weight) is nn.Parameter
    model.reshard()
    assert isinstance(model.embed, FSDPModule)
    assert type(model.embed.weight) is not nn.Parameter


def test_what_is_set_on_the_root_holds_for_them() -> None:
    run_ranks(settings_reach_them, 1)


def which(build: Callable[[], Any]) -> list[str]:
    with small():
        model = build()
        ctx = FsdpContext(implicit_units=True)
        for block in model.blocks:
            fully_shard(block, ctx)
        fully_shard(model, ctx)
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    return [unit.name for unit in ctx.units if unit.options.is_implicit]


def tied() -> Any:
    model = Model()
    model.head.weight = model.embed.weight
    return model


def frozen() -> Any:
    model = Model()
    model.embed.requires_grad_(False)
    return model


def test_tied_modules_stay_with_the_root() -> None:
    assert run_ranks(which, 1, tied) == [[]]
    assert run_ranks(which, 1, Model) == [["embed", "head"]]
    assert run_ranks(which, 1, frozen) == [["embed", "head"]]


def small_ones_stay() -> None:
    model: Any = Model()
    ctx = shard(model, implicit=True)
    assert len(ctx.units) == 4
    model = Model()
    whole = FsdpContext(implicit_units=True)
    with small():
        fully_shard(model, whole)
    assert len(whole.units) == 1  # nothing to gather it beside


def test_small_ones_stay_with_the_root() -> None:
    run_ranks(small_ones_stay, 1)


def refuses_after_planning() -> None:
    model: Any = Model()

    def layout(name: str, spec: Any) -> Any:
        return "none" if name.startswith("norm") else Flat()

    with small():
        ctx = FsdpContext(layout=layout, implicit_units=True)
        for block in model.blocks:
            fully_shard(block, ctx)
        try:
            fully_shard(model, ctx)
        finally:
            assert type(model.embed) is nn.Embedding
            assert len(ctx.units) == 3
            assert type(model.embed.weight) is nn.Parameter


def test_nothing_is_changed_if_the_rest_is_refused() -> None:
    expect_rank_errors(refuses_after_planning, 1, match="layout")


def keeps_what_the_user_sets() -> None:
    with small():
        model: Any = Model()
        shard(model, implicit=True)
    model.embed.set_unshard_in_backward(True)
    for each in (model, copy.deepcopy(model)):
        assert unit_of(each.embed).settings.unshard_in_backward  # type: ignore[union-attr]


def test_copies_keep_what_the_user_sets() -> None:
    run_ranks(keeps_what_the_user_sets, 1)


# ---- On the emulated device ----


def findings() -> list[Any]:
    device = EmulatedDevice()
    with fake_ranks(4, BACKEND), running(device), small():
        model: Any = Model().to("emulated")
        ctx = FsdpContext(init_device_mesh("emulated", (4,)), implicit_units=True)
        for block in model.blocks:
            fully_shard(block, ctx)
        fully_shard(model, ctx)
        optimizer = AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.zeros(2, 3, dtype=torch.long, device="emulated")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(device.findings)


def test_no_read_comes_too_early_on_a_device() -> None:
    assert not findings()


def test_a_head_that_is_not_gathered_for_backward_is_found() -> None:
    def reads_nothing(module: nn.Module) -> bool:
        return False

    with (
        patch.object(implicit_units, "reads_in_backward", reads_nothing),
        patch.object(Unit, "is_kept_for_backward", property(lambda unit: False)),
        pytest.raises(RuntimeError, match="reads a parameter of shape"),
    ):
        findings()
