"""Which full buffers exist: all-gathers, prefetch and delayed release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_overlap.comm.lanes import Lane, Mark
from fsdp_overlap.runtime.stats import Stats
from fsdp_overlap.tensor.sharded_tensor import ShardEdits

if TYPE_CHECKING:
    from fsdp_overlap.runtime.unit import Unit


class Gathers:
    """Keeps the number of full buffers that exist beside those in use within ``prefetch``.

    A buffer that is not in use was either gathered ahead or waits for its delayed release. Every
    decision follows from the order of calls alone, so that all ranks enqueue the same all-gathers.
    """

    def __init__(self, lane: Lane, prefetch: int, stats: Stats) -> None:
        self.lane = lane
        self.prefetch = prefetch
        self.stats = stats
        self._ahead: dict[Unit, None] = {}
        self._delayed: dict[Unit, Mark] = {}
        self._seen_edits = -1

    def use(self, unit: Unit) -> None:
        """Enqueues the all-gather of ``unit`` unless that was done ahead or it is still whole."""
        self._delayed.pop(unit, None)
        ahead = unit in self._ahead
        self._ahead.pop(unit, None)
        if unit.is_gathered and unit.is_fresh:
            self.stats.prefetch_hits += ahead
            return
        self._make_room()
        self._gather(unit)
        self.stats.prefetch_misses += 1

    def use_ahead(self, upcoming: Sequence[Unit]) -> None:
        """Enqueues the all-gathers of the units expected next and drops what was expected in
        vain."""
        for unit in [unit for unit in self._ahead if unit not in upcoming]:
            self._drop(unit)
        for unit in upcoming:
            if unit.is_gathered and unit.is_fresh:
                continue
            if len(self._ahead) + len(self._delayed) >= self.prefetch:
                break
            self._gather(unit)
            self._ahead[unit] = None

    def release(self, unit: Unit) -> None:
        """Frees the buffer of ``unit`` once the compute enqueued so far has read it.

        Where the host runs ahead of compute that is put off until the next all-gather is enqueued,
        which then does not wait for it.
        """
        self.release_after_next(unit)
        if not self.lane.runs_ahead:
            self.flush()

    def release_after_next(self, unit: Unit) -> None:
        """Like :meth:`release`, put off on every device: the unit may be used again at once."""
        if unit.is_gathered:
            self._ahead.pop(unit, None)
            self._delayed[unit] = self.lane.mark_compute()

    def flush(self) -> None:
        """Carries out the delayed releases."""
        for unit, mark in self._delayed.items():
            unit.free(mark)
        self._delayed.clear()

    def finish_pass(self) -> None:
        """Frees all that is not in use."""
        self.flush()
        for unit in list(self._ahead):
            self._drop(unit)

    def drop(self) -> None:
        """Forgets everything; the buckets are brought to rest elsewhere."""
        self._ahead.clear()
        self._delayed.clear()

    def after_edits(self) -> None:
        """Makes all-gathers from now on see every edit of a shard made so far."""
        self.lane.after_compute()
        self._seen_edits = ShardEdits.clock

    def _gather(self, unit: Unit) -> None:
        # A buffer that is gathered again may still be read by compute.
        if self._seen_edits != ShardEdits.clock or unit.is_gathered:
            self.after_edits()
        unit.gather()

    def _make_room(self) -> None:
        """Before an all-gather that nobody predicted. First what was gathered in vain, because a
        delayed release makes the lane wait for compute."""
        for unit in list(self._ahead):
            if len(self._ahead) + len(self._delayed) <= self.prefetch:
                return
            self._drop(unit)
        if len(self._delayed) > self.prefetch:
            self.flush()

    def _drop(self, unit: Unit) -> None:
        del self._ahead[unit]
        self.stats.prefetches_unused += 1
        unit.free(None)
