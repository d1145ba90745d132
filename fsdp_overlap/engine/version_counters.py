"""The version counters of unsharded parameters, by which autograd knows what it may read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter

import torch
from torch.autograd.graph import increment_version

from fsdp_overlap.torch_internals import set_versions

_version = attrgetter("_version")

NOT_GATHERED = 2**31
"""The version of a parameter that must not be read, because its memory is freed or not filled."""


class VersionCounters:
    """The version counters of one bucket's unsharded parameters.

    All-gathers do not count as edits, because they write into the full buffer underneath. Between
    the release of the buffer and the end of the next all-gather the counters are at
    :data:`NOT_GATHERED`. Autograd then refuses to read what it saved of the parameters.

    ``counted``: what autograd may save, and what has a counter of its own.
    """

    def __init__(self, counted: Sequence[torch.Tensor]) -> None:
        self._counted = tuple(counted)
        self._versions = tuple(map(_version, self._counted))
        self._not_gathered = (NOT_GATHERED,) * len(counted)
        self.are_forbidden = False
        """Whether autograd refuses to read the parameters."""
        self._times_forbidden = 0

    def forbid_reads(self) -> None:
        """Make autograd refuse to read the parameters, until :meth:`allow_reads`."""
        if self.are_forbidden:
            return
        # Reading the counters takes longer than setting them. What others miss is looked for in
        # times 1, 2, 4, 8 ...: an edit stays in the counters for :meth:`edited`.
        self._times_forbidden += 1
        is_looked_at = not self._times_forbidden & (self._times_forbidden - 1)
        if is_looked_at and tuple(map(_version, self._counted)) != self._versions:
            return
        self.are_forbidden = True
        set_versions(self._counted, self._not_gathered)

    def allow_reads(self) -> None:
        """Take :meth:`forbid_reads` back: the parameters have their values."""
        if self.are_forbidden:
            self.are_forbidden = False
            set_versions(self._counted, self._versions)

    def has_edits(self) -> bool:
        """Return whether a tensor was edited in place since :meth:`edited` was last asked."""
        return tuple(map(_version, self._counted)) != self._versions and not self.are_forbidden

    def edited(self) -> int | None:
        """Return the index of a tensor that was edited in place since this was last asked. ``None``
        if none was."""
        if not self.has_edits():
            return None
        versions = tuple(map(_version, self._counted))
        pairs = zip(versions, self._versions, strict=True)
        index = next(index for index, (now, before) in enumerate(pairs) if now != before)
        self._versions = versions
        return index

    def increment(self, parameters: Collection[torch.Tensor]) -> None:
        """Make autograd refuse to read ``parameters`` for every graph made so far."""
        self.allow_reads()
        before = tuple(map(_version, self._counted))
        increment_version(parameters)
        self._versions = tuple(
            known + now - then
            for known, now, then in zip(
                self._versions, map(_version, self._counted), before, strict=True
            )
        )
