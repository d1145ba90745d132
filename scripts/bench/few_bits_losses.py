"""The losses of the main job whose weights are gathered in 8 bits, against bfloat16.

For each seed, `fsdp-overlap train` runs once with gathers as compute has them, and once each in
float8 and int8. Compute is in bfloat16 in all of them. A seed draws weights and batches. The exit
code is 1 unless, at the last step, the validation loss in 8 bits is within the spread of seeds: its
mean differs from that in bfloat16 by no more than the largest from the smallest of the latter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import options, output, runner
from harness.measurement import Claim, Sweep
from harness.runner import Results

PLAIN = "bfloat16"
SYSTEMS: dict[str, list[str]] = {
    PLAIN: [],
    "float8_e4m3fn": ["--gather-dtype", "float8_e4m3fn"],
    "int8": ["--gather-dtype", "int8"],
}
QUANTITY = "validation loss"


def validations(args: argparse.Namespace, system: str, seed: int, folder: Path) -> dict[int, float]:
    """The validation losses of a run, by step."""
    command = [sys.executable, "-m", "fsdp_overlap", "train", "--dtype", "bfloat16"]
    command += [*SYSTEMS[system], "--seed", str(seed), "--steps", str(args.steps)]
    command += ["--out", str(folder), "--save-every", str(args.steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    if done.returncode:
        output.fail(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}", code=1)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


OPTIONS = options.parser(__doc__, steps=160, timeout=1800.0)
OPTIONS.add_argument("--seeds", type=int, default=4)


def claim_of(system: str, found: list[float], plain: list[float]) -> Claim:
    apart = abs(statistics.fmean(found) - statistics.fmean(plain))
    spread = max(plain) - min(plain)
    return Claim(
        f"{QUANTITY} in {system} is within the spread of seeds",
        apart <= spread,
        f"means {apart:.4f} apart, seeds {spread:.4f}",
    )


def main() -> None:
    args = OPTIONS.parse_args()
    samples: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for system in SYSTEMS:
                found = validations(args, system, seed, Path(folder, f"{system}-{seed}"))
                for step, loss in found.items():
                    samples.setdefault(step, {}).setdefault(system, []).append(loss)
                losses = ", ".join(f"{loss:.4f}" for loss in found.values())
                print(f"seed {seed}, {system}: {losses}", flush=True)
    last = samples[args.steps]
    results = Results(f"{args.seeds} seeds, {args.steps} steps of the main job", Sweep("step"))
    for step, of_step in samples.items():
        results.add(QUANTITY, "nats/byte", of_step, at=step)
    results.claims += [claim_of(name, last[name], last[PLAIN]) for name in SYSTEMS if name != PLAIN]
    runner.publish(args, results)


if __name__ == "__main__":
    main()
