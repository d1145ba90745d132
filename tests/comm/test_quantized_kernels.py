"""Triton's kernels send, gather and sum to the bit what torch's operations do. Triton's interpreter
runs them here."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_overlap import BlockAtomic, Flat, PerTensor, QuantizedCommPolicy, TensorAtomic
from fsdp_overlap.features.quantized import collectives as quantized
from fsdp_overlap.features.quantized.codes import encode
from fsdp_overlap.features.quantized.collectives import (
    QuantizedGather,
    QuantizedReduction,
)
from fsdp_overlap.features.quantized.plan import Block
from fsdp_overlap.layout import LayoutRule, Plan
from fsdp_overlap.tools.emulator.dispatch import OpTraits
from fsdp_overlap.tools.races import find_races
from support.defects import Defect
from support.emulated import Program
from support.pages import ROOT
from support.quantized_kernels import (
    compare_gather,
    compare_reduction,
    gathers_of,
    group_of,
    needs_triton,
    plan_of,
    reductions_of,
    wire_of,
)

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
CODES = [E4M3, E5M2, torch.int8]
LAYOUTS = [Flat(), BlockAtomic(2), TensorAtomic(), TensorAtomic(max_padding=math.inf), PerTensor()]
BLOCKS = [(1, None), (1, 8), (1, 4), (2, None), (3, 4), (100, 8)]

# numpy says what infinities and NaN, and the sums of unused places, come to.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


# ---- Bits ----

shapes = st.tuples(st.integers(0, 9), st.integers(0, 3).map(lambda n: 8 * n)) | st.lists(
    st.integers(0, 6), max_size=3
).map(lambda sizes: (*sizes, 8)[-3:])
policies = st.builds(
    QuantizedCommPolicy,
    st.sampled_from(CODES),
    st.sampled_from([*CODES, torch.bfloat16]),
    st.sampled_from(BLOCKS),
    st.booleans(),
    st.sampled_from([(), ("p1",)]),
)


@pytest.mark.slow
@needs_triton
@settings(max_examples=40)
@given(
    some=st.lists(shapes, min_size=1, max_size=4),
    ranks=st.integers(1, 8),
    layout=st.sampled_from(LAYOUTS),
    policy=policies,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    stored=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
    extremes=st.booleans(),
)
def test_kernels_compute_what_torch_does(
    some: list[tuple[int, ...]],
    ranks: int,
    layout: LayoutRule,
    policy: QuantizedCommPolicy,
    dtype: torch.dtype,
    stored: torch.dtype,
    seed: int,
    extremes: bool,
) -> None:
    try:
        plan = plan_of(some, ranks, layout, policy)
        policy.check(plan)
    except ValueError:  # a chunk of rows ends within a block
        assume(False)
    assume(policy.applies_to(plan))
    compare_gather(plan, policy, dtype, stored, seed, extremes)
    compare_reduction(plan, policy, dtype, seed, extremes)


@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((3, 20_000), (1, None)),  # a block in several tiles
        ((130, 40), (None, None)),
        ((256, 300), (128, 100)),
        ((9, 4224), (1, 33)),
        ((2, 6000), (1, None)),  # a block in one tile that is not full
    ],
)
@pytest.mark.parametrize("layout", [TensorAtomic(), PerTensor()])
def test_blocks_of_all_sizes(shape: tuple[int, int], block: Block, layout: LayoutRule) -> None:
    policy = QuantizedCommPolicy(torch.int8, E4M3, block)
    ranks = 1 if block[0] is None or layout == PerTensor() else 2
    plan = plan_of([shape, (7,)], ranks, layout, policy)
    compare_gather(plan, policy, torch.bfloat16, torch.float32)
    compare_reduction(plan, policy, torch.bfloat16)


def encoded(values: torch.Tensor, codes: torch.dtype, scales: torch.dtype) -> list[Any]:
    """Return codes and scales of rows, by torch and by kernels."""
    from fsdp_overlap.features.quantized.kernels import PlacedRun, RunTable

    rows, columns = values.shape
    results = []
    for by_kernels in (False, True):
        found = torch.empty(rows, columns, dtype=codes), torch.empty(rows, 1, dtype=scales)
        if by_kernels:
            RunTable([PlacedRun(0, 0, 0, (rows, 1, 1, columns))], codes, scales).encode(
                values, *found
            )
        else:
            encode(values[:, None, None], found[0][:, None, None], found[1])
        results.append(found)
    return results


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, E8M0])
def test_all_numbers_of_16_bits_are_encoded_as_torch_does(
    codes: torch.dtype, scales: torch.dtype
) -> None:
    """Each by itself, whose scale fits it, and beside a number that makes the scale 1."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    largest = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}[codes]
    for values in (
        every.view(torch.bfloat16)[:, None],
        torch.stack((every.view(torch.bfloat16), torch.full((2**16,), largest)), 1).bfloat16(),
        torch.stack((every.view(torch.float16).float(), torch.full((2**16,), largest)), 1),
    ):
        there, here = encoded(values, codes, scales)
        finite = values.isfinite().all(1)
        assert here[1].float()[~finite].isnan().all()
        assert torch.equal(bytes_of(here[1])[finite], bytes_of(there[1])[finite])
        assert torch.equal(bytes_of(here[0])[finite], bytes_of(there[0])[finite])


@needs_triton
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_all_codes_are_decoded_as_torch_does(codes: torch.dtype, dtype: torch.dtype) -> None:
    """With all scales that are powers of two."""
    from fsdp_overlap.features.quantized.kernels import PlacedRun, RunTable

    every = torch.arange(256).to(torch.uint8)
    coded = every.repeat(256).view(codes)
    scales = every.repeat_interleave(256).view(E8M0)
    found = torch.empty(2**16, dtype=dtype)
    RunTable([PlacedRun(0, 0, 0, (2**16, 1, 1, 1))], codes, E8M0).decode(coded, scales, found)
    wide = torch.promote_types(dtype, torch.float32)
    expected = (coded.to(wide) * scales.float()).to(dtype)
    same = bytes_of(found[:, None]) == bytes_of(expected[:, None])
    assert (same.all(1) | (found.isnan() & expected.isnan())).all()


# ---- Launches ----

WIDTH, HIDDEN = 4096, 14336
UNIT = [
    *[(WIDTH, WIDTH), (1024, WIDTH), (1024, WIDTH), (WIDTH, WIDTH)],
    *[(HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (WIDTH,), (WIDTH,)],
]
"""The parameters of a block of Llama's with 8 billion parameters."""


class Launches(TorchDispatchMode):
    """Counts the operations that a device runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        about = OpTraits.of(func)
        if not about.touches_nothing and not about.allocates_only:
            self.names[about.name] += 1
        return func(*args, **(kwargs or {}))


def done_at_once(*arguments: object) -> Any:
    return SimpleNamespace(works=(), group=None, finish=lambda: None)


def launches_of(reduce: Any, gather: Any, plan: Plan) -> tuple[int, int]:
    """How many operations a reduction and a gather of rank 3 run, without the collective."""
    gradients, full, shard = (
        torch.empty(numel, dtype=dtype, device="meta")
        for numel, dtype in (
            (plan.numel, torch.float32),
            (plan.numel, torch.bfloat16),
            (plan.shard_numels[3], torch.float32),
        )
    )

    def reduce_once() -> None:
        reduce.reduce_scatter(gradients, group_of(3), 8.0).finish()

    def gather_once() -> None:
        gather.all_gather(full, shard, group_of(3)).finish()

    gather._others = SimpleNamespace(all_gather=done_at_once)
    counts = []
    with patch.object(quantized, "all_to_all", done_at_once):
        for once in (reduce_once, gather_once):
            with counting_kernels(Counter()):
                once()  # makes tables
            with Launches() as seen, counting_kernels(seen.names):
                once()
            counts.append(seen.names.total())
    return counts[0], counts[1]


@contextmanager
def counting_kernels(names: Counter[str]) -> Iterator[None]:
    from fsdp_overlap.features.quantized import kernels as quantized_triton

    def count(launch: Any, kernel: Any, *arguments: Any, **constants: Any) -> None:
        names[kernel.__name__] += 1

    with patch.object(quantized_triton._Launch, "__call__", count):
        yield


@needs_triton
@pytest.mark.parametrize(
    ("layout", "block", "by_kernels", "by_torch"),
    [
        (Flat(), (1, None), (7, 4), (129, 26)),
        (Flat(), (1, 32), (6, 4), (129, 26)),
        (BlockAtomic(128), (128, 128), (8, 6), (127, 32)),
        (PerTensor(), (1, None), (10, 6), (153, 115)),
    ],
)
def test_a_unit_takes_few_launches(
    layout: LayoutRule, block: Block, by_kernels: tuple[int, int], by_torch: tuple[int, int]
) -> None:
    policy = QuantizedCommPolicy(E4M3, E4M3, block)
    plan = plan_of(UNIT, 8, layout, policy)
    wires = [wire_of(plan, 3, policy, dtype, E4M3) for dtype in (torch.float32, torch.bfloat16)]
    torchs, kernels = zip(reductions_of(plan, wires[0]), gathers_of(plan, wires[1]), strict=True)
    assert launches_of(*kernels, plan) == by_kernels
    assert launches_of(*torchs, plan) == by_torch


@needs_triton
def test_kernels_are_built_for_gpus() -> None:
    """Without a GPU. None fuses products with sums, or divides or flushes as CUDA's fast math."""
    command = [sys.executable, str(ROOT / "tests/support/built_kernels.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert built.stdout.split() == ["80", "90"]


# ---- Which way is taken ----


def test_nothing_imports_triton_that_does_not_need_it() -> None:
    code = (
        "import sys, fsdp_overlap.engine.param_group as p, fsdp_overlap.features.quantized.choice; "
        "print([n for n in sys.modules if n == 'triton' or n.startswith('triton.') or "
        "n.endswith('quantized.kernels')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def train(layout: LayoutRule) -> None:
    policy = QuantizedCommPolicy(E4M3, torch.int8)
    Program(device="cuda", layout=layout, shard_options={"comm_policy": policy}).train(2)


@needs_triton
def test_where_kernels_do_not_work_torch_computes() -> None:
    from fsdp_overlap.features.quantized import kernels as quantized_triton

    def fail(*arguments: object, **constants: object) -> None:
        raise RuntimeError("no compiler")

    quantized_triton.works_on.cache_clear()
    with (
        patch.object(quantized_triton._Launch, "__call__", fail),
        pytest.warns(UserWarning, match="RuntimeError: no compiler"),
    ):
        assert not quantized_triton.works_on(torch.device("cpu"))
    quantized_triton.works_on.cache_clear()
    with (
        patch.object(quantized_triton._Launch, "__call__", lambda *_, **__: None),
        pytest.warns(UserWarning, match="other numbers than torch"),
    ):
        assert not quantized_triton.works_on(torch.device("cpu"))
    quantized_triton.works_on.cache_clear()
    assert quantized_triton.works_on(torch.device("cpu"))


# ---- On the emulated device ----


def aside(tensor: str, call: str) -> str:
    """``call`` on a stream of the device of ``tensor`` that waits for nobody."""
    return f"with (m := torch.get_device_module({tensor}.device)).stream(m.Stream()): {call}"


def planted(owner: type, method: str, tensor: str, call: str) -> Defect:
    return Defect(owner, method, call, "", new=aside(tensor, call))


reducing = partial(planted, QuantizedReduction, "reduce_scatter")
gathering = partial(planted, QuantizedGather, "all_gather")
DEFECTS = [
    reducing("gradients", "sent, mine = self._encode(gradients, group)"),
    reducing("gradients", "issued = all_to_all(received, sent, arriving, sizes, group)"),
    reducing("mine", "wire.add_up(received.view(len(sizes), -1), mine, rank, total)"),
    gathering("full", "wire.encode_own(shard.to(full.device, non_blocking=True), own, full.dtype)"),
    gathering("full", "self._decode(gathered, full)"),
]


@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.parametrize("layout", [Flat(), TensorAtomic(), PerTensor()])
def test_kernels_are_ordered(layout: LayoutRule) -> None:
    launched: Counter[str] = Counter()
    from fsdp_overlap.features.quantized import kernels as quantized_triton

    call: Callable[..., None] = quantized_triton._Launch.__call__

    def note(launch: Any, kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched[kernel.__name__] += 1
        call(launch, kernel, *arguments, **constants)

    with patch.object(quantized_triton._Launch, "__call__", note):
        assert not find_races(partial(train, layout), ranks=4, rank=1)
    assert min(launched["encode_blocks"], launched["decode_blocks"]) > 10


@needs_triton
@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", [Flat(), PerTensor()])
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.old)
def test_a_kernel_that_nothing_orders_is_found(defect: Defect, layout: LayoutRule) -> None:
    with defect.plant():
        findings = find_races(partial(train, layout), ranks=4, rank=1)
    assert any("_blocks on" in str(finding) for finding in findings)
