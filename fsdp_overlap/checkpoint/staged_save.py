"""An asynchronous save: the shards that are not written yet, and the host copies of them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from weakref import finalize, ref

import torch

from fsdp_overlap.comm.comm_streams import has_streams, streams_of
from fsdp_overlap.comm.host_copies import D2HCopy, copy_to_host
from fsdp_overlap.comm.threads import make_thread, on_device
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, ShardedParam, boxes_of

Offsets = tuple[int, ...]


class StagingBuffers:
    """The host copies that no writer has taken yet, of all saves of one stager.

    ``changed`` guards these and the state of the saves, and is notified when copies are freed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.peak_bytes = 0
        self.changed = threading.Condition()
        self._streams: dict[torch.device, Any] = {}

    def fits(self, nbytes: int) -> bool:
        return self.nbytes + nbytes <= self.max_bytes

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_bytes = max(self.nbytes, self.peak_bytes)

    def after_compute(self, device: torch.device) -> None:
        """Order copies from ``device`` after the compute enqueued so far."""
        if has_streams(device):
            if device not in self._streams:
                self._streams[device] = streams_of(device).Stream(device)
            self._streams[device].wait_stream(streams_of(device).current_stream(device))

    def before_compute(self) -> None:
        """Order compute enqueued from now on after the copies made so far."""
        for device, stream in self._streams.items():
            streams_of(device).current_stream(device).wait_stream(stream)

    def copy(self, source: torch.Tensor) -> D2HCopy:
        """Return a copy on the host. From a device with streams it is only enqueued, into pinned
        memory."""
        stream = self._streams.get(source.device)
        pinned = stream is not None
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
        if stream is None:
            return copy_to_host(source, host)
        # The writer's thread has another current device, on which leaving stream() alone would make
        # a CUDA context.
        with on_device(source.device), streams_of(source.device).stream(stream):
            copied = copy_to_host(source, host)
        source.record_stream(stream)  # users may free an optimizer's states meanwhile
        return copied


class StagedChunk:
    """A part of a shard, one item of a checkpoint. It has its ``source`` until it is copied."""

    __slots__ = ("copy", "nbytes", "source")

    def __init__(self, source: torch.Tensor) -> None:
        self.source: torch.Tensor | None = source
        self.copy: D2HCopy | None = None
        self.nbytes = source.nbytes


class StagedShard:
    """This rank's shard of one tensor, with the version that is saved. ``chunks`` are those that
    the writer has not taken, by their offsets in the full tensor, and ``given`` those that it has.
    """

    def __init__(self, name: str, tensor: ShardedParam) -> None:
        self.name = name
        self.device = tensor._local_tensor.device
        self._local: torch.Tensor | None = tensor._local_tensor
        self._edits = tensor.edits
        self._saved = self._version(tensor._local_tensor)
        self.chunks: dict[Offsets, StagedChunk] = {}
        self.given: dict[Offsets, torch.Tensor] = {}
        local = tensor._local_tensor.detach()
        if isinstance(tensor, RaggedDTensor):
            first, _ = tensor.local_range
            for box in boxes_of(tensor._spec):
                start = box.start - first
                source = local[start : start + box.numel].view(box.sizes)
                self.chunks[box.offsets] = StagedChunk(source)
        else:
            (rows,) = tensor.__create_chunk_list__()
            self.chunks[tuple(rows.offsets)] = StagedChunk(local)

    def _version(self, local: torch.Tensor) -> int:
        # Fused ops bump no version counter, and edits of to_local() count only there.
        return local._version + (self._edits.values if self._edits is not None else 0)

    def is_edited(self) -> bool:
        return self._local is not None and self._version(self._local) != self._saved

    def drop_source(self) -> None:
        """Drop the reference to the shard, which may be edited from now on."""
        self._local = None

    def free(self, offsets: Offsets) -> None:
        """Free a chunk that is written. Writers keep tensors until their file is done."""
        values = self.given.pop(offsets, None)
        if values is not None:
            values.untyped_storage().resize_(0)


class StagedSave:
    """One asynchronous save.

    Its writer takes chunk after chunk, as a copy that is made then or was made ahead. Before shards
    are edited, :meth:`copy_remaining` copies the chunks that are left.
    """

    def __init__(self, buffers: StagingBuffers) -> None:
        self._buffers = buffers
        self._shards: list[StagedShard] = []
        self._uncopied: dict[StagedChunk, None] = {}
        """The chunks without a copy, in the order of writing."""
        self._num_untaken = 0
        """The chunks that the writer has not taken."""
        self._held_bytes = [0]
        """The bytes of this save's copies in the buffers, which its finalizer subtracts."""
        finalize(self, _release_bytes, buffers, self._held_bytes).atexit = False
        self._num_waiting = 0
        """The threads that wait for a copy."""
        self._last_taken: StagedShard | None = None
        self._all_copied = False
        self._failure: RuntimeError | None = None

    def begin(self, shards: Iterable[StagedShard]) -> None:
        with self._buffers.changed:
            self._shards = list(shards)
            chunks = (chunk for shard in self._shards for chunk in shard.chunks.values())
            self._uncopied = dict.fromkeys(chunks)
            self._num_untaken = len(self._uncopied)
            for device in {shard.device for shard in self._shards}:
                self._buffers.after_compute(device)
            self._copy_ahead()

    def keep(self, planned: Mapping[StagedShard, Collection[Offsets]]) -> None:
        """Drop the chunks that are not ``planned``, which other replicas write."""
        with self._buffers.changed:
            for shard, kept in planned.items():
                for offsets in shard.chunks.keys() - kept:
                    chunk = shard.chunks.pop(offsets)
                    self._num_untaken -= 1
                    self._uncopied.pop(chunk, None)
                    self._drop_copy(chunk)
            self._buffers.changed.notify_all()

    def take(self, shard: StagedShard, offsets: Offsets) -> torch.Tensor:
        """Return a chunk in its own memory, on the host. Called by the writer, in any thread.

        Raises:
            RuntimeError: the shard was edited before, or the chunk was taken before.
        """
        buffers = self._buffers
        with buffers.changed:
            self._raise_failure()
            chunk = self._chunk_at(shard, offsets)
            del shard.chunks[offsets]
            self._num_untaken -= 1
            copy = self._copy_of(chunk)
            self._uncopied.pop(chunk, None)
            self._drop_copy(chunk)
            self._num_waiting += 1
            buffers.changed.notify_all()
        values = self._wait_for(copy, shard.device)
        with buffers.changed:
            # The last shard too, since an edit is counted when it ends, and at the end all.
            recent = (shard, self._last_taken or shard)
            for checked in recent if self._num_untaken else self._shards:
                self._check_for_edit(checked)
            self._last_taken = shard
            self._raise_failure()
            shard.given[offsets] = values
            self._copy_ahead()
        return values

    def peek(self, shard: StagedShard, offsets: Offsets) -> torch.Tensor:
        """Return the values of a chunk that is not taken yet.

        Raises:
            RuntimeError: as :meth:`take`.
        """
        with self._buffers.changed:
            self._raise_failure()
            copy = self._copy_of(self._chunk_at(shard, offsets))
            self._num_waiting += 1
        values = self._wait_for(copy, shard.device)
        with self._buffers.changed:
            self._check_for_edit(shard)
            self._raise_failure()
        return values

    def copy_remaining(self) -> None:
        """Copy what is left, so that shards may be edited. If there is no room for copies, wait for
        the writer. On a device with streams, compute waits for the copies."""
        buffers = self._buffers
        with buffers.changed:
            if self._all_copied:
                return
            for shard in self._shards:
                self._check_for_edit(shard)
        while self._uncopied:
            with buffers.changed:  # for one chunk at a time, so that the writer can take others
                chunk = next(iter(self._uncopied), None)
                if chunk is None:
                    break
                if buffers.fits(chunk.nbytes):
                    self._copy(chunk)
                else:
                    buffers.changed.wait()
        with buffers.changed:
            self._all_copied = True
            buffers.before_compute()
            for shard in self._shards:
                shard.drop_source()

    def finish_copies(self) -> None:
        """Block until all copies are made, which :meth:`copy_remaining` has enqueued. The threads
        that take them call no device then."""
        changed = self._buffers.changed
        with changed:
            for shard in self._shards:
                for chunk in shard.chunks.values():
                    if chunk.copy is not None:
                        chunk.copy = D2HCopy(chunk.copy.wait(), None)
            changed.wait_for(lambda: not self._num_waiting)

    def _wait_for(self, copy: D2HCopy, device: torch.device) -> torch.Tensor:
        """Block until ``copy``, one of :attr:`_num_waiting`, is made."""
        try:
            with on_device(device):
                return copy.wait()
        finally:
            with self._buffers.changed:
                self._num_waiting -= 1
                self._buffers.changed.notify_all()

    def release_after(self, thread: threading.Thread) -> None:
        """Release everything when ``thread``, which saves, has ended: it may fail."""
        me = ref(self)

        def watch() -> None:
            thread.join()
            save = me()
            if save is not None:
                with save._buffers.changed:
                    save._release()

        if thread is not threading.main_thread():
            make_thread(watch, "ShardStager", None).start()

    def refuse(self, failure: RuntimeError) -> None:
        """Make the save fail."""
        with self._buffers.changed:
            self._failure = self._failure or failure
            self._release()

    def _chunk_at(self, shard: StagedShard, offsets: Offsets) -> StagedChunk:
        if offsets not in shard.chunks:
            raise RuntimeError(
                f"the part of {shard.name!r} at {offsets} was written before: what "
                "ShardStager.stage() returns can be written once"
            )
        return shard.chunks[offsets]

    def _copy_of(self, chunk: StagedChunk) -> D2HCopy:
        """Return the copy of ``chunk``, or a new one that is not counted."""
        if chunk.copy is not None:
            return chunk.copy
        assert chunk.source is not None
        return self._buffers.copy(chunk.source)

    def _copy(self, chunk: StagedChunk) -> None:
        chunk.copy = self._copy_of(chunk)
        chunk.source = None
        self._held_bytes[0] += chunk.nbytes
        self._buffers.add(chunk.nbytes)
        del self._uncopied[chunk]

    def _drop_copy(self, chunk: StagedChunk) -> None:
        if chunk.copy is not None:
            self._held_bytes[0] -= chunk.nbytes
            self._buffers.nbytes -= chunk.nbytes

    def _copy_ahead(self) -> None:
        """Copy ahead of the writer on devices with streams, where copies overlap with compute."""
        while chunk := next(iter(self._uncopied), None):
            assert chunk.source is not None
            if not has_streams(chunk.source.device) or not self._buffers.fits(chunk.nbytes):
                return
            self._copy(chunk)

    def _check_for_edit(self, shard: StagedShard) -> None:
        if shard.is_edited():
            self.refuse(
                RuntimeError(
                    f"{shard.name!r}, or another parameter of its unit, was edited while it was "
                    "being saved, and not by an optimizer's step: wait for the save before you "
                    "edit what it writes, or call synchronize_staging() of its ShardStager"
                )
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _release(self) -> None:
        for shard in self._shards:
            for chunk in shard.chunks.values():
                self._drop_copy(chunk)
            shard.chunks.clear()
            shard.given.clear()
            shard.drop_source()
        self._shards = []
        self._uncopied = {}
        self._buffers.changed.notify_all()


def _release_bytes(buffers: StagingBuffers, held_bytes: list[int]) -> None:
    with buffers.changed:
        buffers.nbytes -= held_bytes[0]
        buffers.changed.notify_all()
