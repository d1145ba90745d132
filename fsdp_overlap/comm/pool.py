"""The library's own process groups. A context borrows them, and the next one gets them after it."""

from __future__ import annotations

import atexit
import copy
import gc
import json
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.store_notes import has_peers
from fsdp_overlap.torch_internals import (
    default_group,
    default_store,
    default_timeout,
    is_registered,
    let_go_of_groups,
    make_group,
)

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
    """How many contexts had it before."""
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
            self.group.abort()
            return
        # gloo has no other way: a receive that times out closes all connections of its group.
        group = self.group
        peer = (group.rank() + 1) % group.size()
        with suppress(RuntimeError):  # always raised, by the timeout
            group.recv([torch.empty(1)], peer, NO_TAG).wait(timedelta(milliseconds=1))

    def destroy(self) -> None:
        if self.exists:
            self.close()  # so that nobody waits for what was left unfinished
            dist.destroy_process_group(self.group)


@dataclass(eq=False)
class Shelf:
    """The groups of one purpose over the same ranks."""

    name: str
    returned: deque[Loan] = field(default_factory=deque)
    """Given back on this rank. The others were not told yet."""
    free: dict[int, Loan] = field(default_factory=dict)
    """Given back on this rank, by number. The others were told."""
    made: int = 0
    asked: int = 0

    def agree(self, size: int, has_peers: bool, timeout: timedelta) -> int:
        """The number of the group that all ``size`` ranks take now. It is one that they all have
        back, and on which each has issued as many collectives, or else a new one. Groups that all
        have back but with different counts, or closed, are destroyed.

        Ranks free a dropped context at different moments, so the last rank to come here decides.
        The others wait for it.
        """
        if not self.made:
            return 0
        back = self._take_back()
        if not has_peers:
            return min(self.free, default=self.made)
        store = dist.PrefixStore(f"fsdp_overlap/{self.name}", default_store())
        for loan in back:
            store.add(loan.label, 1)
            store.add(f"{loan.label}/{_state(loan)}", 1)
        self.asked += 1
        choice = f"choice/{self.asked}"
        if store.add(f"asked/{self.asked}", 1) == size:
            fit, unfit = self.made, []
            for number, loan in sorted(self.free.items(), reverse=True):
                if store.add(loan.label, 0) == size:
                    state = _state(loan)
                    if state and store.add(f"{loan.label}/{state}", 0) == size:
                        fit = number
                    else:
                        unfit.append(number)
            store.set(choice, json.dumps([fit, unfit]))
        store.wait([choice], timeout)
        fit, unfit = json.loads(store.get(choice))
        for number in unfit:
            self.free.pop(number).destroy()
        return int(fit)

    def _take_back(self) -> list[Loan]:
        taken = []
        while self.returned:  # a collected context may add to it meanwhile
            loan = self.returned.popleft()
            if loan.exists:
                self.free[loan.number] = loan
                taken.append(loan)
        return taken


# The keys are default groups. A process that starts torch.distributed again has a new one.
_shelves: WeakKeyDictionary[dist.ProcessGroup, dict[str, Shelf]] = WeakKeyDictionary()
_turns: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


def borrow(purpose: str, like: dist.ProcessGroup, ranks: Sequence[int], device_type: str) -> Loan:
    """A group of ``ranks``, in this order, with the backend, the options and the timeout of
    ``like``. Nobody else uses it until it is given back. Collective over ``ranks``, which must ask
    for their groups in the same order.

    Raises:
        RuntimeError: the ranks did not all come in time.
    """
    default = default_group()
    # A digest, because the numbers of a thousand ranks would fill kilobytes.
    key = sha256(f"{like.group_name} {list(ranks)}".encode()).hexdigest()[:16]
    name = f"fsdp_overlap_{purpose}_{key}"
    shelf = _shelves.setdefault(default, {}).setdefault(name, Shelf(name))
    backend = _registered_backend(like, device_type)
    timeout = group_timeout(like, device_type) or default_timeout(backend)
    try:
        number = shelf.agree(len(ranks), has_peers(like), timeout)
        if number in shelf.free:
            loan = shelf.free.pop(number)
            loan.turn += 1
            return loan
        shelf.made = number + 1
        group = make_group(f"{name}_{number}", ranks, backend, _options(like, device_type), timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"ranks {list(ranks)} did not all come within {timeout} to make the process group "
            f"of their {purpose}s: a rank died or runs something else, or ctx.reset() was not "
            f"called on every rank: {error}"
        ) from error
    return Loan(ref(group), shelf, number, device_type)


def give_back(loans: Iterable[Loan]) -> None:
    """Lets other contexts borrow ``loans``. The garbage collector may call this at any moment, so
    nothing is sent here."""
    for loan in loans:
        loan.shelf.returned.append(loan)


def next_turn(group: dist.ProcessGroup) -> int:
    """Counts one more context that uses the user's ``group``. Returns how many there were so far,
    with this one."""
    turns = _turns.setdefault(default_group(), Counter())
    turns[group.group_name] += 1
    return turns[group.group_name]


def alive(reference: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group that ``reference`` refers to.

    Raises:
        RuntimeError: the user destroyed the group.
    """
    group = reference()
    if group is None:
        raise RuntimeError(
            "the process groups of this model were destroyed by destroy_process_group(): "
            "build and shard the model again after the next init_process_group()"
        )
    return group


def collectives_issued(group: dist.ProcessGroup) -> int | None:
    """How many collectives this rank issued on ``group``; ``None`` if its backend does not
    count."""
    try:
        issued: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:
        return None
    return issued


def _state(loan: Loan) -> str:
    """What must be equal on all ranks for ``loan`` to be used again. Empty if it cannot be used."""
    issued = collectives_issued(loan.group) if loan.is_sound else None
    return "" if issued is None else str(issued)


def _registered_backend(group: dist.ProcessGroup, device_type: str) -> dist.Backend:
    """The backend that ``group`` was told to use for tensors on ``device_type``."""
    devices = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return dist.Backend(devices[device_type])


def _options(group: dist.ProcessGroup, device_type: str) -> Any:
    """The backend's options that ``group`` was made with, for another group."""
    options: Any = getattr(group._get_backend(torch.device(device_type)), "options", None)
    # torch writes names and timeouts into NCCL's options, so these are copied. Others cannot be.
    with suppress(TypeError):
        options = copy.deepcopy(options)
    if getattr(options, "split_from", None) is not None:
        options.split_from = None
    return options


def backend_name(device_type: str, group: dist.ProcessGroup) -> str:
    """``"gloo"``, ``"nccl"``, ...: the backend that serves ``device_type`` in ``group``."""
    return group._get_backend(torch.device(device_type)).name().lower()


def can_close(device_type: str, group: dist.ProcessGroup) -> bool:
    """Whether the host waits for the collectives of ``group``, and they can be made to end."""
    return device_type == "cpu" and backend_name(device_type, group) == "gloo"


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """The timeout of ``group``, or ``None`` where its backend does not tell."""
    backend = group._get_backend(torch.device(device_type))
    return getattr(getattr(backend, "options", None), "_timeout", None)


@cache
def end_threads_before_python() -> None:
    """At the end of the process, ends the threads of groups that the user has destroyed and that a
    mesh still holds.

    A thread of gloo that frees a tensor needs Python. If Python ends first, the whole process is
    aborted: "terminate called without an active exception".
    """
    atexit.register(_end_threads)


def _end_threads() -> None:
    if dist.is_initialized():
        return
    for found in gc.get_objects():
        if type(found) is DeviceMesh:
            let_go_of_groups(found)
