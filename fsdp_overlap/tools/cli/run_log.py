"""The log of a run, printed and written by rank 0."""

from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_overlap.tensor.dcp import writing
from fsdp_overlap.tools.cli.checkpoints import how_to_go_on
from fsdp_overlap.tools.cli.config import TrainConfig
from fsdp_overlap.tools.cli.data import Text, bits, unigram_entropy
from fsdp_overlap.tools.cli.job import restarts, this_job
from fsdp_overlap.tools.cli.report import show_report, write_report
from fsdp_overlap.tools.cli.run_folder import TRACES_AT_STAGE_3, RunFolder
from fsdp_overlap.tools.cli.trainer import PROFILED_STEPS, Trainer
from fsdp_overlap.tools.profiling import read_report


class RunLog:
    """Begins or continues the log of a run after the steps that `trainer` has done. Use it as a
    context while the run trains."""

    def __init__(
        self, config: TrainConfig, text: Text, trainer: Trainer, folder: RunFolder
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._folder = folder
        self._entropy = unigram_entropy(text.validation)
        about = {
            "ranks": dist.get_world_size(),
            "device": str(trainer.device),
            "torch": torch.__version__,
            "text": text.origin,
            "unigram_entropy": self._entropy,
            "job": this_job(),
        }
        folder.begin(config, about, trainer.steps_done)
        self._val_loss = next(
            (m["val_loss"] for m in reversed(folder.metrics()) if "val_loss" in m), None
        )
        # A progress bar, and a line at each validation, which a log file has too. soft_wrap: its
        # lines are not cut to the width of a terminal that is not there.
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task(
            "training", total=config.steps, completed=trainer.steps_done, status=""
        )
        self._first_line = (
            f"{trainer.parameters:,} parameters on {dist.get_world_size()} ranks; "
            f"{len(text.train):,} + {len(text.validation):,} bytes of {text.origin}"
        )
        done, most = restarts()
        if done:
            self._first_line += f"; restarted ({done} of {most})"
        if trainer.steps_done:
            self._first_line += f"; resumed after step {trainer.steps_done}"
        elif done:
            self._first_line += "; from the beginning, because there was no checkpoint"

    def __enter__(self) -> "RunLog":
        self._progress.start()
        self._console.print(self._first_line)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, metrics: dict[str, float]) -> None:
        """Show the figures of one step, as the trainer gives them."""
        if "loss" not in metrics:
            return
        self._folder.log(metrics)
        step, loss = int(metrics["step"]), metrics["loss"]
        self._val_loss = metrics.get("val_loss", self._val_loss)
        val = "" if self._val_loss is None else f"  val {self._val_loss:.3f}"
        status = f"loss {loss:.3f}{val}  {metrics['tokens_per_s']:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, status=status)
        if "val_loss" in metrics:
            self._console.print(f"step {step}: loss {loss:.3f}, validation {self._val_loss:.3f}")

    def stopped(self, saved: Path) -> None:
        """Say that the run was asked to stop, and was saved at `saved`."""
        self._console.print(f"stopped; saved {saved}")
        self._console.print(str(how_to_go_on(self._folder.path)))

    def conclude(self, stats: str) -> None:
        """Write and print the results. Call it once all is trained and profiled. `stats`: what
        the run's context counted."""
        config, val_loss, entropy = self._config, self._val_loss, self._entropy
        assert val_loss is not None, "the last step always validates"
        self._folder.plot(entropy)
        print(f"\noverlap over {PROFILED_STEPS} steps of {config.layers} blocks and root")
        mine = read_report(*self._folder.traces())
        reports = {self._folder.path.absolute().name: mine}
        if traces := self._folder.traces(TRACES_AT_STAGE_3):
            reports = {f"stage {config.zero_stage}": mine, "stage 3": read_report(*traces)}
        with writing(self._folder.path):
            write_report(reports, self._folder.path)
        show_report(reports)
        print(f"\n{stats}")
        print(f"\nvalidation loss       {val_loss:.3f} nats/byte ({bits(val_loss):.3f} bits)")
        print(
            f"byte-unigram entropy  {entropy:.3f} nats/byte ({bits(entropy):.3f} bits), same text"
        )
        print(f"run folder: {self._folder.path}; the overlap is drawn in overlap.html")
