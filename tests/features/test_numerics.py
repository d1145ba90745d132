"""What is computed in which dtype, as data and in ``print(ctx)``, and warnings of what costs
precision."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
)

from fsdp_overlap import (
    FsdpContext,
    MixedPrecisionPolicy,
    NumericsWarning,
    PerTensor,
    QuantizedCommPolicy,
    UnitDtypes,
    fully_shard,
    patch_fsdp2,
    unit_dtypes,
)
from fsdp_overlap.features.numerics import MICROBATCHES, UNUSED_STEPS
from fsdp_overlap.optim import AdamW, LayerWise, Muon, OverlapPolicy
from fsdp_overlap.tools.emulator import fake_ranks
from support.emulated import run
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.zoo import Block, Model, shard_layers

WARNINGS = re.findall(r"^    ``([a-z-]+)``: ", str(NumericsWarning.__doc__), re.MULTILINE)
STEP, ADD, REDUCE, SCALER, BUFFER, NONE, UNUSED = WARNINGS
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MIXED = MixedPrecisionPolicy(BF16, FP32)
MANY = MICROBATCHES[BF16]


@contextmanager
def collected() -> Iterator[list[str]]:
    """The messages of the category that come meanwhile."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", NumericsWarning)
        yield messages
    messages += [str(each.message) for each in found if each.category is NumericsWarning]


def names_of(messages: list[str]) -> list[str]:
    names = [message[1 : message.index("]")] for message in messages]
    assert set(names) <= {*WARNINGS}
    return names


Make = Callable[[Any], torch.optim.Optimizer]


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def train(
    build: Callable[[], nn.Module] = Model,
    make: Make = adamw,
    *,
    steps: int = 4,
    microbatches: int = 1,
    syncs: bool = True,
    device: str = "cpu",
    layout: Any = None,
    **options: Any,
) -> Any:
    """Train, and return the model."""
    ctx = FsdpContext(**({} if layout is None else {"layout": layout}))
    model: Any = build().to(device)
    shard_layers(model, ctx, **options)
    step(model, make(model), steps, microbatches, syncs)
    return model


def step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    microbatches: int = 1,
    syncs: bool = True,
) -> None:
    device = next(model.parameters()).device
    for _ in range(steps):
        for microbatch in range(1, microbatches + 1):
            model.set_requires_gradient_sync(syncs or microbatch == microbatches)
            model(torch.zeros(1, 2, dtype=torch.int64, device=device)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def bf16() -> nn.Module:
    return Model().bfloat16()


class KeepsCopies(torch.optim.SGD):
    """An optimizer of another package, which keeps the weights in float32 as a state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    copy = state.setdefault("weights", parameter.float())
                    parameter.copy_(copy.sub_(parameter.grad.float(), alpha=0.1))


class Copying(torch.optim.SGD):
    """torch's optimizer, which steps copies of the weights."""

    def __init__(self, parameters: Any) -> None:
        self.originals = [*parameters]
        copies = [p.to_local().detach().float().requires_grad_() for p in self.originals]
        super().__init__(copies, lr=0.1)
        self.register_step_pre_hook(self.take)
        self.register_step_post_hook(self.give)

    def take(self, *_: Any) -> None:
        for own, copy in zip(self.originals, self.param_groups[0]["params"], strict=True):
            copy.grad = None if own.grad is None else own.grad.to_local().float()

    @torch.no_grad()
    def give(self, *_: Any) -> None:
        for own, copy in zip(self.originals, self.param_groups[0]["params"], strict=True):
            own.to_local().copy_(copy)


class Freed(nn.Module):
    """A model of which one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.embedding, self.unused = nn.Embedding(3, 6), nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def with_some_unused() -> nn.Module:
    return Freed()


def frozen_unused() -> nn.Module:
    model = Freed()
    model.unused.requires_grad_(False)
    return model


class Rotary(Model):
    dtype = BF16

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_buffer("inv_freq", torch.ones(3, dtype=self.dtype))
        self.layers[1].register_buffer("scale", torch.ones(3, dtype=BF16))


class PreciseRotary(Rotary):
    dtype = FP32


def layers_alone(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.layers.parameters())


def two_optimizers(model: Any) -> torch.optim.Optimizer:
    model.other = torch.optim.SGD([*model.embedding.parameters(), *model.head.parameters()])
    return layers_alone(model)


def scaled(model: Any) -> torch.optim.Optimizer:
    model.scaler = torch.amp.GradScaler("cpu")
    return adamw(model)


CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    (STEP, 2, {"build": bf16, "mp_policy": MixedPrecisionPolicy(reduce_dtype=FP32)}, {}),
    (
        ADD,
        2,
        {"microbatches": MANY, "syncs": False, "mp_policy": MixedPrecisionPolicy(BF16, BF16)},
        {"mp_policy": MIXED},
    ),
    (
        REDUCE,
        64,
        {"mp_policy": MixedPrecisionPolicy(BF16, BF16)},
        {"mp_policy": MIXED},
    ),
    (
        SCALER,
        2,
        {"mp_policy": MixedPrecisionPolicy(FP16, FP32)},
        {"make": scaled},
    ),
    (BUFFER, 2, {"build": Rotary, "mp_policy": MIXED}, {"build": PreciseRotary}),
    (NONE, 2, {"make": layers_alone}, {"make": two_optimizers}),
    (UNUSED, 2, {"build": with_some_unused, "steps": 12}, {"build": frozen_unused}),
]
CASES[0][3].update(build=Model, mp_policy=MIXED)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "ranks", "options", "right"), CASES, ids=WARNINGS)
def test_each_warning_comes_once_and_not_for_the_right_twin(
    name: str, ranks: int, options: dict[str, Any], right: dict[str, Any]
) -> None:
    def trained(options: dict[str, Any], off: str | None = None) -> list[str]:
        with collected() as messages:
            if off is not None:
                warnings.filterwarnings("ignore", rf"\[{off}\]", NumericsWarning)
            train(**options)
        gc.collect()
        return messages

    [message] = run_on_fake_group(trained, ranks, options)
    assert names_of([message]) == [name]
    assert message.endswith(
        f'warnings.filterwarnings("ignore", r"\\[{name}\\]", fsdp_overlap.NumericsWarning)'
    )
    assert run_on_fake_group(trained, ranks, options, name) == []
    assert run_on_fake_group(trained, ranks, options | right) == []


# ---- weights in few bits ----


def stepped_by(make: Make, build: Callable[[], nn.Module] = bf16) -> list[str]:
    with collected() as messages:
        train(build, make, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32))
    return names_of(messages)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
        lambda model: AdamW(model.parameters(), moment_dtype=FP32),
        lambda model: AdamW(model.parameters(), overlap=OverlapPolicy()),
        Muon,
        partial(Muon, overlap=OverlapPolicy()),
        lambda model: LayerWise(model, sgd),
    ],
    ids=["SGD", "AdamW", "AdamW in a thread", "Muon", "Muon in a thread", "LayerWise"],
)
def test_weights_of_low_precision_are_found_with_each_optimizer(make: Make) -> None:
    assert run_on_fake_group(stepped_by, 2, make) == [STEP]
    assert run_on_fake_group(stepped_by, 2, make, Model) == []


def with_flag(model: Any) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.param_groups[0]["use_kahan_sum"] = True
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda model: KeepsCopies(model.parameters(), lr=0.1),
        lambda model: Copying(model.parameters()),
        with_flag,
    ],
    ids=["copies as states", "copies as parameters", "compensated sums"],
)
def test_optimizers_that_keep_more_bits_of_their_own_are_left_alone(make: Make) -> None:
    assert run_on_fake_group(stepped_by, 2, make) == []


def test_optimizers_of_another_package_are_told_apart_by_their_sources() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    found = [
        run_on_fake_group(stepped_by, 2, lambda model, cls=cls: cls(model.parameters()))
        for cls in (package.Lion, package.StableAdamW)
    ]
    assert found == [[STEP], []]


def test_frozen_weights_of_low_precision_are_left_alone() -> None:
    def build() -> nn.Module:
        model = bf16().requires_grad_(False)
        model.head = nn.Linear(6, 13)
        return model

    def make(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.head.parameters())

    def trained() -> list[str]:
        with collected() as messages:
            train(build, make, mp_policy=MIXED)
        return messages

    assert run_on_fake_group(trained, 2) == []


# ---- sums in few bits ----


@pytest.mark.parametrize(
    ("dtype", "reduced", "syncs", "microbatches", "expected"),
    [
        (BF16, FP32, True, MANY, [STEP, ADD]),
        (BF16, FP32, False, MANY, [STEP]),
        (BF16, None, False, MANY, [STEP, ADD]),
        (FP32, BF16, True, MANY, []),
        (FP32, BF16, False, MANY, [ADD]),
        (FP32, BF16, False, MANY - 1, []),
        (FP32, FP16, False, MANY, []),
    ],
)
def test_sums_of_microbatches_are_judged_by_the_dtype_that_they_are_in(
    dtype: torch.dtype,
    reduced: torch.dtype | None,
    syncs: bool,
    microbatches: int,
    expected: list[str],
) -> None:
    def trained() -> list[str]:
        with collected() as messages:
            policy = MixedPrecisionPolicy(reduce_dtype=reduced)
            train(
                lambda: Model().to(dtype), microbatches=microbatches, syncs=syncs, mp_policy=policy
            )
        return names_of(messages)

    assert run_on_fake_group(trained, 2) == expected


def probe() -> list[str]:
    """Backwards for gradients of the input alone, which add nothing up."""
    ctx = FsdpContext()
    model: Any = nn.Linear(4, 4)
    fully_shard(model, ctx, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with collected() as messages:
        for _ in range(4):
            for _ in range(MANY):
                x = torch.ones(2, 4, requires_grad=True)
                torch.autograd.grad(model(x).sum(), x)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return messages


def test_backwards_that_add_nothing_up_are_not_counted() -> None:
    assert run_on_fake_group(probe, 2) == []


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (63, {"mp_policy": MixedPrecisionPolicy(BF16, BF16)}),
        (64, {"mp_policy": MixedPrecisionPolicy(FP16, FP16), "make": scaled}),
        (64, {"mp_policy": MIXED, "comm_policy": QuantizedCommPolicy(reduce_dtype=BF16)}),
    ],
    ids=["fewer ranks", "float16 has three more bits", "bfloat16 summed in float32"],
)
def test_sums_over_ranks_that_are_precise_enough(ranks: int, options: dict[str, Any]) -> None:
    def trained() -> list[str]:
        with collected() as messages:
            train(**options)
        return messages

    assert run_on_fake_group(trained, ranks) == []


# ---- parameters without an optimizer or without gradients ----


class AtTimes(Freed):
    """Its linear layer is used in the last step before a warning."""

    steps = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x: torch.Tensor = super().forward(tokens)
        return self.unused(x) if self.steps == UNUSED_STEPS else x


def test_parameters_that_are_used_at_times_are_left_alone() -> None:
    def trained(steps: int, build: Callable[[], nn.Module]) -> list[str]:
        with collected() as messages:
            train(build, steps=steps)
        return names_of(messages)

    assert run_on_fake_group(trained, 2, UNUSED_STEPS + 3, AtTimes) == []
    assert run_on_fake_group(trained, 2, UNUSED_STEPS, with_some_unused) == []
    assert run_on_fake_group(trained, 2, UNUSED_STEPS + 1, with_some_unused) == [UNUSED]


def skip_a_tower() -> list[str]:
    """A tower that runs on one rank in one step, and in no other."""
    ctx = FsdpContext()
    model: Any = Freed()
    fully_shard(model.unused, ctx, conditional=True)
    shard_layers(model, ctx)
    with collected() as messages:
        step(model, adamw(model), UNUSED_STEPS + 3)
    return messages


def test_conditional_units_may_have_no_gradients() -> None:
    assert run_ranks(skip_a_tower, 2) == [[], []]


def on_a_device(build: Callable[[], nn.Module], messages: list[str]) -> None:
    model: Any = build().to("emulated")
    shard_layers(model, FsdpContext(init_device_mesh("emulated", (4,))))
    optimizer = adamw(model)
    with collected() as found:
        for _ in range(UNUSED_STEPS + 3):
            step(model, optimizer, 1)
            next(model.parameters()).to_local().sum().item()  # as a program that prints its loss
    messages += found


@pytest.mark.parametrize(
    ("build", "expected"),
    [(with_some_unused, [UNUSED]), (AtTimes, []), (frozen_unused, [])],
    ids=["unused", "used at times", "frozen"],
)
def test_a_host_that_runs_ahead_knows_of_zeros_without_waiting(
    build: Callable[[], nn.Module], expected: list[str]
) -> None:
    messages: list[str] = []
    with fake_ranks(4):
        device = run(partial(on_a_device, build, messages))
    assert names_of(messages) == expected
    assert not device.findings


# ---- who warns, and for how long ----


def with_patched_names() -> tuple[list[str], list[str], int]:
    import torch.distributed.fsdp as fsdp

    with patch_fsdp2():
        model: Any = bf16()
        for layer in model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
    with collected() as messages:
        step(model, adamw(model))
    with collected() as later:
        step(model, sgd(model.parameters()))
    return names_of(messages), names_of(later), hooks()


def test_the_first_rank_alone_warns_and_once() -> None:
    first, second = run_ranks(with_patched_names, 2)
    assert first == ([STEP], [], 0)
    assert second == ([], [], 0)


def hooks() -> int:
    """The number of hooks, once models that are gone have none."""
    gc.collect()
    return len(_global_optimizer_post_hooks)


def watched(build: Callable[[], nn.Module], steps: int) -> None:
    before = hooks()
    model: Any = build()
    shard_layers(model, FsdpContext())
    optimizer = adamw(model)
    step(model, optimizer, steps - 1)
    assert hooks() == before + 1
    step(model, optimizer, 1)
    assert hooks() == before


def test_steady_steps_call_no_hook() -> None:
    run_on_fake_group(watched, 2, Model, 2)
    run_on_fake_group(watched, 2, bf16, 3)
    run_on_fake_group(watched, 2, with_some_unused, UNUSED_STEPS + 1)


def with_later_hooks() -> None:
    before = hooks()
    model: Any = Model()
    shard_layers(model, FsdpContext())
    optimizer, calls = adamw(model), []
    step(model, optimizer, 1)
    handles = [
        register_optimizer_step_post_hook(lambda *_: calls.append("others")) for _ in range(2)
    ]
    step(model, optimizer, 3)
    assert len(calls) == 6
    for handle in handles:
        handle.remove()
    step(model, optimizer, 1)
    assert hooks() == before


def test_hooks_of_others_are_called_all_the_same() -> None:
    """torch iterates over them, and raises if one but the last is removed meanwhile."""
    run_on_fake_group(with_later_hooks, 2)


def forget() -> None:
    before = hooks()
    model: Any = Model()
    ctx = FsdpContext()
    shard_layers(model, ctx)
    model(torch.zeros(1, 2, dtype=torch.int64))
    assert hooks() == before + 1
    context = weakref.ref(ctx)
    del model, ctx
    assert hooks() == before
    assert context() is None


def test_a_model_that_never_steps_is_forgotten_with_its_context() -> None:
    run_on_fake_group(forget, 2)


def step_in_turn() -> list[str]:
    """Two models in turn, and an optimizer of no sharded parameters in between."""
    models = [bf16(), Model()]
    for model in models:
        shard_layers(model, FsdpContext())
    optimizers = [*map(adamw, models), torch.optim.SGD(nn.Linear(2, 2).parameters())]
    with collected() as messages:
        for _ in range(3):
            for model, optimizer in zip([*models, models[0]], optimizers, strict=True):
                step(model, optimizer, 1)
    return names_of(messages)


def test_each_model_is_looked_at_by_itself() -> None:
    assert run_on_fake_group(step_in_turn, 2) == [STEP]


# ---- as data ----


def data() -> None:
    optimizers = []

    def make(model: Any) -> torch.optim.Optimizer:
        optimizers.append(AdamW(model.layers.parameters(), moment_dtype=BF16))
        return optimizers[0]

    model = train(
        make=make,
        layout=PerTensor(),
        mp_policy=MIXED,
        comm_policy=QuantizedCommPolicy(torch.int8, BF16),
        steps=1,
    )
    assert dist.get_world_size() == 2
    model.layers[0].norm.requires_grad_(False)
    ctx = model._fsdp_unit.context
    found = unit_dtypes(model)
    assert found == unit_dtypes(ctx)
    assert {each.unit for each in found} == {"layers.0", "layers.1", "layers.2", "Model"}
    names = {name for each in found if each.unit == "layers.1" for name in each.parameters}
    assert names == {name for name, _ in Block().named_parameters()}
    [matrices] = [e for e in found if e.unit == "layers.1" and "up.weight" in e.parameters]
    assert matrices == UnitDtypes(
        "layers.1",
        matrices.parameters,
        at_rest=FP32,
        gathered=torch.int8,
        computed=BF16,
        accumulated=FP32,
        reduced=BF16,
        summed=FP32,
        gradient=FP32,
        optimizers=("AdamW",),
        states=(BF16,),
    )
    [root] = [each for each in found if each.unit == "Model" and "head.weight" in each.parameters]
    assert (root.optimizers, root.states) == ((), ())


def test_dtypes_are_there_as_data() -> None:
    run_on_fake_group(data, 2)


def table() -> list[str]:
    ctx = FsdpContext()
    model: Any = Model()
    model.layers[2].bfloat16().requires_grad_(False)
    model.layers[1].up.requires_grad_(False)
    for layer in model.layers[:2]:
        fully_shard(layer, ctx, mp_policy=MixedPrecisionPolicy(BF16))
    fully_shard(model.layers[2], ctx)
    fully_shard(model, ctx, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    _optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    return repr(ctx).splitlines()[-6:]


def test_print_shows_a_table_of_what_differs() -> None:
    assert run_on_fake_group(table, 2) == [
        "dtypes                       at rest   gathered  computed  accumulated  reduced"
        "                 stepped",
        "layers.0                     float32   bfloat16  bfloat16  float32      float32"
        "                 SGD",
        "layers.1: 4 of 6 parameters  float32   bfloat16  bfloat16  float32      float32"
        "                 SGD",
        "layers.1: 2 of 6 parameters  float32   bfloat16  bfloat16  -            -"
        "                       no",
        "layers.2                     bfloat16  bfloat16  bfloat16  -            -"
        "                       no",
        "Model                        float32   float32   float32   bfloat16     bfloat16, then "
        "float32  SGD",
    ]
