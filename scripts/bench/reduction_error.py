"""How far a reduction in few bits is from one in float32.

Gradients of `--ranks` ranks are drawn: normal numbers, whose rows differ in size by a factor of a
thousand. They are summed as the library does, in this process, and as a ring in bfloat16 does,
which rounds at each rank. The error is that of the first rank's range, by the norm of the
difference from the sum in float64 over the norm of that sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fsdp_overlap import BlockAtomic, QuantizedCommPolicy
from fsdp_overlap.features.quantized.collectives import QuantizedFormat
from fsdp_overlap.layout import ParamGroupPlan, ParamSpec, plan_units
from harness import options, runner
from harness.measurement import Sweep
from harness.runner import Results

ROWS, COLUMNS = 512, 256
QUANTITY = "error"
POLICIES = {
    "bfloat16, summed in float32": QuantizedCommPolicy(reduce_dtype=torch.bfloat16),
    "int8": QuantizedCommPolicy(reduce_dtype=torch.int8),
    "float8_e4m3fn": QuantizedCommPolicy(reduce_dtype=torch.float8_e4m3fn),
    "float8_e4m3fn, blocks of 32": QuantizedCommPolicy(
        reduce_dtype=torch.float8_e4m3fn, block=(1, 32), powers_of_two=True
    ),
    "float8_e5m2": QuantizedCommPolicy(reduce_dtype=torch.float8_e5m2),
}


def draw(ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-3, 0, ROWS)[torch.randperm(ROWS, generator=generator), None]
    return [(torch.randn(ROWS, COLUMNS, generator=generator) * size).view(-1) for _ in range(ranks)]


def quantized_sum(gradients: list[torch.Tensor], policy: QuantizedCommPolicy) -> torch.Tensor:
    """What the first rank gets, in float32. Its own gradients do not travel."""
    spec = ParamSpec("weight", (ROWS, COLUMNS), torch.float32)
    spec = replace(spec, block=policy.block_numel(spec))
    [plan] = plan_units([[spec]], len(gradients), BlockAtomic(1))
    assert isinstance(plan, ParamGroupPlan)
    codes = policy.reduce_dtype
    assert codes is not None
    travels = policy.wire(plan, torch.float32, codes)
    wire = QuantizedFormat(
        travels, travels.segment(0), codes, policy.scale_dtype(torch.float32, codes)
    )
    numel, size = plan.shard_numels[0], travels.packed.shard_numels[0]
    segments = torch.empty(len(gradients), size, dtype=torch.uint8)
    for segment, gradient in zip(segments, gradients, strict=True):
        wire.encode_own(gradient[:numel], segment, torch.float32)
    total = torch.empty(numel)
    wire.add_up(segments, gradients[0][:numel], 0, total)
    return total


def ring_sum(gradients: list[torch.Tensor], numel: int) -> torch.Tensor:
    total = gradients[0][:numel].bfloat16()
    for gradient in gradients[1:]:
        total = total + gradient[:numel].bfloat16()
    return total.float()


def error(found: torch.Tensor, gradients: list[torch.Tensor]) -> float:
    exact = torch.stack(gradients)[:, : len(found)].double().sum(0)
    return ((found - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    args = parser.parse_args()
    results = Results(f"a gradient of {ROWS} x {COLUMNS}", Sweep("ranks", log_y=True))
    for ranks in args.ranks:
        gradients = draw(ranks)
        sums = {name: quantized_sum(gradients, policy) for name, policy in POLICIES.items()}
        sums["bfloat16, summed by a ring"] = ring_sum(gradients, len(next(iter(sums.values()))))
        errors = {name: [1e6 * error(found, gradients)] for name, found in sums.items()}
        results.add(QUANTITY, "millionths", errors, at=ranks)
    runner.publish(args, results)


if __name__ == "__main__":
    main()
