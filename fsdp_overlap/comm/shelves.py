"""Groups that were made, where contexts borrow them.

Groups that can be closed have one borrower at a time, so that closing them ends nobody else's
collectives. Of the others, such as NCCL's, one is enough for all contexts over the same ranks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist

from fsdp_overlap.comm.group_facts import alive, backend_of, can_close, collectives_issued
from fsdp_overlap.torch_internals import default_store, is_registered

# The tag of a receive that nothing is ever sent for.
NO_TAG = 2**31 - 1


@dataclass(eq=False)
class Loan:
    """One of our groups, and the shelf that it goes back to.

    torch keeps the group until ``destroy_process_group()``, and nothing here keeps it longer: its
    threads must end before Python does.
    """

    reference: ref[dist.ProcessGroup]
    shelf: Shelf
    number: int
    """The group's number on its shelf, the same on every rank."""
    device_type: str
    turn: int = 0
    """How many contexts borrowed it before the last one that did."""
    borrowers: int = 1
    """How many contexts have it. Those that gave it back count until the shelf looks."""
    is_sound: bool = True
    """Whether nobody closed it."""

    @property
    def group(self) -> dist.ProcessGroup:
        return alive(self.reference)

    @property
    def exists(self) -> bool:
        """Whether the user has not destroyed it."""
        group = self.reference()
        return group is not None and is_registered(group)

    @property
    def is_closable(self) -> bool:
        """Whether closing it wakes the ranks that wait for its collectives."""
        return can_close(self.device_type, self.group)

    @property
    def label(self) -> str:
        """A name that no other loan from this shelf has."""
        return f"{self.number}/{self.turn}"

    def close(self) -> None:
        """Ends its collectives. If it is closable, what waits for them on a host raises, here and
        on the other ranks. If not, they are aborted on this rank."""
        self.is_sound = False
        if not self.is_closable:
            # The group's own abort() goes by the wrapper of a debug level, which may do nothing.
            (backend_of(self.group, self.device_type) or self.group).abort()
            return
        # gloo has no other way: a receive that times out closes all connections of its group.
        group = self.group
        peer = (group.rank() + 1) % group.size()
        with suppress(RuntimeError):  # always raised, by the timeout
            group.recv([torch.empty(1)], peer, NO_TAG).wait(timedelta(milliseconds=1))

    def let_go(self) -> None:
        """Ends one loan of a group that nobody will borrow again. The last one destroys it."""
        self.borrowers -= 1
        if not self.borrowers:
            self.destroy()

    def destroy(self) -> None:
        if self.exists:
            self.close()  # so that nobody waits for what was left unfinished
            dist.destroy_process_group(self.group)


class Shelf(Protocol):
    """The groups of one purpose over the same ranks."""

    name: str
    returned: deque[Loan]
    """Given back on this rank, and not looked at since."""
    made: int
    """How many groups were made, the same number on every rank."""

    def agree(self, size: int, has_peers: bool, timeout: timedelta) -> int:
        """The number of the group that all ``size`` ranks take now. :attr:`made` stands for a new
        one. The last rank to come here decides, and the others wait for it."""
        ...

    def take(self, number: int) -> Loan | None:
        """Lends the group of this number. ``None`` if it is a new one, to be made."""
        ...

    def put(self, loan: Loan) -> None:
        """Takes note of a new group that is lent."""
        ...


@dataclass(eq=False)
class ExclusiveShelf:
    """A shelf that lends each group to one context at a time."""

    name: str
    returned: deque[Loan] = field(default_factory=deque)
    """The others were not told of these yet."""
    free: dict[int, Loan] = field(default_factory=dict)
    """Given back on this rank, by number. The others were told."""
    made: int = 0
    asked: int = 0

    def agree(self, size: int, has_peers: bool, timeout: timedelta) -> int:
        """Chooses a group that all ranks have back, and on which each has issued as many
        collectives, or else a new one. Groups that all have back but with different counts, or
        closed, are destroyed.

        Ranks free a dropped context at different moments, so each tells what it has back.
        """
        if not self.made:
            return 0
        back = self._take_back()
        if not has_peers:
            return min(self.free, default=self.made)
        store = _store_of(self)
        for loan in back:
            store.add(loan.label, 1)
            store.add(f"{loan.label}/{_state(loan)}", 1)

        def choose() -> tuple[int, list[int]]:
            fit, unfit = self.made, []
            for number, loan in sorted(self.free.items(), reverse=True):
                if store.add(loan.label, 0) == size:
                    state = _state(loan)
                    if state and store.add(f"{loan.label}/{state}", 0) == size:
                        fit = number
                    else:
                        unfit.append(number)
            return fit, unfit

        self.asked += 1
        fit, unfit = _decided(store, self.asked, size, timeout, choose)
        for number in unfit:
            self.free.pop(number).destroy()
        return int(fit)

    def take(self, number: int) -> Loan | None:
        return self.free.pop(number, None)

    def put(self, loan: Loan) -> None:
        pass  # it comes back by itself

    def _take_back(self) -> list[Loan]:
        taken = []
        while self.returned:  # a collected context may add to it meanwhile
            loan = self.returned.popleft()
            if loan.exists:
                self.free[loan.number] = loan
                taken.append(loan)
        return taken


@dataclass(eq=False)
class SharedShelf:
    """A shelf that lends its last group to all contexts at once.

    Contexts share it as they share a mesh's own group: their collectives pair up by order, which
    all ranks must keep. A group that ranks left at different counts is replaced, and is destroyed
    when its last context goes.
    """

    name: str
    returned: deque[Loan] = field(default_factory=deque)
    last: Loan | None = None
    made: int = 0
    asked: int = 0

    def agree(self, size: int, has_peers: bool, timeout: timedelta) -> int:
        """Chooses the last group, if every rank has issued as many collectives on it. Each rank
        comes here at the same point of its program, so that the counts can be compared although
        the group is in use."""
        if self.last is None:
            return self.made
        while self.returned:  # a collected context may add to it meanwhile
            loan = self.returned.popleft()
            if loan is self.last:
                loan.borrowers -= 1
            else:
                loan.let_go()
        state, number = _state(self.last), self.last.number
        if not has_peers:
            return number if state else self.made
        self.asked += 1
        store, key = _store_of(self), f"state/{self.asked}/{state}"
        store.add(key, 1)

        def choose() -> int:
            return number if state and store.add(key, 0) == size else self.made

        return int(_decided(store, self.asked, size, timeout, choose))

    def take(self, number: int) -> Loan | None:
        if self.last is None or self.last.number != number:
            return None
        self.last.borrowers += 1
        return self.last

    def put(self, loan: Loan) -> None:
        if self.last is not None and not self.last.borrowers:
            self.last.destroy()
        self.last = loan


def _store_of(shelf: Shelf) -> dist.Store:
    return dist.PrefixStore(f"fsdp_overlap/{shelf.name}", default_store())


def _decided(
    store: dist.Store, number: int, size: int, timeout: timedelta, choose: Callable[[], object]
) -> Any:
    """What ``choose()`` gives on the last of ``size`` ranks to come to the decision of this
    number."""
    choice = f"choice/{number}"
    if store.add(f"asked/{number}", 1) == size:
        store.set(choice, json.dumps(choose()))
    store.wait([choice], timeout)
    return json.loads(store.get(choice))


def _state(loan: Loan) -> str:
    """What must be equal on all ranks for ``loan`` to be used again. Empty if it cannot be used."""
    issued = collectives_issued(loan.group) if loan.is_sound and loan.exists else None
    return "" if issued is None else str(issued)
