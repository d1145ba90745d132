"""Counters that users and tests read."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Stats:
    """What a context has done since it was made, or since :meth:`reset`. Bytes are this rank's.

    ``*_alive`` count what exists now, ``*_most`` the most that existed at once. The others add up.
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
    full_buffers_alive: int = 0
    full_buffers_most: int = 0
    reduce_inputs_alive: int = 0
    reduce_inputs_most: int = 0

    def reset(self) -> None:
        """Starts counting again. What is alive stays counted."""
        alive = self.full_buffers_alive, self.reduce_inputs_alive
        for field in fields(self):
            setattr(self, field.name, 0)
        self.full_buffers_alive, self.reduce_inputs_alive = alive
        self.full_buffers_most, self.reduce_inputs_most = alive

    def count_confirmation(self) -> None:
        self.confirmations += 1

    def count_full_buffer(self) -> None:
        self.full_buffers_alive += 1
        if self.full_buffers_alive > self.full_buffers_most:
            self.full_buffers_most = self.full_buffers_alive

    def count_reduce_input(self) -> None:
        self.reduce_inputs_alive += 1
        if self.reduce_inputs_alive > self.reduce_inputs_most:
            self.reduce_inputs_most = self.reduce_inputs_alive

    def __repr__(self) -> str:
        mib = 1024 * 1024
        return (
            f"all-gathers {self.all_gathers} ({self.all_gather_bytes / mib:.1f} MiB), "
            f"reduce-scatters {self.reduce_scatters} ({self.reduce_scatter_bytes / mib:.1f} MiB), "
            f"order checks {self.order_checks}, confirmations {self.confirmations}; "
            f"prefetch hits {self.prefetch_hits}, misses {self.prefetch_misses}, "
            f"unused {self.prefetches_unused}; "
            f"full buffers {self.full_buffers_alive} (most {self.full_buffers_most}), "
            f"reduce inputs {self.reduce_inputs_alive} (most {self.reduce_inputs_most})"
        )
