"""Flat tensors whose storage can be freed and reallocated in place, and the version counters of the
parameters in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from fsdp_overlap.layout import Plan
from fsdp_overlap.layout.plan import align
from fsdp_overlap.tensor.host_memory import MMAP_BYTES, freed_memory, use_huge_pages
from fsdp_overlap.torch_internals import allow_access, refuse_access, set_versions

# ---- Buffers ----


class MemorySource(Protocol):
    """Where buffers can take their memory."""

    def use(self) -> AbstractContextManager[None]:
        """Take what this thread allocates within from there."""
        ...


class Buffer:
    """Storages that come and go together while the tensors in them stay.

    :meth:`allocate` and :meth:`free` only resize storages. A tensor in one must not be read while
    :attr:`allocated` is false. Such a read ends the process, unless torch can raise
    :attr:`when_freed`.
    """

    allocated = True
    keeps_storage = False
    """Whether :meth:`free` leaves the storages alone, so that addresses stay the same."""
    memory: MemorySource | None = None
    """Where :meth:`allocate` takes memory. ``None``: where torch takes it."""
    when_freed = ""
    """The text of the error that reading the freed buffer raises. Empty: no error."""
    _heap_bytes = 0
    """How much of it malloc takes from its heap."""
    _refuses = False

    def __init__(self) -> None:
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        """Each with its size."""
        self.storage_ids: set[int] = set()
        """Their addresses, by which torch's storage of a tensor is told to be one of them."""
        self._tensors: list[torch.Tensor] = []
        """One in each storage."""

    flat: torch.Tensor
    """On the device of what the buffer holds."""

    def digests(self) -> torch.Tensor:
        """Return one number for each parameter, which tells edits of what it holds."""
        raise NotImplementedError

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the parameter that ``tensor``, which lies in this buffer, is a part
        of."""
        raise NotImplementedError

    def give_back(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Give those of ``tensors`` that have other memory than the parameter of the same number
        that memory back. Return their numbers."""
        raise NotImplementedError

    def _add(self, tensor: torch.Tensor) -> None:
        """Add the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        self._storages.append((storage, storage.nbytes()))
        self.storage_ids.add(storage._cdata)
        self._tensors.append(tensor)
        if tensor.device.type == "cpu" and storage.nbytes() < MMAP_BYTES:
            self._heap_bytes += storage.nbytes()

    @property
    def nbytes(self) -> int:
        """The size of all storages while they are there."""
        return sum(nbytes for _, nbytes in self._storages)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in this buffer's storages."""
        return tensor.untyped_storage()._cdata in self.storage_ids

    def allocate(self) -> None:
        """Give the buffer storage on the current stream; its contents are undefined."""
        if self._refuses:
            self._allow()
        if self.memory is not None:
            self._allocate_in(self.memory)
        else:
            for storage, nbytes in self._storages:
                storage.resize_(nbytes)
                if nbytes >= MMAP_BYTES and storage.device.type == "cpu":
                    use_huge_pages(storage.data_ptr(), nbytes)
        self.allocated = True

    def _allocate_in(self, memory: MemorySource) -> None:
        with memory.use():
            for storage, nbytes in self._storages:
                storage.resize_(nbytes)

    def record_stream(self, stream: Any) -> None:
        """Record ``stream``, as ``torch.Tensor.record_stream`` does, for all that is freed next."""
        for tensor in self._tensors:
            tensor.record_stream(stream)

    def free(self) -> None:
        """Give the storage back to the current stream's allocator."""
        if self.keeps_storage or not self.allocated:
            return
        for storage, _ in self._storages:
            storage.resize_(0)
        self.allocated = False
        freed_memory.nbytes += self._heap_bytes
        if freed_memory.nbytes >= freed_memory.LOOK_EVERY:
            freed_memory.look()
        if allow_access is not None and self.when_freed:  # what refuses must be able to allow
            self._refuse()

    def _refuse(self) -> None:
        assert refuse_access is not None
        for storage, _ in self._storages:
            refuse_access(storage._cdata, self.when_freed)
        self._refuses = True

    def _allow(self) -> None:
        assert allow_access is not None
        for storage, _ in self._storages:
            allow_access(storage._cdata)
        self._refuses = False


class FlatBuffer(Buffer):
    """The flat storage behind a param group's unsharded parameters or unreduced gradients.

    ``flat`` has shape ``[plan.numel]``, and ``views[i]`` has the shape of ``plan.specs[i]``.
    ``gaps`` are the parts of ``flat`` that belong to no view, if there are any. All are made once.
    """

    def __init__(self, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.plan = plan
        # A tensor that is made in inference mode can never take part in autograd.
        with torch.inference_mode(False), torch.no_grad():
            self.flat = torch.empty(plan.numel, dtype=dtype, device=device)
            self.views = [
                self.flat[offset : offset + spec.numel].view(spec.shape)
                for spec, offset in zip(plan.specs, plan.offsets, strict=True)
            ]
            ends = [o + spec.numel for spec, o in zip(plan.specs, plan.offsets, strict=True)]
            self.gaps = [
                self.flat[end:start]
                for end, start in zip([0, *ends], [*plan.offsets, plan.numel], strict=True)
                if end < start
            ]
        self._add(self.flat)
        self.free()

    def nbytes_of_others(self, rank: int) -> int:
        """Return the bytes that ranks other than ``rank`` hold. So many travel to it in an
        all-gather, and from it in a reduce-scatter."""
        return (self.plan.numel - self.plan.shard_numels[rank]) * self.flat.element_size()

    def digests(self) -> torch.Tensor:
        places = zip(self.plan.specs, self.plan.offsets, strict=True)
        padded = [(at, at + align(spec.numel, spec.alignment)) for spec, at in places]
        return torch.stack(
            [self.flat[start:stop].view(torch.int64).sum() for start, stop in padded]
        )

    def index_of(self, tensor: torch.Tensor) -> int | None:
        start = int(tensor.storage_offset())
        for index, (spec, offset) in enumerate(
            zip(self.plan.specs, self.plan.offsets, strict=True)
        ):
            if offset <= start < offset + spec.numel:
                return index
        return None

    def give_back(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        moved = []
        for index, (tensor, view) in enumerate(zip(tensors, self.views, strict=True)):
            if tensor.data_ptr() != view.data_ptr():
                tensor.data = view
                moved.append(index)
        return moved


# ---- Version counters of unsharded parameters: what autograd may read ----

version_of = attrgetter("_version")

NOT_GATHERED = 2**31
"""The version of a parameter that must not be read, because its memory is freed or not filled."""


class VersionCounters:
    """The version counters of one param group's unsharded parameters.

    All-gathers do not count as edits, because they write into the full buffer underneath. Between
    the release of the buffer and the end of the next all-gather the counters are at
    :data:`NOT_GATHERED`. Autograd then refuses to read what it saved of the parameters.

    ``counted``: what autograd may save, and what has a counter of its own.
    """

    are_forbidden = False
    """Whether autograd refuses to read the parameters."""

    def __init__(self, counted: Sequence[torch.Tensor]) -> None:
        self.counted = tuple(counted)
        self.versions = tuple(map(version_of, self.counted))
        """What they were when :meth:`edited` was last asked."""
        self._not_gathered = (NOT_GATHERED,) * len(counted)

    def forbid_reads(self) -> None:
        """Make autograd refuse to read the parameters, until :meth:`allow_reads`. An edit stays in
        the counters for :meth:`edited` instead."""
        if not self.are_forbidden and tuple(map(version_of, self.counted)) == self.versions:
            self.are_forbidden = True
            set_versions(self.counted, self._not_gathered)

    def allow_reads(self) -> None:
        """Take :meth:`forbid_reads` back: the parameters have their values."""
        if self.are_forbidden:
            self.are_forbidden = False
            set_versions(self.counted, self.versions)

    def edited(self) -> int | None:
        """Return the index of a tensor that was edited in place since this was last asked. ``None``
        if none was."""
        versions = tuple(map(version_of, self.counted))
        return None if versions == self.versions or self.are_forbidden else self._take(versions)

    def _take(self, versions: tuple[int, ...]) -> int:
        """Keep ``versions``. Return the index of the first that differs."""
        pairs = zip(versions, self.versions, strict=True)
        index = next(index for index, (now, before) in enumerate(pairs) if now != before)
        self.versions = versions
        return index

    def increment(self, parameters: Collection[torch.Tensor]) -> None:
        """Make autograd refuse to read ``parameters`` for every graph made so far."""
        self.allow_reads()
        before = tuple(map(version_of, self.counted))
        increment_version(parameters)
        self.versions = tuple(
            known + now - then
            for known, now, then in zip(
                self.versions, map(version_of, self.counted), before, strict=True
            )
        )
