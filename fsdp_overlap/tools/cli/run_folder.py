"""The folder that a run leaves: config.json, metrics.jsonl, loss.png, checkpoints, traces, and
the overlap report of the traces."""

import fcntl
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fsdp_overlap.tensor.dcp import writing
from fsdp_overlap.tools.cli.config import TrainConfig
from fsdp_overlap.tools.cli.output import BadInput

TRACES = "traces"
TRACES_AT_STAGE_3 = "traces-at-stage-3"  # for comparison, of a run at another stage
_NEW = ".new"  # ends the name of a file that is being written


def check_out(out: Path) -> None:
    """Raise BadInput if a run folder cannot be made at `out`. Write nothing."""
    if out.is_dir():
        # A run that was killed at its very start leaves an unfinished file.
        if any(path.suffix != _NEW for path in out.iterdir()):
            raise BadInput(f"--out {out} is not empty; give a new folder")
    elif out.exists():
        raise BadInput(f"--out {out} is not a folder")
    parent = next(p for p in out.absolute().parents if p.exists())
    if not parent.is_dir():
        raise BadInput(f"--out {out}: {parent} is not a folder")


@dataclass(frozen=True)
class SavedRun:
    """A run that was begun. unigram_entropy: of its validation text, to recognize the text by."""

    config: TrainConfig
    ranks: int
    unigram_entropy: float


def read_saved_run(folder: Path) -> SavedRun:
    """Return the run in `folder`. Raise BadInput if there is none."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text())
        names = {field.name for field in fields(TrainConfig)}
        of_config = {name: value for name, value in settings.items() if name in names}
        ranks, entropy = int(settings["ranks"]), float(settings["unigram_entropy"])
    except OSError as error:
        raise BadInput(f"--resume {folder}: {path.name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--resume {folder}: {path.name} is not that of a run ({error})") from None
    of_config["out"] = folder  # it may have been moved
    for name in ("data", "from_"):
        if of_config.get(name) is not None:
            of_config[name] = Path(of_config[name])
    return SavedRun(TrainConfig(**of_config), ranks, entropy)


def trace_path(folder: Path, rank: int, traces: str = TRACES) -> Path:
    """Return where a rank of the run in `folder` writes its profiler trace. `traces`: TRACES, or
    TRACES_AT_STAGE_3."""
    return folder / traces / f"rank-{rank}.json.gz"


class RunFolder:
    """The folder of a run. One rank makes it, and keeps other runs out while it lives."""

    def __init__(self, path: Path) -> None:
        """Raise BadInput if another run is writing there."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path, os.O_RDONLY)  # held until this process ends, however it does
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"{path}: another run is writing there; wait for it or stop it"
            ) from None

    def begin(self, config: TrainConfig, about: dict[str, Any], steps_done: int) -> None:
        """Write the configuration and `about`, what else the run depends on. Drop the metrics of
        steps beyond `steps_done`, which will be done again."""
        # Paths are made absolute: the run may be resumed from anywhere.
        settings = {
            k: str(v.absolute()) if isinstance(v, Path) else v for k, v in asdict(config).items()
        }
        _replace(self.path / "config.json", json.dumps(settings | about, indent=2) + "\n")
        kept = [m for m in self.metrics() if m["step"] <= steps_done]
        _replace(self.path / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in kept))

    def clear_traces(self) -> None:
        """Remove the traces of an earlier run, which may have had other ranks."""
        for trace in (*self.traces(), *self.traces(TRACES_AT_STAGE_3)):
            trace.unlink()

    def traces(self, traces: str = TRACES) -> list[Path]:
        """Return the profiler traces that ranks left, as in `trace_path`."""
        return sorted(trace_path(self.path, 0, traces).parent.glob("*.json.gz"))

    def log(self, metrics: dict[str, float]) -> None:
        """Add a line at once, so that a run that dies keeps what it had."""
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())  # metrics must be on the disk before their checkpoint is

    def metrics(self) -> list[dict[str, float]]:
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        # A run that is killed may leave half a line, without its end.
        lines = path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def plot(self, entropy: float) -> None:
        """Plot loss.png: both losses by step, in nats per byte, and `entropy` as the line to
        beat."""
        # Takes half a second, and launchers and all ranks but one do not need it.
        import matplotlib
        from matplotlib.figure import Figure

        metrics = self.metrics()
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
        with writing(self.path / "loss.png"):
            figure.savefig(self.path / "loss.png", dpi=150)


def _replace(path: Path, text: str) -> None:
    """Write the file anew; a run that is killed leaves the old or the new."""
    new = path.with_name(path.name + _NEW)
    with writing(new):
        new.write_text(text)
    new.replace(path)
