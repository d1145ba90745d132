"""Messages between the hosts of all ranks of a mesh.

Gloo connects each rank of a group with all others. Where these are many, ranks lie in a grid: hosts
exchange messages within their row, and then what the row said within their column.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from weakref import ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.objects import exchange_bytes
from fsdp_overlap.comm.optimizer_groups import MESSAGES
from fsdp_overlap.comm.process_groups import GroupCache, GroupConfig, alive

# With how many others a rank is connected at most before ranks lie in a grid.
MAX_PEERS = 64

# How many different messages of a row travel as they are. If a row has more, all messages of all
# rows travel.
SLOTS = 4


def host_ranks(mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks with which the host of this one exchanges messages, one group after the
    other: all of ``mesh``, or its row and its column of a grid, which is as close to a square as
    their number allows. A prime number allows none."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    count = len(ranks)
    width = max(each for each in range(1, isqrt(count) + 1) if count % each == 0)
    if count - 1 <= MAX_PEERS or width == 1:
        return [ranks]
    row, column = divmod(ranks.index(dist.get_rank()), width)
    return [ranks[row * width : (row + 1) * width], ranks[column::width]]


def group_of_hosts(cache: GroupCache, mesh: DeviceMesh, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a group on which the hosts of these ``ranks`` of ``mesh`` exchange messages.
    Collective over ``ranks`` at its first call."""
    key = MESSAGES, tuple(ranks)
    if key not in cache.groups:
        like = mesh.get_group(mesh.ndim - 1)
        timeout = GroupConfig.like(like, mesh.device_type).timeout
        config = GroupConfig(dist.Backend("gloo"), timeout, None)
        cache.make(key, like, "cpu", MESSAGES, config)
    return alive(cache.groups[key])


class HostExchange:
    """Exchanges messages between the hosts of all ranks, on the groups of :func:`host_ranks`. It
    does not keep these alive."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = [ref(group) for group in groups]

    def exchange(self, message: bytes) -> dict[bytes, int]:
        """Return each message that ranks sent, with the set of these ranks, in the order of the
        first of each. All have the same size. Collective over all ranks; the host waits.

        Raises:
            RuntimeError: a rank did not come.
        """
        row, *columns = [alive(group) for group in self._groups]
        in_row = _exchange(message, row)
        replies = _by_message(in_row, message, row.size())
        for column in columns:
            # The ranks of a row have the same replies, so all ranks see which rows have too many.
            mine = _packed(replies, len(message), row.size())
            packs = _exchange(mine, column)
            if packs == mine * column.size() and len(replies) <= SLOTS:
                # All rows said the same: their sets of ranks repeat this row's.
                each_row = ((1 << row.size() * column.size()) - 1) // ((1 << row.size()) - 1)
                replies = {each: ranks * each_row for each, ranks in replies.items()}
                continue
            found = _unpacked(packs, len(mine), len(message), row.size())
            if found is None:
                count = row.size() * column.size()
                found = _by_message(_exchange(in_row, column), message, count)
            replies = found
        return replies


def _exchange(message: bytes, group: dist.ProcessGroup) -> bytes:
    return exchange_bytes(message, group, "negotiation")


def _by_message(joined: bytes, mine: bytes, count: int) -> dict[bytes, int]:
    """Return the messages of ``count`` ranks, one after the other in ``joined``, each with the set
    of ranks that sent it."""
    if joined == mine * count:
        return {mine: (1 << count) - 1}
    size, found = len(mine), dict[bytes, int]()
    for rank in range(count):
        message = joined[rank * size : (rank + 1) * size]
        found[message] = found.get(message, 0) | 1 << rank
    return found


def _packed(replies: dict[bytes, int], size: int, width: int) -> bytes:
    """Return what a row of ``width`` ranks said, in ``SLOTS`` slots: each message and its ranks.
    All are zero if it said too much."""
    set_size = -(-width // 8)
    some = replies if len(replies) <= SLOTS else {}
    packed = b"".join(ranks.to_bytes(set_size, "little") + each for each, ranks in some.items())
    return packed.ljust(SLOTS * (set_size + size), b"\0")


def _unpacked(packs: bytes, pack_size: int, size: int, width: int) -> dict[bytes, int] | None:
    """Return the replies of all rows from what each of them packed. ``None`` if one said too
    much."""
    set_size = -(-width // 8)
    known: dict[bytes, list[tuple[bytes, int]]] = {}
    found: dict[bytes, int] = {}
    for row, start in enumerate(range(0, len(packs), pack_size)):
        pack = packs[start : start + pack_size]
        if pack not in known:
            slots = [
                (pack[at + set_size : at + set_size + size], pack[at : at + set_size])
                for at in range(0, pack_size, set_size + size)
            ]
            known[pack] = [
                (message, ranks)
                for message, packed in slots
                if (ranks := int.from_bytes(packed, "little"))
            ]
        if not known[pack]:
            return None
        for message, ranks in known[pack]:
            found[message] = found.get(message, 0) | ranks << row * width
    return found
