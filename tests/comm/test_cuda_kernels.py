"""On a GPU the kernels of quantized communication compute what torch does on a CPU, to the bit."""

from __future__ import annotations

import pytest
import torch

from fsdp_overlap import Flat, PerTensor, QuantizedCommPolicy
from fsdp_overlap.layout import LayoutRule
from support.quantized_kernels import compare_gather, compare_reduction, needs_triton, plan_of

pytestmark = [pytest.mark.gpu, needs_triton]

ROWS = [(96, 4096), (64, 20_000), (33,), (40, 256)]
SQUARES = [(256, 384), (128, 128), (33,)]


@pytest.mark.parametrize(
    ("policy", "shapes", "layout", "dtype"),
    [
        (QuantizedCommPolicy(torch.float8_e4m3fn, torch.float8_e5m2), ROWS, Flat(), torch.bfloat16),
        (QuantizedCommPolicy(torch.int8, torch.int8), ROWS, PerTensor(), torch.float16),
        (
            QuantizedCommPolicy(
                torch.float8_e5m2, torch.float8_e4m3fn, (1, 32), powers_of_two=True
            ),
            [(96, 4096), (33,), (40, 256)],
            Flat(),
            torch.float32,
        ),
        (
            QuantizedCommPolicy(torch.float8_e4m3fn, torch.bfloat16, (128, 128)),
            SQUARES,
            Flat(),
            torch.float32,
        ),
    ],
)
def test_a_gpu_computes_what_a_cpu_does(
    policy: QuantizedCommPolicy,
    shapes: list[tuple[int, ...]],
    layout: LayoutRule,
    dtype: torch.dtype,
) -> None:
    plan = plan_of(shapes, 2 if layout == PerTensor() else 4, layout, policy)
    for extremes in (False, True):
        compare_gather(plan, policy, dtype, torch.float32, extremes=extremes, device="cuda")
        compare_reduction(plan, policy, dtype, extremes=extremes, device="cuda")
