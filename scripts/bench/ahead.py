"""How far ahead to gather: predicted steps and memory by `prefetch` (docs/scale.md).

Models of equal units, and mixtures whose experts are units of their own, so that heavy and light
ones take turns. Nothing is measured: each step is one of `fsdp-overlap simulate`, half a minute.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Training, simulate

GIB = 2**30
H100, H200 = "h100_sxm", "h200_sxm"
FAST, SLOW = "nvlink4_400g", "nvlink3_roce_200g"

full = Training("llama3-8b", gpus=64, checkpointing="full")
CASES: dict[str, tuple[Training, str, str]] = {
    "8B, 64 GPUs": (full, H100, FAST),
    "8B, 64 GPUs, 2,048 tokens": (replace(full, sequence=2048), H100, FAST),
    "8B, 64 GPUs, 4,096 tokens, 200 Gb/s": (replace(full, sequence=4096), H100, SLOW),
    "8B, 64 GPUs, 1,024 tokens, 200 Gb/s": (replace(full, sequence=1024), H100, SLOW),
    "8B, 1,024 GPUs": (replace(full, gpus=1024), H100, FAST),
    "70B, 256 GPUs": (replace(full, model="llama3-70b", gpus=256), H100, FAST),
    "405B, 1,024 GPUs": (replace(full, model="llama3-405b", gpus=1024), H200, FAST),
    "Moonlight, 64 GPUs": (
        replace(full, model="moonlight-16b", expert_parallel=8, sequence=4096),
        H100,
        FAST,
    ),
    "Moonlight, 64 GPUs, batch 4": (
        replace(full, model="moonlight-16b", expert_parallel=8, sequence=4096, micro_batch_size=4),
        H100,
        FAST,
    ),
    "DeepSeek-V3, 1,024 GPUs": (
        replace(full, model="deepseek-v3", gpus=1024, expert_parallel=32, sequence=4096, blocks=9),
        H200,
        FAST,
    ),
}
"""Each with its device and fabric. Of DeepSeek-V3 nine of 58 equal blocks: all take minutes."""


def main() -> None:
    """Print a row of a table for each case: by prefetch the step and what of its all-gathers is
    exposed, in ms, and GiB reserved."""
    for name, (training, device, fabric) in CASES.items():
        costs = Costs(Device.read(device), Fabric.read(fabric))
        row = [name]
        for prefetch in range(4):
            found = simulate(replace(training, prefetch=prefetch).program, training.gpus, costs)
            exposed = sum(
                each.exposed for each in found.report.collectives if each.kind == "all_gather"
            )
            gib = found.reserved / GIB
            row.append(f"{1e3 * found.seconds:.0f}, {exposed / 1e3:.0f}, {gib:.1f}")
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
