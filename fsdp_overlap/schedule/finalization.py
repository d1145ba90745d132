"""The end of a backward: wait for its reductions, or leave that to the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_overlap.schedule.backward import GradReducer
from fsdp_overlap.schedule.interface import AutogradEngine, CommOps, ScheduledUnit
from fsdp_overlap.schedule.prefetch import Prefetcher

UNFINISHED = (
    "the last backward did not finish (did it raise, and was the error caught?); after an error "
    "call ctx.reset(), or model.reset_iter_state(), which is the same, and optimizer.zero_grad() "
    "on every rank before the next {}"
)


class GradientReductionHandle:
    """What ``finalize_backward(async_op=True)`` returns."""

    def __init__(self, finalizer: BackwardFinalizer | None) -> None:
        self._finalizer = finalizer

    def wait(self) -> None:
        """Make compute wait for the reductions. Afterwards ``.grad`` is complete.

        Raises:
            RuntimeError: the context was reset meanwhile, or an earlier wait raised.
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
    _has_failed: bool = False
    """Whether issuing or waiting for :attr:`pending` raised. Gradients are missing then."""

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
        return self._begin()

    def complete(self) -> None:
        """Complete the gradients of backwards without synchronization, also if finalization is not
        manual."""
        self.check_done("the reduction of a pipeline's step")
        self._begin().wait()

    def _begin(self) -> GradientReductionHandle:
        self.pending = GradientReductionHandle(self)
        self._has_failed = True  # until all is issued: users' hooks may raise
        for unit in self._units():
            if unit.settings.reshard_after_backward and unit.is_gathered:
                self._prefetcher.hide_unsharded(unit)
                self._prefetcher.release(unit)
        self._prefetcher.flush()
        self._reducer.issue_rest(self._units())
        self._has_failed = False
        return self.pending

    def finish(self, handle: GradientReductionHandle) -> None:
        if handle is not self.pending:
            raise RuntimeError(
                "this gradient reduction was dropped by reset_iter_state() or ctx.reset(): its "
                "gradients are lost"
            )
        self._check_not_failed("backward")
        self._has_failed = True  # until all is complete
        self._reducer.wait()
        self._comm.finish_backward()
        self.drop()

    def _check_not_failed(self, what: str) -> None:
        if self._has_failed:
            raise RuntimeError(UNFINISHED.format(what))

    def check_done(self, what: str) -> None:
        """Raise if a reduction is under way that must be waited for before ``what``."""
        self._check_not_failed(what)
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
        self._has_failed = False
