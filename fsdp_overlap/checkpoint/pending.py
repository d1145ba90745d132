"""What an asynchronous save has still to write, and the copies that are made of it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from weakref import finalize, ref

import torch

from fsdp_overlap.comm.streams import has_streams, streams_of
from fsdp_overlap.engine.param_group import D2HCopy, copy_to_host
from fsdp_overlap.tensor.chunks import chunks_of
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor
from fsdp_overlap.tensor.row_tensor import Sharded

Offsets = tuple[int, ...]


class Copies:
    """The copies of shards that no writer has taken yet, of all saves of one stager.

    ``changed`` guards these and all that the saves know, and is notified when room is made.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.most_nbytes = 0
        self.changed = threading.Condition()
        self._streams: dict[torch.device, Any] = {}

    def has_room(self, nbytes: int) -> bool:
        return self.nbytes + nbytes <= self.max_bytes

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.most_nbytes = max(self.nbytes, self.most_nbytes)

    def after_compute(self, device: torch.device) -> None:
        """Copies from ``device`` that are made from now on see the compute enqueued so far."""
        if has_streams(device):
            if device not in self._streams:
                self._streams[device] = streams_of(device).Stream(device)
            self._streams[device].wait_stream(streams_of(device).current_stream(device))

    def before_compute(self) -> None:
        """Compute enqueued from now on starts after the copies made so far."""
        for device, stream in self._streams.items():
            streams_of(device).current_stream(device).wait_stream(stream)

    def copy(self, source: torch.Tensor) -> D2HCopy:
        """A copy on the host. One from a device with streams is only enqueued, in pinned memory."""
        stream = self._streams.get(source.device)
        pinned = stream is not None
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
        if stream is None:
            return copy_to_host(source, host)
        # The thread of a writer has another current device. Where stream() went back to one of its
        # streams, it would make a context there.
        streams = streams_of(source.device)
        with streams.device(source.device), streams.stream(stream):
            landing = copy_to_host(source, host)
        source.record_stream(stream)  # users may let go of an optimizer's states meanwhile
        return landing


class Piece:
    """One item of a checkpoint: a part of a shard. It has its ``source`` until it is copied."""

    __slots__ = ("copy", "nbytes", "source")

    def __init__(self, source: torch.Tensor) -> None:
        self.source: torch.Tensor | None = source
        self.copy: D2HCopy | None = None
        self.nbytes = source.nbytes


class PendingShard:
    """This rank's part of one sharded tensor, with the version that is saved. ``pieces`` are those
    that the writer has not taken, by their offsets in the whole tensor, and ``given`` those that it
    has."""

    def __init__(self, name: str, tensor: Sharded) -> None:
        self.name = name
        self.device = tensor._local_tensor.device
        self._local: torch.Tensor | None = tensor._local_tensor
        self._edits = tensor.edits
        self._saved = self._version(tensor._local_tensor)
        self.pieces: dict[Offsets, Piece] = {}
        self.given: dict[Offsets, torch.Tensor] = {}
        local = tensor._local_tensor.detach()
        if isinstance(tensor, RaggedDTensor):
            first, _ = tensor.local_range
            for box in chunks_of(tensor._spec):
                start = box.start - first
                source = local[start : start + box.numel].view(box.sizes)
                self.pieces[box.offsets] = Piece(source)
        else:
            (rows,) = tensor.__create_chunk_list__()
            self.pieces[tuple(rows.offsets)] = Piece(local)

    def _version(self, local: torch.Tensor) -> int:
        # Fused ops bump no version counter, and what edits to_local() counts nowhere else.
        return local._version + (self._edits.values if self._edits is not None else 0)

    def is_edited(self) -> bool:
        return self._local is not None and self._version(self._local) != self._saved

    def forget(self) -> None:
        """From now on the shard may be edited, and freed."""
        self._local = None

    def free(self, offsets: Offsets) -> None:
        """Frees a piece that is written. Writers keep tensors until their file is done."""
        values = self.given.pop(offsets, None)
        if values is not None:
            values.untyped_storage().resize_(0)


class PendingSave:
    """One asynchronous save.

    Its writer takes piece after piece, each as a copy that is made then. Whoever edits shards calls
    :meth:`settle` before, which copies what is left.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._shards: list[PendingShard] = []
        self._unread: dict[Piece, None] = {}
        """Those without a copy, in the order of writing."""
        self._left = 0
        """The pieces that the writer has not taken."""
        self._counted = [0]
        """The bytes of copies that take up room, which is given back when this is gone."""
        finalize(self, _give_back, copies, self._counted).atexit = False
        self._taken_last: PendingShard | None = None
        self._settled = False
        self._failure: RuntimeError | None = None

    def begin(self, shards: Iterable[PendingShard]) -> None:
        with self._copies.changed:
            self._shards = list(shards)
            self._unread = {piece: None for each in self._shards for piece in each.pieces.values()}
            self._left = len(self._unread)
            for device in {shard.device for shard in self._shards}:
                self._copies.after_compute(device)
            self._copy_ahead()

    def keep(self, planned: Mapping[PendingShard, Collection[Offsets]]) -> None:
        """Lets go of pieces that are not ``planned``: other ranks that have them write them."""
        with self._copies.changed:
            for shard, kept in planned.items():
                for offsets in [each for each in shard.pieces if each not in kept]:
                    piece = shard.pieces.pop(offsets)
                    self._left -= 1
                    self._unread.pop(piece, None)
                    self._let_go(piece)
            self._copies.changed.notify_all()

    def take(self, shard: PendingShard, offsets: Offsets) -> torch.Tensor:
        """A piece in memory of its own, on the host. Called by the writer, in any thread.

        Raises:
            RuntimeError: the shard was edited before, or the piece was taken before.
        """
        copies = self._copies
        with copies.changed:
            self._raise_failure()
            piece = self._piece(shard, offsets)
            del shard.pieces[offsets]
            self._left -= 1
            copy = piece.copy
            if copy is None:
                assert piece.source is not None
                copy = copies.copy(piece.source)
                del self._unread[piece]
            self._let_go(piece)
            copies.changed.notify_all()
        values = copy.wait()
        with copies.changed:
            # Again also those before: an edit that ran meanwhile was counted at its end.
            recent = (shard, self._taken_last or shard)
            for each in recent if self._left else self._shards:
                self._look_for_edit(each)
            self._taken_last = shard
            self._raise_failure()
            shard.given[offsets] = values
            self._copy_ahead()
        return values

    def look_at(self, shard: PendingShard, offsets: Offsets) -> torch.Tensor:
        """The values of a piece that is still to be taken.

        Raises:
            RuntimeError: as :meth:`take`.
        """
        with self._copies.changed:
            self._raise_failure()
            piece = self._piece(shard, offsets)
            copy = piece.copy
            if copy is None:
                assert piece.source is not None
                copy = self._copies.copy(piece.source)
        values = copy.wait()
        with self._copies.changed:
            self._look_for_edit(shard)
            self._raise_failure()
        return values

    def settle(self) -> None:
        """Copies what is left, so that shards may be edited. Waits for the writer where there is no
        room for copies. On a device with streams it is compute that waits for copies."""
        copies = self._copies
        with copies.changed:
            if self._settled:
                return
            for shard in self._shards:
                self._look_for_edit(shard)
        while self._unread:
            with copies.changed:  # for one piece, so that the writer can take others
                piece = next(iter(self._unread), None)
                if piece is None:
                    break
                if copies.has_room(piece.nbytes):
                    self._copy(piece)
                else:
                    copies.changed.wait()
        with copies.changed:
            self._settled = True
            copies.before_compute()
            for shard in self._shards:
                shard.forget()

    def release_after(self, thread: threading.Thread) -> None:
        """Lets go of everything when ``thread``, which saves, has ended: it may have failed."""
        me = ref(self)

        def watch() -> None:
            thread.join()
            save = me()
            if save is not None:
                with save._copies.changed:
                    save._release()

        if thread is not threading.main_thread():
            threading.Thread(target=watch, name="ShardStager", daemon=True).start()

    def refuse(self, failure: RuntimeError) -> None:
        """Has the save fail."""
        with self._copies.changed:
            self._failure = self._failure or failure
            self._release()

    def _piece(self, shard: PendingShard, offsets: Offsets) -> Piece:
        if offsets not in shard.pieces:
            raise RuntimeError(
                f"the part of {shard.name!r} at {offsets} was written before: what "
                "ShardStager.stage() returns can be written once"
            )
        return shard.pieces[offsets]

    def _copy(self, piece: Piece) -> None:
        assert piece.source is not None
        piece.copy = self._copies.copy(piece.source)
        piece.source = None
        self._counted[0] += piece.nbytes
        self._copies.add(piece.nbytes)
        del self._unread[piece]

    def _let_go(self, piece: Piece) -> None:
        if piece.copy is not None:
            self._counted[0] -= piece.nbytes
            self._copies.nbytes -= piece.nbytes

    def _copy_ahead(self) -> None:
        """Where copies run beside compute they need not wait for the writer."""
        while piece := next(iter(self._unread), None):
            assert piece.source is not None
            if not has_streams(piece.source.device) or not self._copies.has_room(piece.nbytes):
                return
            self._copy(piece)

    def _look_for_edit(self, shard: PendingShard) -> None:
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
            for piece in shard.pieces.values():
                self._let_go(piece)
            shard.pieces.clear()
            shard.given.clear()
            shard.forget()
        self._shards = []
        self._unread = {}
        self._copies.changed.notify_all()


def _give_back(copies: Copies, counted: list[int]) -> None:
    with copies.changed:
        copies.nbytes -= counted[0]
        copies.changed.notify_all()
