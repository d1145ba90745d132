"""Counters that users and tests read, and the counts at which rare checks run."""

from __future__ import annotations

from dataclasses import dataclass, fields

CHECKED_COUNTS = frozenset([0, *(1 << power for power in range(63))])
"""The counts at which something is looked for that lasts, once it is there: 1, 2, 4, 8 ... The test
for one is not a function, which would be one more call in each step."""


@dataclass
class Stats:
    """What a context has done since it was made, or since :meth:`reset`. Bytes are this rank's.

    ``current_*`` count what exists now, ``peak_*`` the most that existed at once. The others add
    up.
    """

    all_gathers: int = 0
    all_gather_bytes: int = 0
    """Bytes of the gathered buffers."""
    reduce_scatters: int = 0
    reduce_scatter_bytes: int = 0
    """Bytes of the buffers reduced."""
    order_checks: int = 0
    confirmations: int = 0
    """How often this rank waited for the others before a collective that it had not predicted."""
    prefetch_hits: int = 0
    """Uses whose all-gather was enqueued ahead, or whose buffer was kept from the last use because
    this one was predicted or asked for."""
    prefetch_misses: int = 0
    """Uses that had to enqueue their own all-gather."""
    prefetches_unused: int = 0
    """All-gathers enqueued ahead and released unused."""
    current_full_buffers: int = 0
    peak_full_buffers: int = 0
    current_reduce_inputs: int = 0
    peak_reduce_inputs: int = 0

    def reset(self) -> None:
        """Start counting again. What is alive stays counted."""
        alive = self.current_full_buffers, self.current_reduce_inputs
        for field in fields(self):
            setattr(self, field.name, 0)
        self.current_full_buffers, self.current_reduce_inputs = alive
        self.peak_full_buffers, self.peak_reduce_inputs = alive

    def count_confirmation(self) -> None:
        self.confirmations += 1

    def __repr__(self) -> str:
        mib = 1024 * 1024
        return (
            f"all-gathers {self.all_gathers} ({self.all_gather_bytes / mib:.1f} MiB), "
            f"reduce-scatters {self.reduce_scatters} ({self.reduce_scatter_bytes / mib:.1f} MiB), "
            f"order checks {self.order_checks}, confirmations {self.confirmations}; prefetch hits "
            f"{self.prefetch_hits}, misses {self.prefetch_misses}, unused "
            f"{self.prefetches_unused}; full buffers {self.current_full_buffers} (peak "
            f"{self.peak_full_buffers}), reduce inputs {self.current_reduce_inputs} (peak "
            f"{self.peak_reduce_inputs})"
        )
