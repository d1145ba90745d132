"""Messages between the hosts of many ranks: who is connected with whom, and what each learns."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet

from fsdp_overlap.features.uneven import hosts
from fsdp_overlap.features.uneven.hosts import HostExchange, host_ranks


def groups_of(count: int, rank: int) -> list[list[int]]:
    mesh: Any = SimpleNamespace(mesh=torch.arange(count))
    with patch.object(dist, "get_rank", lambda: rank):
        return host_ranks(mesh)


def peers(count: int, rank: int) -> int:
    """With how many ranks gloo connects one."""
    return sum(len(group) - 1 for group in groups_of(count, rank))


def test_a_thousand_ranks_are_connected_with_few() -> None:
    assert {peers(1024, rank) for rank in range(0, 1024, 31)} == {2 * 31}
    assert max(peers(count, 0) for count in range(8, 1025, 8)) <= 160
    assert peers(65, 0) == 64
    assert peers(1021, 0) == 1020  # a prime number: no grid


@pytest.mark.parametrize("count", [66, 96, 1000, 1024])
def test_what_a_rank_says_reaches_each_within_two_hops(count: int) -> None:
    groups = [groups_of(count, rank) for rank in range(count)]
    for rank, (row, column) in enumerate(groups):
        assert rank in row
        assert rank in column
        assert [groups[other][0] for other in row] == [row] * len(row)
        assert [groups[other][1] for other in column] == [column] * len(column)
        assert sorted(each for other in column for each in groups[other][0]) == [*range(count)]


class Group:
    """Stands in for a process group."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return len(self.ranks)


class Rank(greenlet):
    """Exchanges a message, and waits at each hop for the other ranks."""

    number: int
    sent: bytes
    group: Group


def exchanged(messages: Sequence[bytes]) -> tuple[list[dict[bytes, int]], int]:
    """Return what each rank learns, and how many hops that took."""

    def hop(message: bytes, group: Group) -> bytes:
        me = getcurrent()
        assert isinstance(me, Rank)
        me.sent, me.group = message, group
        joined: bytes = me.parent.switch()
        return joined

    def run(rank: int) -> dict[bytes, int]:
        groups: list[Any] = [Group(ranks) for ranks in groups_of(len(messages), rank)]
        return HostExchange(groups).exchange(messages[rank])

    ranks = [Rank(run) for _ in messages]
    hops = 0
    with patch.object(hosts, "_exchange", hop):
        found: list[Any] = [each.switch(rank) for rank, each in enumerate(ranks)]
        while not all(each.dead for each in ranks):
            assert not any(each.dead for each in ranks)
            sent = [each.sent for each in ranks]
            joined = [b"".join(sent[other] for other in each.group.ranks) for each in ranks]
            assert {len(each) for each in sent} == {len(sent[0])}
            found = [each.switch(what) for each, what in zip(ranks, joined, strict=True)]
            hops += 1
    return found, hops


def expected(messages: Sequence[bytes]) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for rank, message in enumerate(messages):
        found[message] = found.get(message, 0) | 1 << rank
    return found


KINDS: dict[str, Callable[[int], bytes]] = {
    "all alike": lambda rank: b"abc",
    "every second": lambda rank: b"ab" if rank % 2 else b"cd",
    "one differs": lambda rank: b"ab" if rank == 37 else b"cd",
    "zeros": lambda rank: b"\0\0" if rank % 3 else b"\0\1",
    "all differ": lambda rank: bytes([rank, 0, rank]),
    "a row has too many": lambda rank: bytes([rank if rank < 6 else 0]),
    "rows differ": lambda rank: bytes([rank // 8]),
    "at random": lambda rank: random.Random(rank).choice((b"a", b"b", b"c", b"d", b"e")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "most"), [(4, 1), (6, 1), (70, 10), (96, 10), (12, 64)])
def test_all_ranks_learn_the_same(kind: str, count: int, most: int) -> None:
    messages = [KINDS[kind](rank) for rank in range(count)]
    with patch.object(hosts, "MAX_PEERS", most):
        found, hops = exchanged(messages)
    wanted = expected(messages)
    for each in found:
        assert each == wanted
        assert [*each] == [*found[0]]
    assert hops <= 3


def calls_of_an_exchange(count: int) -> int:
    """How many functions a rank calls when all of `count` say the same or one of two things."""
    groups: list[Any] = [Group(ranks) for ranks in groups_of(count, 0)]
    pairs = iter((b"ab" * (groups[0].size() // 2), None))

    def hop(message: bytes, group: Group) -> bytes:
        return message * group.size() if (joined := next(pairs)) is None else joined

    calls = 0

    def count_calls(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with patch.object(hosts, "_exchange", hop):
        exchange = HostExchange(groups)
        sys.setprofile(count_calls)
        try:
            found = exchange.exchange(b"a")
        finally:
            sys.setprofile(None)
    assert found == expected([b"a", b"b"] * (count // 2))
    return calls


def test_what_a_rank_does_does_not_grow_with_their_number() -> None:
    """But with a row, whose messages it tells apart, where not all are alike."""
    many, few = calls_of_an_exchange(1024), calls_of_an_exchange(256)
    assert many - few == 32 - 16
    assert many < 100


def test_ranks_that_say_few_things_take_two_hops() -> None:
    messages = [b"ab" if rank % 3 else b"cd" for rank in range(1024)]
    found, hops = exchanged(messages)
    assert hops == 2
    assert found[1023] == expected(messages)
