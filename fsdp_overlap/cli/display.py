"""What rank 0 shows while it trains."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """A progress bar, and a line at each validation so that a log file has them too."""

    def __init__(self, steps: int, done: int) -> None:
        """`done` of `steps` were done before."""
        # soft_wrap: a log file's lines are not cut to the width of a terminal that is not there.
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done, status="")

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, step: int, loss: float, val_loss: float | None, tokens_per_s: float) -> None:
        """`step` steps are done; losses in nats per byte; `val_loss` is the latest, None before the
        first."""
        val = "" if val_loss is None else f"  val {val_loss:.3f}"
        status = f"loss {loss:.3f}{val}  {tokens_per_s:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, status=status)

    def print(self, line: str) -> None:
        self._console.print(line)
