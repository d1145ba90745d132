"""The library's own process groups. A context borrows them, and the next one gets them after it."""

from __future__ import annotations

import atexit
import copy
import gc
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cache
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.group_facts import (
    backend_of,
    can_close,
    can_split,
    collectives_issued,
    connect,
    group_timeout,
    options_of,
    registered_backend,
)
from fsdp_overlap.comm.shelves import ExclusiveShelf, Loan, SharedShelf, Shelf
from fsdp_overlap.comm.store_notes import has_peers
from fsdp_overlap.torch_internals import (
    default_group,
    default_timeout,
    let_go_of_groups,
    make_group,
)

# How long gloo's threads may take to free the tensors of collectives that have ended.
FREE_SECONDS = 0.05

# The keys are default groups. A process that starts torch.distributed again has a new one.
_shelves: WeakKeyDictionary[dist.ProcessGroup, dict[str, Shelf]] = WeakKeyDictionary()
_turns: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
# The options that users gave, by what the groups are for. Their places tell them apart on all ranks
# alike, because ranks ask for groups in the same order.
_given: WeakKeyDictionary[dist.ProcessGroup, dict[str, list[object]]] = WeakKeyDictionary()


def borrow(
    purpose: str,
    like: dist.ProcessGroup,
    ranks: Sequence[int],
    device_type: str,
    options: object = None,
) -> Loan:
    """A group of ``ranks``, in this order, with the backend and the timeout of ``like``. It has
    ``options``, or without them those of ``like``. If the group can be closed, nobody else uses it
    until it is given back. Collective over ``ranks``, which must ask for their groups in the same
    order. If ``like`` connects only some of them, each rank gives its own, made in the same way.

    Raises:
        RuntimeError: the ranks did not all come in time.
    """
    backend = dist.Backend(registered_backend(like, device_type))
    timeout = group_timeout(like, device_type) or default_timeout(backend)
    is_common = set(ranks) <= set(dist.get_process_group_ranks(like))
    # A group along one dimension of a mesh has another name on other ranks.
    key = f"{like.group_name if is_common else f'{backend} {timeout}'} {list(ranks)}"
    if options is not None:
        given = _given.setdefault(default_group(), {}).setdefault(f"{purpose} {key}", [])
        if all(options is not other for other in given):
            given.append(options)
        place = next(place for place, other in enumerate(given) if other is options)
        key += f" options {place}"
    # A digest, because the numbers of a thousand ranks would fill kilobytes.
    name = f"fsdp_overlap_{purpose}_{sha256(key.encode()).hexdigest()[:16]}"
    shelf = _shelf(name, like, device_type)
    try:
        number = shelf.agree(len(ranks), has_peers(like), timeout)
        loan = shelf.take(number)
        if loan is not None:
            loan.turn += 1
            return loan
        shelf.made = number + 1
        if options is None:
            options = options_of(like, device_type)
        options, split_from = _copied(options, timeout), None
        if list(ranks) == dist.get_process_group_ranks(like) and can_split(device_type, like):
            connect(device_type, like)
            split_from = backend_of(like, device_type)
        group = make_group(f"{name}_{number}", ranks, backend, options, timeout, split_from)
        connect(device_type, group)
    except RuntimeError as error:
        raise RuntimeError(
            f"ranks {list(ranks)} did not all come within {timeout} to make the process group "
            f"of their {purpose}s: a rank died or runs something else, or ctx.reset() was not "
            f"called on every rank: {error}"
        ) from error
    loan = Loan(ref(group), shelf, number, device_type)
    shelf.put(loan)
    return loan


def _shelf(name: str, like: dist.ProcessGroup, device_type: str) -> Shelf:
    shelves = _shelves.setdefault(default_group(), {})
    if name not in shelves:
        # Whether ranks are equally far on a group that is in use can only be told by counts.
        is_shared = not can_close(device_type, like) and collectives_issued(like) is not None
        shelves[name] = SharedShelf(name) if is_shared else ExclusiveShelf(name)
    return shelves[name]


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


def _copied(options: Any, timeout: timedelta) -> Any:
    """``options`` for another group. torch writes names and timeouts into NCCL's options, so these
    are copied. Others cannot be."""
    try:
        options = copy.deepcopy(options)
    except TypeError:
        return options
    if getattr(options, "split_from", None) is not None:
        options.split_from = None
    if hasattr(options, "_timeout"):
        options._timeout = timeout  # torch warns if it is another
    return options


@cache
def end_threads_before_python() -> None:
    """End gloo's threads before Python ends: a thread that frees a tensor needs Python, and without
    it aborts the process ("terminate called without an active exception").

    Groups that the user has destroyed are released by meshes that still hold them. The others may
    be in use by other ranks, so their threads only get time to free what they hold.
    """
    atexit.register(_end_threads)


def _end_threads() -> None:
    if dist.is_initialized():
        time.sleep(FREE_SECONDS)
        return
    for found in gc.get_objects():
        if type(found) is DeviceMesh:
            let_go_of_groups(found)
