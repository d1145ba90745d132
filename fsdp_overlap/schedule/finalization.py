"""The end of a backward: wait for its reductions, or leave that to the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_overlap.schedule.backward import GradReducer
from fsdp_overlap.schedule.interface import AutogradEngine, CommOps, ScheduledUnit
from fsdp_overlap.schedule.prefetch import Prefetcher


class GradientReductionHandle:
    """What ``finalize_backward(async_op=True)`` returns."""

    def __init__(self, finalizer: BackwardFinalizer | None) -> None:
        self._finalizer = finalizer

    def wait(self) -> None:
        """Make compute wait for the reductions. Afterwards ``.grad`` is complete.

        Raises:
            RuntimeError: the context was reset meanwhile.
        """
        if self._finalizer is not None:
            self._finalizer.finish(self)
            self._finalizer = None


@dataclass(eq=False)
class BackwardFinalizer:
    """Ends the backwards of one context.

    With manual finalization, backwards issue their reduce-scatters as always, but
    :meth:`finalize` and its handle complete the gradients.
    """

    _prefetcher: Prefetcher
    _reducer: GradReducer
    _comm: CommOps
    _engine: AutogradEngine
    _units: Callable[[], Sequence[ScheduledUnit]]
    is_manual: bool = False
    is_due: bool = False
    """Whether a backward ran that nobody finalized."""
    pending: GradientReductionHandle | None = None
    """The handle of a reduction that must be waited for before anything else."""

    def set_manual(self, enabled: bool) -> None:
        if enabled == self.is_manual:
            return
        if self.is_due or self.pending is not None or self._engine.is_in_backward():
            raise RuntimeError(
                f"set_manual_backward_finalization({enabled}) during a backward, or after one that "
                "is not finalized: call finalize_backward(), or reset_iter_state(), first"
            )
        self.is_manual = enabled

    def finalize(self) -> GradientReductionHandle:
        """Issue every reduction that is left, and free the full buffers that are not kept after
        backward."""
        self.check_done("finalize_backward()")
        if not self.is_manual:
            raise RuntimeError(
                "finalize_backward() without manual finalization: call "
                "set_manual_backward_finalization(True) before forward. In a pipeline, each "
                "stage takes an FsdpContext of its own"
            )
        if self._engine.is_in_backward():
            raise RuntimeError("finalize_backward() during backward: call it after backward()")
        self._issue_all()
        self.pending = GradientReductionHandle(self)
        return self.pending

    def complete(self) -> None:
        """Complete the gradients of backwards without synchronization, also if finalization is not
        manual."""
        self.check_done("the reduction of a pipeline's step")
        self._issue_all()
        self.is_due = False
        self._wait()

    def _issue_all(self) -> None:
        for unit in self._units():
            if unit.settings.reshard_after_backward and unit.is_gathered:
                self._prefetcher.hide_unsharded(unit)
                self._prefetcher.release(unit)
        self._prefetcher.flush()
        self._reducer.issue_rest(self._units())

    def finish(self, handle: GradientReductionHandle) -> None:
        if handle is not self.pending:
            raise RuntimeError(
                "this gradient reduction was dropped by reset_iter_state() or ctx.reset(): its "
                "gradients are lost"
            )
        self.pending = None
        self.is_due = False
        self._wait()

    def check_done(self, what: str) -> None:
        """Raise if a reduction is under way that must be waited for before ``what``."""
        if self.pending is not None:
            raise RuntimeError(
                f"{what} before the last gradient reduction was waited for: call wait() on the "
                "handle that finalize_backward(async_op=True) returned"
            )

    @property
    def is_under_way(self) -> bool:
        """Whether a backward ran whose gradients are not complete."""
        return self.is_due or self.pending is not None

    def drop(self) -> None:
        self.pending = None
        self.is_due = False

    def _wait(self) -> None:
        self._reducer.wait()
        self._comm.finish_backward()
