"""Order check: find ranks that issue different collectives. Collectives pair up by order, not by
name."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from operator import or_
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from fsdp_overlap.comm.comm_streams import CommStream, PendingCollective, WorkHandle, has_streams
from fsdp_overlap.comm.objects import wait_for

# How many collectives since the last check are remembered. Older ones only count in the digest.
MAX_REMEMBERED = 4096

DIGEST_BYTES = 4

# The code of a collective is the index of its param group times the number of kinds, plus the kind.
KINDS = ("all_gather", "reduce_scatter", "reduce_scatter and all_reduce across replicas")
N_KINDS = len(KINDS)
ALL_GATHER, REDUCE_SCATTER, REDUCE_OVER_REPLICAS = range(N_KINDS)

# In place of a collective's code.
FAILED_ELSEWHERE = -1
NOTHING = -2
"""The rank ended its backward."""
NEW_UNIT = -3
START = -4
"""Ranks compare what they start from, before the first collective."""


class CheckedParamGroup(Protocol):
    """The param group that a collective gathers or reduces."""

    label: str

    def signature(self, dtype: torch.dtype) -> int:
        """Return a number that is equal on ranks that planned the param group alike and have as
        many param groups and parameters on its mesh. ``dtype`` is what the collective sends."""
        ...


class Interval(NamedTuple):
    """The ``codes`` of what a rank issued between two checks, without the first few, which it
    forgot. ``first`` is how many it forgot, ``number`` how many checks came before. ``is_over`` is
    whether the second check was issued."""

    number: int
    first: int
    codes: Sequence[int]
    is_over: bool

    def at(self, position: int) -> int | None:
        """Return the code at ``position``. ``None`` if the rank has not come there yet, ``NOTHING``
        if its backward ended before."""
        index = position - self.first
        if index < len(self.codes):
            return self.codes[index]
        return NOTHING if self.is_over else None


class OrderCheck:
    """What this rank issues, in order, and how that is compared with the other ranks.

    *The check* runs once per backward that reduces: Note [order check]. It compares a rolling
    digest of all that was issued, by one small all-reduce of bytes for each dimension of the mesh.
    The same message carries which parameters have a gradient on some rank. A CPU reads the check at
    once. A device with streams reads it at the end of a later backward, once it has arrived, so
    that the host never waits for it.

    ``explain`` says what ranks did differently; it is given the unit, or an empty string if that is
    not known. ``is_read_at_once``: whether the host waits for the check, because compute has.
    """

    confirms = False
    """Whether ranks ask each other before collectives too."""
    is_enabled = True
    """Whether the end of a backward runs the check."""
    has_reduced = False
    """Whether a reduce-scatter was issued since the last :meth:`validate_and_sync`."""
    on_arrival: Callable[[bytes], None] | None = None
    """Called with what :meth:`read_arrived` reads: which parameters had a gradient on some rank."""

    def __init__(
        self, device: torch.device, explain: Callable[[str], str], is_read_at_once: bool = True
    ) -> None:
        self.device = device
        self._explain = explain
        self._is_read_at_once = is_read_at_once
        self._under_way: deque[tuple[WorkHandle, torch.Tensor]] = deque()
        self.has_gradient = bytearray()
        """For each parameter, whether this rank has reduced a gradient in the backward under
        way."""
        self._forget()

    def _forget(self) -> None:
        self._digest = 0
        self._count = 0
        self._issued = array("l")
        self._first = 0
        self._checks = 0
        self._over: Interval | None = None

    def record(self, code: int, param_group: CheckedParamGroup, dtype: torch.dtype) -> None:
        """Record that this rank is about to issue the collective ``code`` of ``param_group``, which
        sends ``dtype``. Where ranks confirm collectives, it may block until the others are about to
        issue theirs."""
        if len(self._issued) >= MAX_REMEMBERED:
            self._first += len(self._issued)
            self._fold()
        self._issued.append(code)
        self._count += 1

    def record_new_param_group(self) -> None:
        """Record that a param group was added to the mesh. So the next check has another size."""

    def record_gradients(self, first_flag: int, filled: Sequence[bool]) -> None:
        """Note that this rank reduces gradients of the ``filled`` parameters of the param group
        whose flags begin at ``first_flag``."""
        flags = slice(first_flag, first_flag + len(filled))
        if not all(filled):
            filled = list(map(or_, self.has_gradient[flags], filled))
        self.has_gradient[flags] = bytes(filled)

    def record_failure(self) -> None:
        """Make the next check of this mesh fail, because this rank found a difference on another
        mesh."""
        self._issued.append(FAILED_ELSEWHERE)

    def exchange(self, mine: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
        """All-gather ``mine``, three numbers, among the ranks of ``group``. The first says what is
        exchanged. Collective; the host waits.

        Raises:
            RuntimeError: a rank exchanges something else, or confirms a collective.
        """
        others = self._gather("", mine, group)
        if any(other[0] != mine[0] for other in others):
            raise RuntimeError(self._explain(""))
        return others

    def _gather(self, label: str, mine: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
        # Of another kind than all else that may be under way on this group. So no collective is
        # taken for this one.
        sent = torch.tensor(mine, device=self.device)
        others = [torch.empty_like(sent) for _ in range(group.size())]
        self._wait(dist.all_gather(others, sent, group, async_op=True), group, label)
        received: list[list[int]] = torch.stack(others).tolist()
        return received

    def _wait(self, work: dist.Work, group: dist.ProcessGroup, label: str) -> None:
        # Not by a work handle, which wakes up after a second: that would make NCCL give up.
        work.wait()

    def validate_and_sync(
        self, comm_stream: CommStream, groups: Sequence[dist.ProcessGroup], failed: bool
    ) -> bytes | bytearray:
        """Compare what the ranks issued, at the end of a backward that reduced. Return a flag for
        each parameter: whether it has a gradient on some rank, if the check is read at once, and
        otherwise on this one. ``failed``: whether this rank found a difference on another mesh.
        Collective over ``groups``.

        Raises:
            RuntimeError: the ranks' collectives differ, in this backward or, where the host runs
                ahead, in an earlier one.
        """
        flags, self.has_gradient = self.has_gradient, bytearray(len(self.has_gradient))
        self.has_reduced = False
        if not groups or not self.is_enabled:
            return flags
        if failed:
            self.record_failure()
        if not self._is_read_at_once:
            self.read_arrived()  # the checks of earlier backwards
        self.send(comm_stream, groups, flags)
        return self.read() if self._is_read_at_once else flags

    def send(
        self, comm_stream: CommStream, groups: Sequence[dist.ProcessGroup], has_gradient: bytearray
    ) -> None:
        """Enqueue the check. Collective over ``groups``."""
        self._over = Interval(self._checks, self._first, self._issued[:], is_over=True)
        self._checks += 1
        self._first = 0
        self._fold()
        digest = self._digest.to_bytes(DIGEST_BYTES, "little")
        # The greatest of a byte and the greatest of its complement tell whether all ranks agree.
        message = digest + bytes(255 - byte for byte in digest) + has_gradient
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if has_streams(self.device):
            sent = sent.pin_memory()
        # Sums across replicas, for which compute has waited, may still read the comm stream's
        # memory.
        comm_stream.after_compute()
        work = comm_stream.enqueue("order_check", "", lambda: self._issue(sent, groups))
        self._under_way.append((work, sent))

    def _issue(self, sent: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> PendingCollective:
        if not has_streams(self.device):
            work = dist.all_reduce(sent, dist.ReduceOp.MAX, groups[0], async_op=True)
            return PendingCollective([work], lambda: greatest(sent, groups[1:]), groups[0])
        on_device = greatest(sent.to(self.device, non_blocking=True), groups)
        return PendingCollective((), lambda: sent.copy_(on_device, non_blocking=True))

    def read(self) -> bytes:
        """Read the oldest check that was not read yet. Return for each parameter whether some
        rank has a gradient. Blocks the host until the check has arrived.

        Raises:
            RuntimeError: on every rank, if the ranks' collectives differ; names the first that
            does.
        """
        work, sent = self._under_way.popleft()
        work.wait_on_host()
        received = bytes(sent.tolist())
        greatest, least = received[:DIGEST_BYTES], received[DIGEST_BYTES : 2 * DIGEST_BYTES]
        if any(high != 255 - low for high, low in zip(greatest, least, strict=True)):
            raise RuntimeError(self._explain(""))
        return received[2 * DIGEST_BYTES :]

    def read_arrived(self) -> None:
        """Read the checks that have arrived. Do not wait for the others.

        Raises:
            RuntimeError: as :meth:`read`.
        """
        while self._under_way and self._under_way[0][0].done():
            flags = self.read()
            if self.on_arrival is not None:
                self.on_arrival(flags)

    def drop(self) -> None:
        """Forget checks under way and what was issued. Must be called on every rank."""
        self._under_way.clear()
        self._forget()
        self.has_reduced = False
        self.has_gradient = bytearray(len(self.has_gradient))

    @property
    def history(self) -> list[Interval]:
        """What this rank has issued since the last check but one."""
        now = Interval(self._checks, self._first, self._issued, is_over=False)
        return [now] if self._over is None else [self._over, now]

    @property
    def progress(self) -> tuple[int, int]:
        """How many checks this rank has issued, and how many other collectives."""
        return self._checks, self._count

    def _fold(self) -> None:
        self._digest = zlib.crc32(self._issued.tobytes(), self._digest)
        self._issued = array("l")


def greatest(values: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """Replace ``values`` in place by their maximum over the ranks that ``groups`` together
    connect. Collective over ``groups``."""
    for group in groups:
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group, async_op=True)
        if has_streams(values.device):
            work.wait()
        else:  # a rank that strays may never come to it
            wait_for(work, group, "order_check")
    return values
