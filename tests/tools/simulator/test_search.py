"""The search for the best plan: estimates, memory, what is skipped, and the plan as code."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_overlap import PerTensor
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Step, Training, search, simulate
from fsdp_overlap.tools.simulator.choices import (
    LEANEST_FIRST,
    PREFETCH,
    leanest,
    needs_no_less,
    ways_to_save,
    with_defaults,
    works,
)
from fsdp_overlap.tools.simulator.estimate import StepCost, count_equal_blocks, estimate, measure
from fsdp_overlap.tools.simulator.float8 import fused_casts
from fsdp_overlap.tools.simulator.models import longest_run, shorten
from fsdp_overlap.tools.simulator.plan_code import code_of
from fsdp_overlap.tools.simulator.search import DOES_NOT_FIT
from support.cli_runs import run_main

WIDTH, BLOCKS, VOCABULARY = 1024, 4, 1000
MIB = 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.down(F.gelu(self.up(hidden)))
        return out


class Tiny(nn.Module):
    """Of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


class Short(Tiny):
    def __init__(self) -> None:
        super().__init__()
        del self.layers[1:]


class Long(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(Block() for _ in range(8))


class Longer(Long):
    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(Block() for _ in range(8))


class Alternating(Longer):
    """Every third block takes twice as long, as layers without a window do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(layer_types=["window", "window", "full"] * 6 + ["window"] * 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=False):
            hidden = layer(layer(hidden)) if kind == "full" else layer(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


class OneByOne(Tiny):
    """Takes one sequence at a time."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 1:
            raise NotImplementedError("several sequences")
        return super().forward(tokens)


NAMES = "Tiny", "Short", "Long", "Longer", "OneByOne", "Alternating"
TINY, SHORT, LONG, LONGER, ONE_BY_ONE, ALTERNATING = (f"{__name__}:{name}" for name in NAMES)
COSTS = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))


TAKEN: dict[Training, StepCost] = {}
"""What plans were found to take, with ``COSTS``."""


def measure_once(plan: Training, costs: Costs) -> StepCost:
    assert costs is COSTS
    if plan not in TAKEN:
        TAKEN[plan] = measure(plan, costs)
    return TAKEN[plan]


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches try the same plans, some of them twice, and a plan takes the same every time."""
    for module in (search.__module__, estimate.__module__):
        monkeypatch.setattr(sys.modules[module], "measure", measure_once)


def training(**options: Any) -> Training:
    return Training(**{"model": TINY, "gpus": 64, "sequence": 4096, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch": 3},
        {"blocks_per_unit": 2},
        {"stage": 2},
        {"reshard_after_forward": 8, "checkpointing": "full"},
        {"microbatches": 3, "reduce_each": True, "sequence": 512},
        {"microbatches": 3, "sequence": 512, "checkpointing": "selective"},
        {"model": LONGER, "checkpointing": "selective", "selective_ac_option": "3"},
        {"model": ALTERNATING},
    ],
    ids=str,
)
def test_short_models_tell_what_the_whole_takes(options: dict[str, Any]) -> None:
    needs_more = "blocks_per_unit" in options or "prefetch" in options
    plan = training(**{"model": LONGER if needs_more else LONG} | options)
    blocks = count_equal_blocks(plan.model)
    told, took = estimate(plan, COSTS, blocks), measure(plan, COSTS)
    assert told.seconds == pytest.approx(took.seconds, rel=0.02)
    assert told.compute == pytest.approx(took.compute, rel=0.01)
    assert told.memory == pytest.approx(took.memory, rel=0.02)
    assert told.reserved == pytest.approx(took.reserved, rel=0.1)
    assert told.exposed is None


def test_a_model_is_shortened_where_its_blocks_are_equal() -> None:
    model = Tiny()
    model.layers[0] = nn.Linear(WIDTH, WIDTH)
    run = longest_run(model)
    assert run is not None
    assert (run.start, run.length) == (1, BLOCKS - 1)
    shorten(model, 2)
    assert [type(layer) for layer in model.layers] == [nn.Linear, Block, Block]
    with pytest.raises(ValueError, match="has no 3 equal blocks"):
        shorten(model, 3)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("types", "run", "kept"),
    [
        ("wwfwwfw", (0, 7, 3), "wwfw"),
        ("wwww", (0, 4, 1), "wwww"),
        ("wffffff", (1, 6, 1), "wffff"),
        ("ffffwww", (0, 4, 1), "ffffwww"),
        ("wwwwwf", (0, 5, 1), "wwwwf"),
    ],
)
def test_shortened_models_have_layers_of_the_same_kinds(
    types: str, run: tuple[int, int, int], kept: str
) -> None:
    model = Longer()
    del model.layers[len(types) :]
    config = model.config = SimpleNamespace(layer_types=list(types))  # type: ignore[assignment]
    found = longest_run(model)
    assert found is not None
    assert found[1:] == run
    shorten(model, 4)
    assert "".join(config.layer_types[: len(model.layers)]) == kept


@pytest.mark.slow
def test_what_is_said_to_take_no_less_memory_takes_no_less() -> None:
    base = leanest(training(micro_batch_size=2, sequence=2048))
    base = replace(base, checkpointing=LEANEST_FIRST[0])
    grown = [
        replace(base, prefetch=2),
        replace(base, reshard_after_forward=8),
        replace(base, stage=2),
        replace(base, blocks_per_unit=4),
        replace(base, checkpointing="selective"),
        replace(base, checkpointing="none"),
        replace(base, micro_batch_size=4),
    ]
    took = {plan: measure(plan, COSTS).memory for plan in (base, *grown)}
    for one, other in product(took, took):
        if needs_no_less(one, other):
            assert took[one] >= took[other]
    assert all(needs_no_less(plan, base) for plan in grown)
    assert took[grown[2]] > took[base] + (BLOCKS - 1) * 2 * 8 * WIDTH**2  # weights in 16 bits


def cut(found: Training) -> tuple[Any, ...]:
    return found.micro_batch_size, found.checkpointing


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_the_best_plan_is_that_of_an_exhaustive_search() -> None:
    given, limit = training(sequence=2048), 500 * MIB
    found = search(given, COSTS, memory=limit)
    assert all(plan.taken.reserved <= limit for plan in found.plans)
    best = found.plans[0]
    everything = [
        replace(given, checkpointing=kind, prefetch=prefetch, stage=stage, blocks_per_unit=size)
        for kind in ("none", "full")
        for prefetch, stage, size in product((1, 3), (2, 3), (1, 4))
    ]
    took = [taken for plan in everything if (taken := measure_once(plan, COSTS)).reserved <= limit]
    assert best.seconds <= 1.005 * min(each.seconds for each in took)
    assert found.tried < 3 * 4 * 3 * 5 * 3 / 6  # a sixth of all that may be chosen
    assert found.defaults is not None
    assert found.given_fits
    assert found.defaults.training == given
    assert found.speedup == pytest.approx(found.defaults.seconds / best.seconds)
    again = simulate(best.training.program, 64, COSTS)
    assert (again.seconds, again.reserved) == (best.seconds, best.taken.reserved)


def made_up(plan: Training, *_: object) -> StepCost:
    """Time and memory that every choice adds to by itself."""
    again, kept = {"none": (1.0, 8), "selective": (1.1, 4), "full": (1.3, 1)}[plan.checkpointing]
    memory = kept * plan.micro_batch_size + 2 * plan.prefetch + plan.blocks_per_unit
    memory += 0 if plan.stage == 3 else 20
    memory += 0 if plan.microbatches == 1 or plan.reduce_each else 3
    reductions = plan.microbatches if plan.reduce_each else 1
    gathers = plan.microbatches if plan.stage == 3 else 1
    exposed = 0.4 * gathers / (1 + plan.prefetch) + 0.1 * reductions + 0.05 / plan.blocks_per_unit
    return StepCost(again + exposed, again, memory, memory + 2)


@pytest.mark.parametrize("limit", [6, 9, 12, 16, 20, 30, 60])
def test_nothing_is_skipped_that_would_have_been_the_best(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[search.__module__]
    monkeypatch.setattr(module, "estimate", made_up)
    monkeypatch.setattr(module, "measure", made_up)
    given = training(micro_batch_size=4)
    found = search(given, COSTS, memory=limit)
    everything = [
        replace(work, prefetch=prefetch, stage=stage, blocks_per_unit=size, reduce_each=each)
        for works_of_kind in works(given)
        for work in works_of_kind
        for prefetch, stage, size in product(PREFETCH, (2, 3), (1, 2))
        for each in ((False, True) if work.microbatches > 1 else (False,))
    ]
    fitting = [taken for taken in map(made_up, everything) if taken.reserved <= limit]
    assert bool(found.plans) == bool(fitting)
    if fitting:
        assert found.plans[0].seconds == min(taken.seconds for taken in fitting)
        assert [plan.seconds for plan in found.plans] == sorted(p.seconds for p in found.plans)


def saturated(plan: Training, *_: object) -> StepCost:
    """From one unit ahead on, more gain nearly nothing, for more memory."""
    ahead = plan.prefetch
    return StepCost(2.0 - 0.5 * min(ahead, 1) - 1e-5 * ahead, 1.0, 10 + ahead, 10 + ahead)


def test_of_equally_fast_plans_the_one_of_the_least_memory_is_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("estimate", "measure"):
        monkeypatch.setattr(sys.modules[search.__module__], name, saturated)
    found = search(training(), COSTS, memory=100)
    assert found.plans[0].training.prefetch == 1


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_less_memory_gives_a_slower_plan_and_none_if_it_is_too_little() -> None:
    given = training(sequence=2048)
    roomy, tight, none = (search(given, COSTS, memory=limit * MIB) for limit in (20_000, 260, 50))
    assert roomy.plans[0].seconds < tight.plans[0].seconds
    assert {cut(plan.training) for plan in roomy.plans} != {cut(tight.plans[0].training)}
    tokens = {plan.training.tokens for plan in (*roomy.plans, *tight.plans)}
    assert tokens == {2048}
    assert not none.plans
    assert none.least is not None
    assert none.least.taken.reserved > 50 * MIB
    assert none.skipped[DOES_NOT_FIT] > 0


def run_or_made_up(plan: Training, costs: Costs, *_: object) -> StepCost:
    """Runs what may raise: several sequences at once."""
    return measure(plan, costs) if plan.micro_batch_size > 1 else made_up(plan)


def test_what_cannot_run_is_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("estimate", "measure"):
        monkeypatch.setattr(sys.modules[search.__module__], name, run_or_made_up)
    found = search(training(model=ONE_BY_ONE, micro_batch_size=2, sequence=512), COSTS)
    assert {plan.training.micro_batch_size for plan in found.plans} == {1}
    assert found.skipped["NotImplementedError: several sequences"] >= 3
    assert not found.given_fits
    assert found.defaults is not None
    assert found.defaults.training == with_defaults(found.plans[0].training)


CODED = [
    {},
    {"micro_batch_size": 2, "checkpointing": "selective", "blocks_per_unit": 3, "prefetch": 2},
    {"checkpointing": "full", "reshard_after_forward": 8, "optimizer": "torch-adamw"},
    {"stage": 2, "layout": PerTensor(), "replicas": 8},
    {"optimizer": "muon", "layout": TensorAtomic(), "gather_dtype": torch.float8_e4m3fn},
    {"microbatches": 3, "sequence": 512},
    {"implicit_units": True},
    {"microbatches": 3, "sequence": 512, "reduce_each": True, "prefetch": 0},
    {"linear_dtype": "float8", "checkpointing": "selective"},
    {"linear_dtype": "float8", "gather_dtype": torch.float8_e4m3fn, "layout": PerTensor()},
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("options", CODED, ids=str)
def test_the_code_of_a_plan_does_what_was_predicted(options: dict[str, Any]) -> None:
    plan = training(**options)
    code: dict[str, Any] = {}
    exec(code_of(plan), code)

    kept = {}

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = kept["logits"] = model(batch)  # as what is simulated keeps it during backward
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())

    def program() -> Step:
        with torch.device("emulated"):
            model = Tiny()
        optimizer = code["shard"](model, "emulated")

        def batches() -> Any:
            for _ in range(plan.microbatches):
                yield torch.randint(2, (plan.micro_batch_size, plan.sequence), device="emulated")

        def step() -> None:
            given = batches() if plan.microbatches > 1 else next(batches())
            with fused_casts() if plan.linear_dtype else nullcontext():
                code["train_step"](model, optimizer, loss_of, given)

        return step

    done, predicted = simulate(program, 64, COSTS), simulate(plan.program, 64, COSTS)
    assert done.seconds == pytest.approx(predicted.seconds, rel=0.005)
    assert done.memory == pytest.approx(predicted.memory, rel=0.005)
    assert len(done.collectives) == len(predicted.collectives)


def test_the_code_of_a_compiled_plan_compiles_blocks_before_they_are_sharded() -> None:
    assert "compile" not in code_of(training())
    code = code_of(training(checkpointing="full"), compiles=True)
    steps = "partial(checkpoint", "block.compile()", "fully_shard(block"
    assert sorted(steps, key=code.index) == list(steps)


def test_code_says_all_of_a_plan_or_nothing() -> None:
    with pytest.raises(ValueError, match="blocks=3: no code for that"):
        code_of(training(blocks=3))
    with pytest.raises(ValueError, match="loss='chunked': no code for that"):
        code_of(training(loss="chunked"))


def test_code_says_what_else_was_predicted() -> None:
    assert "compile the loss" in code_of(training(), compiles=True)
    assert "compile the loss" not in code_of(training(loss="eager"), compiles=True)
    setting = "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert setting in code_of(training(), expandable_segments=True)
    assert setting not in code_of(training())


@pytest.mark.slow
def test_ways_to_save_are_options_that_save() -> None:
    plan = training(micro_batch_size=2, blocks_per_unit=2, stage=2)
    found = ways_to_save(plan)
    assert list(found) == [
        "--prefetch 0",
        "--blocks-per-unit 1",
        "--stage 3",
        "--checkpointing selective",
        "--checkpointing full",
        "--micro-batch-size 1 --microbatches 2 --reduce-each",
    ]
    memory = measure_once(plan, COSTS).memory
    assert all(measure_once(each, COSTS).memory <= memory for each in found.values())
    assert all(each.tokens == plan.tokens for each in found.values())
    assert not ways_to_save(leanest(training(checkpointing="full")))
    assert list(ways_to_save(with_defaults(training(checkpointing="full")))) == ["--prefetch 0"]


@pytest.mark.slow
def test_the_command_prints_the_best_plan_as_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "best"
    options = "--gpus 64 --sequence 512 --memory 4 --price 2 --best --out"
    assert run_main("simulate", SHORT, *options.split(), str(out)) == 0
    shown = capsys.readouterr().out
    assert "plans tried" in shown
    assert "less time than the library's defaults" in shown
    assert "a billion tokens" in shown
    code = (out / "plan.py").read_text()
    assert "def shard(model" in code
    assert code in shown
    compile(code, "plan.py", "exec")


@pytest.mark.slow
def test_the_command_says_that_nothing_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # New processes import for seconds.
    monkeypatch.setattr("fsdp_overlap.tools.cli.simulate.PROCESSES", 1)
    assert run_main("simulate", TINY, *"--gpus 64 --memory 0.2 --best".split()) == 2
    said = capsys.readouterr().err
    assert "no plan fits in 0.2 GiB; the least needs" in said
    assert run_main("simulate", f"{__name__}:broken", *"--gpus 64 --best".split()) == 2
    assert "no plan runs: " in (said := capsys.readouterr().err)
    assert "cannot be predicted: ArithmeticError: planned" in said


def test_a_search_whose_plan_has_no_code_is_refused_before_it_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_overlap.tools.cli.simulate.search", None)
    assert run_main("simulate", TINY, *"--gpus 64 --best --loss fused".split()) == 2
    assert "loss='fused': no code for that" in capsys.readouterr().err


def broken() -> nn.Module:
    raise ArithmeticError("planned")


def test_the_search_tells_how_far_it_is_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_overlap.tools.cli.simulate.PROCESSES", 1)
    monkeypatch.setattr("fsdp_overlap.tools.cli.simulate.SECONDS_BETWEEN_LINES", 0.0)
    for name in ("estimate", "measure"):
        monkeypatch.setattr(sys.modules[search.__module__], name, made_up)
    assert run_main("simulate", TINY, *"--gpus 64 --best".split()) == 0
    assert "plans tried, " in capsys.readouterr().err
