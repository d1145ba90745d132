"""Weight deltas: the values of a sharded model's weights that changed since they were last sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from time import time

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.comm_streams import has_streams
from fsdp_overlap.weights.chunks import Chunk, local_chunks
from fsdp_overlap.weights.delta_format import DeltaMessage, WeightDelta, bits_of, index_dtype
from fsdp_overlap.weights.exchange import RankLayouts, WeightExchange, exchange_of
from fsdp_overlap.weights.model_weights import Names, is_first, renamed, weights_of
from fsdp_overlap.weights.safetensors_format import DTYPES
from fsdp_overlap.weights.transfer_plan import Layouts, full_layout

_WORD_BYTES = 8
_HOST_ELEMENTS = 1 << 20
"""At most so many elements are compared at a time on the host, which fit a core's cache."""


class WeightDeltas:
    """Finds which values of a model's weights changed, bit for bit in the dtype of inference, since
    they were last sent.

    Each rank compares its own shards with a copy of what it last sent of them, and sends positions
    in the full weight and new values. Comparing needs no collective and no full tensor, and does
    not ask who edited the weights, or how. Each value comes from one rank, also where shards have
    replicas; of plain tensors and buffers outside units the first rank's is sent.

    Args:
        model: as in :func:`export_weights`, as is ``names``.
        dtype: what floating-point weights are cast to. Others keep their dtype.
        on_host: whether the copy is kept in the host's memory, on a GPU pinned, instead of beside
            the shards.
        delta_bytes: the most that one :class:`WeightDelta` has, of positions and values.
        first_version: the number of the first message, by default the time in microseconds. So a
            job that starts again has no version of the one before, for which a receiver could take
            it.

    Attributes:
        version: the last version that was sent completely, 0 at first.
        sends: whether this rank's replica of the shards is the one that is sent.

    The call is collective over the ranks that the model lies over. It compares layouts, and values
    only of replicas that are on several meshes.

    Raises:
        RuntimeError: a weight is on the meta device, or a rank raised; names it.
        TypeError: a weight is of a class that alone knows how it is gathered.
        ValueError: safetensors does not know a dtype; ``names`` gives a name twice; ranks have
            different tensors of the same name, as experts, or parts of a weight are nowhere.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.bfloat16,
        names: Names | None = None,
        on_host: bool = False,
        delta_bytes: int = 64 << 20,
        first_version: int | None = None,
    ) -> None:
        self.version = 0
        self.model = model
        self._dtype, self._names = dtype, names
        self._on_host, self._delta_bytes = on_host, delta_bytes
        self._sent: dict[tuple[str, Chunk], torch.Tensor] = {}
        own = weights_of(model)
        self.sends = is_first(own.values())
        exchange = self.exchange("WeightDeltas")

        def describe() -> RankLayouts:
            if first_version is not None and first_version < 1:
                raise ValueError(f"first_version={first_version}: give 1 or more")
            weights = self._find()
            for name, tensor in weights.items():
                if self._dtype_of(tensor) not in DTYPES:
                    raise ValueError(
                        f"{name!r} is of {tensor.dtype}, which safetensors does not know"
                    )
            return exchange.layouts_of(weights, {})

        arguments = f"dtype={dtype}, delta_bytes={delta_bytes}, first_version={first_version}"
        gathered = exchange.gather_layouts(describe, arguments)
        [now, *_] = self.exchange("WeightDeltas", with_replicas=True).gather(int(time() * 1e6))
        self._last_begun = (now if first_version is None else first_version) - 1
        weights = self._find()
        exchange.check_replicas(gathered.has, weights)
        self._layouts = {name: _layout_of(tensor) for name, tensor in weights.items()}
        self._chunks = _chunks_sent_by(exchange.rank, gathered.has) if self.sends else {}

    def exchange(self, what: str, with_replicas: bool = False) -> WeightExchange:
        """Return the exchange among the ranks that hold the model, for errors about ``what``."""
        return exchange_of(self.model, weights_of(self.model).values(), what, with_replicas)

    def weights(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each weight as it is sent.

        Raises:
            RuntimeError: weights were added, replaced or moved since this was made.
        """
        return {
            name: (tuple(tensor.shape), self._dtype_of(tensor))
            for name, tensor in self._current().items()
        }

    def changes(self, *, dense: bool = False, version: int | None = None) -> DeltaMessage:
        """Return what changed since the last version, or all if there was none.

        Iterate it to its end before the weights are edited. Then this is the last version. If the
        loop is left early, the one before stays, and the next message is against that.

        Args:
            dense: whether to send all values, for a receiver that has no version, or missed one.
            version: the number of the new version, by default the next after the last that was
                begun.

        Raises:
            RuntimeError: weights were added, replaced or moved since this was made; or, in the
                loop, another message was begun.
            ValueError: ``version`` is not above the last that was begun.
        """
        message = self.begin(dense=dense, version=version)
        return DeltaMessage(message.version, message.base, _Once(message))

    @property
    def next_version(self) -> int:
        """The number of the next message. Those that were left early have numbers too: a receiver
        may have all of one of them, and must not take it for another."""
        return self._last_begun + 1

    def begin(self, *, dense: bool = False, version: int | None = None) -> OutgoingDeltas:
        """Return a message as :meth:`changes` does, which is the last version only when
        ``commit()`` is called."""
        version = self.next_version if version is None else version
        if version < self.next_version:
            raise ValueError(f"version={version} is not above the last, {self._last_begun}")
        weights = self._current()
        self._last_begun = version
        return OutgoingDeltas(version, 0 if dense else self.version, self, weights)

    def _find(self) -> dict[str, torch.Tensor]:
        return renamed(weights_of(self.model), self._names)

    def _current(self) -> dict[str, torch.Tensor]:
        """Return the weights, which lie as they did.

        Raises:
            RuntimeError: they do not.
        """
        weights = self._find()
        layouts = {name: _layout_of(tensor) for name, tensor in weights.items()}
        if layouts != self._layouts:
            both = layouts.keys() | self._layouts.keys()
            name = min(n for n in both if layouts.get(n) != self._layouts.get(n))
            raise RuntimeError(
                f"{name!r} was added, replaced or moved: make a new WeightDeltas, whose first "
                "message has all weights"
            )
        return weights

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return full_layout(tensor.shape, tensor.dtype, self._dtype).dtype


@dataclass
class OutgoingDeltas:
    """A message that is being sent. It remembers what it sent until ``commit()``."""

    version: int
    base: int
    _sender: WeightDeltas
    _weights: dict[str, torch.Tensor]
    _new: dict[tuple[str, Chunk], torch.Tensor] = field(default_factory=dict)
    _pending: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = field(
        default_factory=list
    )
    """Parts of the copy, positions in them, and bits to come there, all where the copy is."""
    _is_complete: bool = False

    def __iter__(self) -> Iterator[WeightDelta]:
        self._is_complete = False
        self._new.clear()
        self._pending.clear()
        for name, tensor in self._weights.items():
            of_rank = self._sender._chunks.get(name, ())
            for chunk, values in local_chunks(tensor) if of_rank else ():
                if chunk in of_rank:
                    yield from self._compared(name, tuple(tensor.shape), chunk, values.reshape(-1))
        self._is_complete = True

    def commit(self) -> None:
        """Make this the last version. What was sent goes into the copy.

        Raises:
            RuntimeError: it was not iterated to its end, or another message was begun since.
        """
        sender = self._sender
        if sender._last_begun != self.version:
            raise RuntimeError(f"another message was begun before version {self.version} was sent")
        if not self._is_complete:
            raise RuntimeError(f"version {self.version} was not iterated to its end")
        sender.version = 0  # until all of the copy is of one version
        for sent, places, bits in self._pending:
            if places is None:
                sent.copy_(bits)
            else:
                sent.index_copy_(0, places.long(), bits)
        sender._sent.update(self._new)
        sender.version = self.version

    def _compared(
        self, name: str, shape: tuple[int, ...], chunk: Chunk, values: torch.Tensor
    ) -> Iterator[WeightDelta]:
        """Yield what changed of ``chunk``, whose values are flat, in parts of bounded size."""
        sender = self._sender
        dtype = sender._dtype_of(values)
        sent = sender._sent.get((name, chunk))
        is_new, is_dense = sent is None, self.base == 0  # which is new is in a dense message
        if sent is None:
            sent = self._new[name, chunk] = self._empty_copy(values, dtype)
        positions = _Positions(shape, chunk)
        both = dtype.itemsize + positions.dtype.itemsize
        step = max(1, sender._delta_bytes // both)
        if values.device.type == "cpu":
            step = min(step, _HOST_ELEMENTS)
        if step > _WORD_BYTES:
            step -= step % _WORD_BYTES  # so that parts begin at whole words
        for at in range(0, values.numel(), step):
            current = bits_of(values[at : at + step].to(dtype, copy=True))
            before = sent[at : at + step]
            is_whole = is_dense
            if is_new:
                before.copy_(current)
            else:
                places = _changed_places(current, before.to(current.device, non_blocking=True))
                chosen = current[places]
                # Where many changed, all of them are fewer bytes than those with positions.
                is_most = chosen.numel() * both >= current.nbytes
                self._remember(before, *((None, current) if is_most else (places, chosen)))
                is_whole |= is_most
            if is_whole and positions.first is not None:
                yield WeightDelta(name, shape, current.view(dtype), None, positions.first + at)
                continue
            if is_dense:
                places, chosen = torch.arange(current.numel(), device=current.device), current
            if chosen.numel():
                yield WeightDelta(name, shape, chosen.view(dtype), positions(places, at))

    def _empty_copy(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        on_host = self._sender._on_host
        with torch.inference_mode(False):  # it is edited outside of it, too
            empty = torch.empty(
                values.numel(),
                dtype=dtype,
                device="cpu" if on_host else values.device,
                pin_memory=on_host and has_streams(values.device),
            )
            return bits_of(empty)

    def _remember(
        self, before: torch.Tensor, places: torch.Tensor | None, bits: torch.Tensor
    ) -> None:
        """Keep what goes into the part ``before`` of the copy, in memory of its own."""
        if bits.numel():
            if places is not None:
                places = places.to(before.device, torch.int32)
            self._pending.append((before, places, bits.to(before.device, copy=True)))


def _changed_places(current: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return where bits differ. Most do not, and finding those that do takes most of the time: so
    words of several elements are compared first."""
    per_word = _WORD_BYTES // current.itemsize
    if current.numel() % per_word or before.storage_offset() % per_word:
        return (current != before).nonzero().view(-1)
    differences = current.view(torch.int64) ^ before.view(torch.int64)
    words = differences.nonzero().view(-1)
    places = differences.index_select(0, words).view(current.dtype).nonzero().view(-1)
    within = places & (per_word - 1)
    return words.index_select(0, places >> (per_word.bit_length() - 1)) * per_word + within


class _Once:
    """The deltas of a message, which is the last version when they have been iterated."""

    def __init__(self, message: OutgoingDeltas) -> None:
        self._message, self._is_begun = message, False

    def __iter__(self) -> Iterator[WeightDelta]:
        if self._is_begun:
            raise RuntimeError(
                f"version {self._message.version} was iterated before: keep its deltas in a list"
            )
        self._is_begun = True
        return self._deltas()

    def _deltas(self) -> Iterator[WeightDelta]:
        yield from self._message
        self._message.commit()


class _Positions:
    """Maps positions in a chunk to those in the full tensor of ``shape``, both flattened. ``first``
    is that of the chunk's first element if all are adjacent, or else ``None``."""

    def __init__(self, shape: tuple[int, ...], chunk: Chunk) -> None:
        self._dims = list(zip(shape, *chunk, strict=True))[::-1]
        self.dtype = index_dtype(shape)
        self.first = chunk.first_position(shape)

    def __call__(self, places: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return the positions of the elements at ``places``, counted from ``start``."""
        if self.first is not None:
            return places.to(self.dtype) + (self.first + start)
        places = places + start
        result, stride = torch.zeros_like(places), 1
        for full, offset, size in self._dims:
            result += (places % size + offset) * stride
            places, stride = places // size, stride * full
        return result.to(self.dtype)


def _layout_of(tensor: torch.Tensor) -> tuple[object, ...]:
    spec = tensor._spec if isinstance(tensor, DTensor) else None
    return spec, tensor.shape, tensor.dtype


def _chunks_sent_by(rank: int, has: Layouts) -> dict[str, set[Chunk]]:
    """Return which chunks of each weight ``rank`` sends: those that no rank before it has.

    Raises:
        ValueError: ranks do not have all of a weight.
    """
    sent: dict[str, set[Chunk]] = {}
    for name, layouts in has.items():
        holders: dict[Chunk, int] = {}
        for layout, ranks in layouts:
            for holder, chunks in layout.on(ranks):
                for chunk in chunks:
                    holders[chunk] = min(holder, holders.get(chunk, holder))
        held, numel = sum(chunk.numel for chunk in holders), prod(layouts[0][0].shape)
        if held != numel:
            raise ValueError(
                f"WeightDeltas: of {name!r} ranks have {held} elements, and it has {numel}: give "
                "tensors of each rank names of their own by names=, which may depend on the rank"
            )
        sent[name] = {chunk for chunk, holder in holders.items() if holder == rank}
    return sent
