"""Finds ranks that issue different collectives, which pair up by order and not by name."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Issued
from fsdp_overlap.comm.lanes import Lane, Ticket

# Collectives remembered by name since the last check; older ones only count in the digest.
MAX_REMEMBERED = 4096

DIGEST_BYTES = 4


class OrderCheck:
    """A rolling digest of the collectives this rank issued, compared once per backward.

    The comparison is one small all-reduce of bytes for each dimension of the mesh, which also
    carries which parameters have a gradient on some rank. On a CPU it is read at once; on a GPU at
    the start of the next backward, when it has long arrived, so that the host never waits for it.
    """

    def __init__(self, device: torch.device, describe: Callable[[int], str]) -> None:
        self.device = device
        self._describe = describe
        self._digest = 0
        self._issued = array("l")
        self._sent: torch.Tensor | None = None
        self._ticket: Ticket | None = None
        self._sent_issued = array("l")

    def note(self, code: int) -> None:
        """This rank issues the collective ``code``."""
        self._issued.append(code)
        if len(self._issued) > MAX_REMEMBERED:
            self._fold()

    def send(
        self, lane: Lane, groups: Sequence[dist.ProcessGroup], has_gradient: bytearray
    ) -> None:
        """Enqueues the comparison. Collective over ``groups``."""
        self._sent_issued = self._issued[:]
        self._fold()
        digest = self._digest.to_bytes(DIGEST_BYTES, "little")
        # The greatest of a byte and the greatest of its complement tell whether all ranks agree.
        message = digest + bytes(255 - byte for byte in digest) + has_gradient
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if self.device.type == "cuda":
            sent = sent.pin_memory()
        self._sent = sent
        self._ticket = lane.enqueue("order_check", "", lambda: self._issue(sent, groups))

    def _issue(self, sent: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> Issued:
        if self.device.type != "cuda":
            work = dist.all_reduce(sent, dist.ReduceOp.MAX, groups[0], async_op=True)
            return Issued([work], lambda: _greatest(sent, groups[1:]))
        on_device = _greatest(sent.to(self.device, non_blocking=True), groups)
        return Issued((), lambda: sent.copy_(on_device, non_blocking=True))

    def read(self, groups: Sequence[dist.ProcessGroup]) -> bytes | None:
        """Which parameters have a gradient on some rank, by the last comparison; ``None`` if there
        was none.

        Raises:
            RuntimeError: on every rank, if the ranks' collectives differ; names the first that
            does.
        """
        if self._ticket is None:
            return None
        self._ticket.wait_on_host()
        self._ticket = None
        assert self._sent is not None
        received = bytes(self._sent.tolist())
        greatest, least = received[:DIGEST_BYTES], received[DIGEST_BYTES : 2 * DIGEST_BYTES]
        if any(high != 255 - low for high, low in zip(greatest, least, strict=True)):
            raise RuntimeError(self._explain(groups))
        return received[2 * DIGEST_BYTES :]

    def drop(self) -> None:
        """Forgets a comparison under way and what was issued. On every rank."""
        self._ticket = None
        self._digest = 0
        self._issued = array("l")

    def _explain(self, groups: Sequence[dist.ProcessGroup]) -> str:
        explained = [self._explain_in(group) for group in groups]  # all of them are collective
        return next(
            (text for text in explained if text),
            "ranks ran different units, before the collectives that are remembered or on ranks "
            "that this one does not compare itself with",
        )

    def _explain_in(self, group: dist.ProcessGroup) -> str:
        issued: list[array[int]] = [array("l") for _ in range(group.size())]
        dist.all_gather_object(issued, self._sent_issued, group)
        ranks = dist.get_process_group_ranks(group)
        for position, codes in enumerate(zip_longest(*issued)):
            if len(set(codes)) > 1:
                said = "; ".join(
                    f"rank {rank}: {'nothing' if code is None else self._describe(code)}"
                    for rank, code in zip(ranks, codes, strict=True)
                )
                return (
                    f"ranks ran different units: collective {position} since the last backward was "
                    f"{said}. Their data was exchanged between the wrong units, so gradients and "
                    "parameters are wrong: every rank must run the same units in the same order"
                )
        return ""

    def _fold(self) -> None:
        self._digest = zlib.crc32(self._issued.tobytes(), self._digest)
        self._issued = array("l")


def _greatest(values: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """``values`` made the greatest over the ranks that ``groups`` together connect."""
    for group in groups:
        dist.all_reduce(values, dist.ReduceOp.MAX, group)
    return values
