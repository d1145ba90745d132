"""The folder that a run leaves: config.json, metrics.jsonl, loss.png and trace.json."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fsdp_overlap.cli.config import TrainConfig
from fsdp_overlap.cli.errors import BadInput


def check_out(out: Path) -> None:
    """Raises BadInput if a run folder cannot be made at `out`. Writes nothing."""
    if out.is_dir():
        if any(out.iterdir()):
            raise BadInput(f"--out {out} is not empty; give a new folder")
    elif out.exists():
        raise BadInput(f"--out {out} is not a folder")
    parent = next(p for p in out.absolute().parents if p.exists())
    if not parent.is_dir():
        raise BadInput(f"--out {out}: {parent} is not a folder")


class RunFolder:
    """Made by one rank, when training begins."""

    def __init__(self, config: TrainConfig, about: dict[str, Any]) -> None:
        """`about`: what else the run depended on, kept beside the configuration."""
        self.path = config.out
        self.path.mkdir(parents=True, exist_ok=True)
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}
        (self.path / "config.json").write_text(json.dumps(settings | about, indent=2) + "\n")

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    def log(self, metrics: dict[str, float]) -> None:
        """Adds a line at once, so that a run that dies keeps what it had."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def plot(self, entropy: float) -> None:
        """loss.png: both losses by step, in nats per byte, and `entropy` as the line to beat."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        matplotlib.use("agg")
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        for name, label in (("loss", "training"), ("val_loss", "validation")):
            points = [(m["step"], m[name]) for m in metrics if name in m]
            axes.plot(
                *zip(*points, strict=True), label=label, marker="o" if name == "val_loss" else None
            )
        axes.axhline(entropy, color="gray", linestyle="--", label="byte-unigram entropy")
        axes.set(xlabel="step", ylabel="nats per byte")
        axes.legend()
        figure.savefig(self.path / "loss.png", dpi=150)
