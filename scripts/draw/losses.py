"""Draws docs/curves.svg and writes docs/curves.md, of the losses in docs/curves.json.

`scripts/bench/curves.py --json docs/curves.json` trains for them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from curves import VALIDATED, VARIANTS, above_base, interval_of, runs_of, table_of
from pictures import DOCS, new_picture, save

FOUND, PAGE = DOCS / "curves.json", DOCS / "curves.md"
COLORS = "#4477aa #ee6677 #228833 #ccbb44 #66ccee #aa3377 #777777 #222222".split()


def lines_of(found: dict[str, Any]) -> dict[str, list[str]]:
    """Return the variants that were trained, those with equal twins with these."""
    lines: dict[str, list[str]] = {}
    for name, variant in VARIANTS.items():
        if runs := runs_of(found, name):
            is_equal = all(run.get("is_equal") for run in runs.values())
            lines.setdefault(variant.twin if is_equal else name, []).append(name)
    return lines


def draw(found: dict[str, Any]) -> None:
    """Draw validation losses, and how far they are above those of unsharded training."""
    figure = new_picture(7.5, 5.6)
    losses, above = figure.subplots(2, sharex=True)
    every = interval_of(found["settings"]["steps"])
    handles = []
    for names, color in zip(lines_of(found).values(), COLORS, strict=False):
        # Of equal ones a run is drawn; seeds may be more of some than of others.
        name = max(names, key=lambda each: len(runs_of(found, each)))
        runs = list(runs_of(found, name).values())
        values = [mean(seeds) for seeds in zip(*(run["validation"] for run in runs), strict=True)]
        steps = [every * (point + 1) for point in range(len(values))]
        style = "--" if names[0].startswith("ours") else "-"
        handles += losses.plot(steps, values, style, color=color, label=" = ".join(names))
        for index, seed in enumerate(above_base(found, name, "validation")):
            above.plot(steps, seed, style, color=color, linewidth=1.5 if index == 0 else 0.7)
    _finish(losses, "Validation loss, nats per byte")
    _finish(above, "The same, above unsharded training; a line for each seed")
    above.set(xlabel="step")
    figure.legend(handles=handles, loc="outside lower center", fontsize=8, frameon=False)
    save(figure, "curves.svg")


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def page_of(found: dict[str, Any]) -> str:
    """Return docs/curves.md."""
    settings = found["settings"]
    shape = f"--steps {settings['steps']} --batch-size {settings['batch_size']}"
    shape += f" --seq-len {settings['seq_len']}"
    last = interval_of(settings["steps"])
    return f"""# Losses

Written by `scripts/draw/losses.py` from [curves.json](curves.json), which `scripts/bench/curves.py`
makes. The main job's model trains {settings["steps"]:,} steps in each of these ways; of a seed, all
begin with the same weights and get the same batches. Two gloo ranks on CPUs have
{settings["batch_size"]} sequences of {settings["seq_len"]} bytes each, or one process has those of
both. Torch {settings["torch"]}.

![Losses by step, and their differences from unsharded training](curves.svg)

Nats per byte at the end, for validation of {VALIDATED} sequences, for training the mean of the last
{last} steps. Of several seeds it is the mean, with the least and the largest. What is above
unsharded training is of runs with the same seed, optimizer and clipping.

{table_of(found)}

- **Equal to the bit** are the losses of all steps and validations, and the last weights. Two ranks
  add up two gradients and halve them; unsharded, their microbatches follow one another.
- **4 microbatches** sum the same batch in another order: what is above is what rounding alone does.
  **Uneven ranks** have three of them and one, in turns ([ranks that differ](uneven.md)).
- **Muon**: ours with `TensorAtomic()` ([Muon](muon.md)). torch's sums the norm of a tall matrix in
  another order, and rounds it to bfloat16, rarely to another value.
- **bfloat16** reduces in float32. **8 bits** also sends matrices and their gradients in
  `float8_e4m3fn` ([precision](precision.md#quantized-communication)).
- **Clipped** is by norm, as in the main job; all others train without. Ranks add up squares in
  another order than one process, so norms differ in their last bits, and weights from then on.

The command, which trains three seeds of each:

```bash
.venv/bin/python scripts/bench/curves.py {shape} --json docs/curves.json
```

It takes two hours on two cores, and goes on where it was stopped. Without options batches
are the main job's, four times as large.
"""


if __name__ == "__main__":
    FOUND_NOW = json.loads(FOUND.read_text())
    draw(FOUND_NOW)
    PAGE.write_text(page_of(FOUND_NOW))
