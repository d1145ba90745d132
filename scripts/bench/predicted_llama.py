"""Predicts rows of the table of `llama.py` over a simulated link, on a machine without a GPU.

    python scripts/bench/predicted_llama.py
    python scripts/bench/predicted_llama.py --range-us 130 --systems "ours, Muon, whole matrices"

The systems are those of `llama.py`, on the emulated device. Compute takes what the simulator says
of the GPU, and `--slowdown` longer while a collective runs. A collective takes what the link needs
for the bytes that a rank receives, if all hold equal parts. `--range-us` adds as much for each
range of a collective of ragged shards, as where each of them is a kernel of its own, which waits
beside products for multiprocessors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

import llama
from fsdp_overlap.tools.emulator import Operation
from fsdp_overlap.tools.simulator import Costs, Device, Fabric, simulate
from fsdp_overlap.tools.simulator.costs import full_of
from harness.markdown import markdown_table
from harness.simulated_ranks import FEW_BYTES

SYSTEMS = (llama.OURS, "ours, its own AdamW", llama.WHOLE, llama.FLAT)
COLUMNS = ["", "step, ms", "compute, ms", "exposed, ms", "peak, GiB"]


@dataclass(frozen=True)
class LinkCosts(Costs):
    """A link without latency."""

    bandwidth: float = 1e9
    """Bytes/s."""
    range_seconds: float = 0.0

    def collective(self, operation: Operation, ranks: Sequence[int]) -> float:
        ranges = full_of(operation)
        nbytes = sum(held.nbytes for held in ranges)
        if nbytes <= FEW_BYTES:
            return 0.0
        carried = nbytes * (len(ranks) - 1) / len(ranks)
        of_ranges = self.range_seconds * len(ranges) if len(ranges) > 1 else 0.0
        return carried / self.bandwidth + of_ranges


def program(name: str, model: llama.Model, ranks: int) -> Callable[[], object]:
    """Builds a system, and returns what makes a step of it."""
    device = torch.device("emulated")
    setting = llama.Setting(model, device, init_device_mesh(device.type, (ranks,)))
    with device:
        built = model.build(model)
        tokens = torch.zeros(1, model.scale.tokens, dtype=torch.int64)
    return partial(llama.SYSTEMS[name](built, setting).step, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=llama.MODELS, default="1b")
    parser.add_argument("--systems", nargs="+", choices=llama.SYSTEMS, metavar="NAME")
    parser.add_argument("--gpu", default="h200_sxm", help="as `fsdp-overlap simulate --device`")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gigabytes-per-s", type=float, default=147.0, metavar="N")
    parser.add_argument("--slowdown", type=float, default=0.02, help="0.02 is two percent")
    parser.add_argument("--range-us", type=float, default=0.0, metavar="N")
    args = parser.parse_args()
    gpu = replace(Device.read(args.gpu), overlap_slowdown=args.slowdown, variation=0.0)
    costs = LinkCosts(
        gpu,
        Fabric.read("nvlink4_400g"),
        bandwidth=args.gigabytes_per_s * 1e9,
        range_seconds=args.range_us * 1e-6,
    )
    rows = []
    for name in args.systems or SYSTEMS:
        with Console(stderr=True).status(name):
            built = partial(program, name, llama.MODELS[args.model], args.ranks)
            found = simulate(built, args.ranks, costs)
        figures = (found.seconds, found.compute, found.report.exposed_time * 1e-6)
        row = [f"{seconds * 1e3:.1f}" for seconds in figures]
        rows.append([name, *row, f"{found.memory / 2**30:.1f}"])
    print(markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
