"""Send weight deltas from the ranks that train to others of the same process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fsdp_overlap.checkpoint.checksums import crc32
from fsdp_overlap.comm.collectives import all_to_all
from fsdp_overlap.comm.comm_streams import HostWorkHandle, make_comm_stream
from fsdp_overlap.weights.delta_format import batches, decode, encode
from fsdp_overlap.weights.delta_targets import (
    Targets,
    check_complete,
    check_target,
    tensors_of,
    write,
)
from fsdp_overlap.weights.deltas import OutgoingDeltas, WeightDeltas
from fsdp_overlap.weights.exchange import WeightExchange
from fsdp_overlap.weights.resharding import device_of
from fsdp_overlap.weights.save import bytes_of

_WHAT = "DeltaTransfer"


class DeltaTransfer:
    """Sends what changed in a model's weights to other ranks, as often as you like.

    Args:
        deltas: the weights that are sent. ``None`` on ranks that have none.
        targets: what changes are written into, as in :func:`apply_deltas`. ``None`` on ranks that
            want none.
        group: the ranks among which deltas move, by default all. Each calls this, and each
            :meth:`run`.
        round_bytes: the most that a rank sends at a time, if its deltas are that small. A rank that
            receives has memory for that of all ranks.

    Attributes:
        version: the version that ``targets`` are of, 0 at first.
        sent_bytes: what this rank has sent in the last :meth:`run`.

    Raises:
        RuntimeError: a rank raised; names it.
        ValueError: names, shapes or dtypes of this rank's targets differ from what is sent. Other
            ranks raise too, before anything is sent.
    """

    def __init__(
        self,
        deltas: WeightDeltas | None,
        targets: Targets | None,
        *,
        group: dist.ProcessGroup | None = None,
        round_bytes: int = 64 << 20,
    ) -> None:
        self.version = self.sent_bytes = 0
        self._deltas = deltas
        self._round_bytes = round_bytes
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and group.size() == 1:
            group = None
        device = device_of(None if deltas is None else deltas.model, targets, group)
        self._exchange = WeightExchange(_WHAT, group, device, make_comm_stream(device))
        self._targets: dict[str, torch.Tensor] = {}

        def describe() -> tuple[tuple[int, ...], dict[str, tuple[tuple[int, ...], torch.dtype]]]:
            if targets is not None:
                self._targets = tensors_of(targets)
            if deltas is None or not deltas.sends:
                return (), {}
            return tuple(deltas.exchange(_WHAT).group_ranks), deltas.weights()

        described = self._exchange.on_all(describe, "describe its weights")

        def check() -> bool:
            sent: dict[str, int] = {}
            senders: dict[str, tuple[int, ...]] = {}
            for ranks, weights in described if targets is not None else ():
                for name, (shape, dtype) in weights.items():
                    sent[name] = check_target(self._targets, name, shape, dtype).numel()
                    if (first := senders.setdefault(name, ranks)) != ranks:
                        raise ValueError(
                            f"{name!r} is sent by ranks {first} and by ranks {ranks}: give each a "
                            "name of its own by names="
                        )
            check_complete(self._targets, sent)
            return targets is not None

        receives = self._exchange.on_all(check, "receive them")
        self._receivers = [rank for rank, does in enumerate(receives) if does]
        self._is_receiver = self._exchange.rank in self._receivers

    def run(self) -> None:
        """Send what changed since the last run to each rank with targets, which are of the next
        version then. If some rank is of another version than the last, all get all values.
        Collective.

        Raises:
            RuntimeError: a rank raised; names it. The next run sends all values.
        """
        exchange, deltas = self._exchange, self._deltas
        own = {self.version} if self._is_receiver else set()
        states = exchange.gather(
            (own, 0) if deltas is None else (own | {deltas.version}, deltas.next_version)
        )
        known = set().union(*(versions for versions, _ in states))
        version = max(max(known) + 1, *(following for _, following in states))
        dense = len(known) > 1
        self.sent_bytes = self.version = 0  # while it is neither the last nor the next
        outgoing: OutgoingDeltas | None = None
        payloads: Iterator[torch.Tensor] = iter(())
        payload = torch.empty(0, dtype=torch.uint8)
        arrived: Sequence[torch.Tensor] = ()
        sent: list[tuple[int, int]] = []

        def advance() -> tuple[int, int]:
            """Write what arrived, and return the size and the checksum of what is sent next."""
            nonlocal outgoing, payloads, payload
            for content, (_, checksum) in zip(arrived, sent, strict=False):
                if content.numel():
                    self._accept(content, checksum)
            if deltas is not None and outgoing is None:
                outgoing = deltas.begin(dense=dense, version=version)
                payloads = self._payloads(outgoing)
            payload = next(payloads, payload[:0])
            return payload.numel(), crc32(bytes_of(payload))

        while True:
            sent = exchange.on_all(advance, "send or receive")
            if not any(nbytes for nbytes, _ in sent):
                break
            arrived = self._exchanged(payload, [nbytes for nbytes, _ in sent])
        if outgoing is not None:
            outgoing.commit()
        self.version = version if self._is_receiver else 0

    def _payloads(self, outgoing: OutgoingDeltas) -> Iterator[torch.Tensor]:
        """Yield the content of the next rounds, on the host."""
        for batch in batches(outgoing, self._round_bytes // max(1, len(self._receivers))):
            content = bytearray().join(encode(outgoing.version, outgoing.base, batch))
            yield torch.frombuffer(content, dtype=torch.uint8)

    def _exchanged(self, payload: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
        """Send ``payload`` to all that receive, and return what arrived from each rank, which has
        sent so many bytes. Collective."""
        exchange = self._exchange
        to = [payload.numel() * (rank in self._receivers) for rank in range(exchange.ranks)]
        come = sizes if self._is_receiver else [0] * len(sizes)
        self.sent_bytes += sum(to) - payload.numel() * self._is_receiver
        source = payload.to(exchange.device).repeat(len(self._receivers))
        if exchange.group is None:
            return [source.cpu()]
        received = torch.empty(sum(come), dtype=torch.uint8, device=exchange.device)
        pending = all_to_all(received, source, come, to, exchange.group)
        HostWorkHandle(_WHAT, "", pending, None).wait()
        return [content.cpu() for content in received.split(come)]

    def _accept(self, content: torch.Tensor, checksum: int) -> None:
        if crc32(bytes_of(content)) != checksum:
            raise ValueError("what arrived has another checksum than what was sent")
        for delta in decode(content.clone()):  # whose elements can be viewed at its start
            write(self._targets, delta)
