"""Process groups: their properties, how the library makes its own, and which a context uses."""

from __future__ import annotations

import atexit
import copy
import gc
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from hashlib import sha256
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.comm_streams import current_device, has_streams
from fsdp_overlap.comm.watchdog import Watchdog, set_watchdog
from fsdp_overlap.torch_internals import (
    default_group,
    default_timeout,
    is_registered,
    is_split_by_options,
    let_go_of_groups,
    make_group,
    unwrapped,
)

# The tag of a receive that nothing is ever sent for.
NO_TAG = 2**31 - 1

# How long gloo's threads may take to free the tensors of collectives that have ended.
FREE_SECONDS = 0.05

# ---- What to know of a group ----


def alive(reference: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group that ``reference`` refers to.

    Raises:
        RuntimeError: the user destroyed the group.
    """
    group = reference()
    if group is None:
        _refuse_destroyed()
    return group


def _refuse_destroyed() -> NoReturn:
    raise RuntimeError(
        "the process groups of this model were destroyed by destroy_process_group(): build and "
        "shard the model again after the next init_process_group()"
    )


def collectives_issued(group: dist.ProcessGroup) -> int | None:
    """Return how many collectives this rank issued on ``group``; ``None`` if its backend does not
    count."""
    try:
        issued: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:
        return None
    return issued


def registered_backend(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the backend that ``group`` was told to use for tensors on ``device_type``. Empty if it
    has none for them."""
    devices = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return devices.get(device_type, "")


def device_for_objects(group: dist.ProcessGroup) -> torch.device:
    """Return a device that ``group`` serves: the CPU if it can."""
    types = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    return current_device("cpu" if "cpu" in types else types[0])


def backend_of(group: dist.ProcessGroup, device_type: str) -> Any:
    """Return the backend that serves ``device_type`` in ``group``. ``None`` if there is none."""
    try:
        return unwrapped(group._get_backend(torch.device(device_type)))
    except RuntimeError:
        return None


one_rank_communicates = False
"""Whether a group of one rank runs collectives as others do. Tests set it, to try a backend on one
device. Otherwise nothing travels there."""


def communicates(group: dist.ProcessGroup) -> bool:
    """Return whether anything travels on ``group``."""
    return group.size() > 1 or one_rank_communicates


def can_split(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether ``group`` has a communicator on this device that another group's can be split
    from, as NCCL's. Splitting takes less time and memory than a new connection."""
    is_there = has_streams(torch.device(device_type)) and communicates(group)
    if backend_name(group, device_type) == "fake":  # says so from torch 2.15 on, and connects none
        return False
    return is_there and bool(getattr(backend_of(group, device_type), "supports_splitting", False))


def splits_apart(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether a communicator can be split from that of ``group``, and shares nothing with it
    then. Where they share, to abort one ends the other, and they may not be used at once."""
    if not can_split(group, device_type) or not is_split_by_options(backend_of(group, device_type)):
        return False
    config = getattr(options_of(group, device_type), "config", None)
    shares = os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES", getattr(config, "split_share", 0))
    return str(shares) != "1"


def connect(group: dist.ProcessGroup, device_type: str) -> None:
    """Make the communicator of ``group``, which else comes with its first collective, and wait on
    the host until nothing is under way on it. Only then memory can be registered with it, and
    others can be split from it. Do nothing for backends without communicators to split.
    Collective over ``group``."""
    if can_split(group, device_type):
        device = current_device(device_type)  # a new group would guess another one
        dist.barrier(group=group, device_ids=[device.index])


def is_in_python(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether ``group`` is written in Python and does all itself, without a backend, as that
    of torch's ``MultiThreadedTestCase``."""
    return type(group) is not dist.ProcessGroup and backend_of(group, device_type) is None


def options_of(group: dist.ProcessGroup, device_type: str) -> Any:
    """Return the backend's options that ``group`` was made with. ``None`` if it does not tell."""
    return getattr(backend_of(group, device_type), "options", None)


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """Return ``"gloo"``, ``"nccl"``, ...: the backend that serves ``device_type`` in ``group``."""
    backend = backend_of(group, device_type)
    name: str = dist.get_backend(group) if backend is None else backend.name()
    return name.lower()


def can_close(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether the host waits for the collectives of ``group``, and they can be made to
    end."""
    return device_type == "cpu" and backend_name(group, device_type) == "gloo"


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """Return the timeout of ``group``, or ``None`` where its backend does not tell."""
    return getattr(options_of(group, device_type), "_timeout", None)


# ---- The library's own groups ----


@dataclass(eq=False)
class OwnGroup:
    """A group that the library made.

    It is referred to weakly, so that nothing keeps it longer than torch does: its threads must end
    before Python does.
    """

    reference: ref[dist.ProcessGroup]
    device_type: str
    is_closable: bool
    """Whether closing it wakes the ranks that wait for its collectives."""
    is_closed: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        return alive(self.reference)

    @property
    def exists(self) -> bool:
        """Whether nobody has destroyed it."""
        group = self.reference()
        return group is not None and is_registered(group)

    def close(self) -> None:
        """End its collectives. If it is closable, what waits for them on a host raises, here and
        on the other ranks. If not, they are aborted on this rank."""
        self.is_closed = True
        group = self.group
        if not self.is_closable:
            # The group's own abort() goes by the wrapper of a debug level, which may do nothing.
            (backend_of(group, self.device_type) or group).abort()
            return
        # gloo has no other way: a receive that times out closes all connections of its group.
        peer = (group.rank() + 1) % group.size()
        with suppress(RuntimeError):  # always raised, by the timeout
            group.recv([torch.empty(1)], peer, NO_TAG).wait(timedelta(milliseconds=1))

    def destroy(self) -> None:
        """Destroy it, on this rank alone."""
        if self.exists:
            self.close()  # so that nobody waits for what was left unfinished
            dist.destroy_process_group(self.group)


@dataclass
class _Registry:
    """What was made beside one default group. A process that starts torch.distributed again has a
    new one. All ranks count alike, because they ask for groups in the same order."""

    made: Counter[str] = field(default_factory=Counter)
    """How many groups were made, by name."""
    shared: dict[str, OwnGroup] = field(default_factory=dict)
    """The last of each name, if contexts share it."""
    uses: Counter[str] = field(default_factory=Counter)
    """How many contexts have used a group, by the group's name."""


_registries: WeakKeyDictionary[dist.ProcessGroup, _Registry] = WeakKeyDictionary()

_unused: deque[OwnGroup] = deque()
"""Groups of contexts that were freed. The garbage collector may free one at any moment, also within
torch's own bookkeeping of groups, so they are destroyed when the next group is made."""


def _registry() -> _Registry:
    return _registries.setdefault(default_group(), _Registry())


@dataclass(frozen=True)
class GroupConfig:
    """What a group is made with. ``name`` tells it apart from others that are made alike."""

    backend: dist.Backend
    timeout: timedelta
    options: Any
    name: str = ""

    @classmethod
    def like(cls, group: dist.ProcessGroup, device_type: str) -> GroupConfig:
        """Return that of ``group``, with high priority."""
        backend = dist.Backend(registered_backend(group, device_type))
        timeout = group_timeout(group, device_type) or default_timeout(backend)
        return cls(backend, timeout, copied_options(options_of(group, device_type), timeout))


def copied_options(options: Any, timeout: timedelta, is_prior: bool = True) -> Any:
    """Return a copy of a backend's ``options`` for another group, as torch writes names and
    timeouts into NCCL's. Options that cannot be copied are returned as they are. ``is_prior``:
    whether the group gets a stream of high priority.

    Kernels of collectives wait for room on the device, so that without priority they start after
    compute that came later. An asynchronous one runs on a stream of the group, whatever the stream
    is that it is called from.
    """
    try:
        options = copy.deepcopy(options)
    except TypeError:
        return options
    if is_prior and hasattr(options, "is_high_priority_stream"):
        options.is_high_priority_stream = True
    if getattr(options, "split_from", None) is not None:
        options.split_from = None
    if hasattr(options, "_timeout"):
        options._timeout = timeout  # torch warns if it is another
    return options


def own_group(
    purpose: str,
    like: dist.ProcessGroup,
    ranks: Sequence[int],
    device_type: str,
    config: GroupConfig | None = None,
    color: int | None = None,
) -> OwnGroup:
    """Return a group of ``ranks``, in this order, made with ``config`` or as ``like``. Collective
    over ``ranks``, which must ask for their groups in the same order. If ``like`` connects only
    some of them, each rank gives its own, made in the same way. See Note [own groups].

    ``color``: given if the other ranks of ``like`` ask for groups among themselves at the same
    time, as an equal number on the ranks of each.

    Raises:
        RuntimeError: the ranks did not all come in time.
    """
    while _unused:
        _unused.popleft().destroy()
    config, registry = config or GroupConfig.like(like, device_type), _registry()
    # A group along one dimension of a mesh has another name on other ranks.
    is_common = set(ranks) <= set(dist.get_process_group_ranks(like))
    kind = like.group_name if is_common else f"{config.backend} {config.timeout}"
    # A digest, because the numbers of a thousand ranks would fill kilobytes.
    digest = sha256(f"{kind} {[*ranks]}{config.name}".encode()).hexdigest()[:16]
    name = f"fsdp_overlap_{purpose}_{digest}"
    shared = registry.shared.get(name)
    if shared is not None and shared.exists and not shared.is_closed:
        return shared
    number = registry.made[name]
    registry.made[name] += 1
    # A split is collective over all ranks of `like`. With a color they all ask for a group, but
    # only the first time: if a fault ended one of these groups, the ranks of the others still have
    # theirs. Only its own ranks ask for an optimizer's group.
    takes_all = [*ranks] == dist.get_process_group_ranks(like) or (color is not None and not number)
    try:
        is_split = takes_all and can_split(like, device_type)
        split_from = _split_source(like, device_type) if is_split else None
        made = config.backend, config.options, config.timeout
        group = make_group(f"{name}_{number}", [*ranks], *made, split_from, color or 0)
        connect(group, device_type)
    except RuntimeError as error:
        raise _late(ranks, config.timeout, purpose, error) from error
    own = OwnGroup(ref(group), device_type, can_close(group, device_type))
    if not own.is_closable:
        registry.shared[name] = own
    return own


def _split_source(like: dist.ProcessGroup, device_type: str) -> Any:
    """Return the backend that a new group's communicator is split from. ``None`` if from none."""
    if not splits_apart(like, device_type):
        return None
    connect(like, device_type)
    return backend_of(like, device_type)


def _late(
    ranks: Sequence[int], timeout: timedelta, purpose: str, error: RuntimeError
) -> RuntimeError:
    return RuntimeError(
        f"ranks {[*ranks]} did not all come within {timeout} to make the process group of their "
        f"{purpose}s: a rank died or runs something else, or ctx.reset() was not called on "
        f"every rank: {error}"
    )


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


# ---- The groups of a context ----


class CommGroups:
    """The groups that a param group's collectives run on. A communicator runs one collective at a
    time, so collectives that are to run beside each other need a group each.

    Groups are referred to weakly, so that the user can destroy them. Afterwards the properties
    raise.
    """

    replicas: dist.ProcessGroup | None = None
    """For what travels between ranks that hold replicas."""
    confirm: dist.ProcessGroup | None = None
    """For confirmations between these."""

    def __init__(self, gather: dist.ProcessGroup, reduce: dist.ProcessGroup) -> None:
        self.gather_ref = ref(gather)
        """As the next, what each step asks without a call of a property."""
        self.reduce_ref = ref(reduce)

    @property
    def gather(self) -> dist.ProcessGroup:
        return alive(self.gather_ref)

    @property
    def reduce(self) -> dist.ProcessGroup:
        return alive(self.reduce_ref)

    @property
    def to_confirm(self) -> list[dist.ProcessGroup]:
        """Groups for confirmations that together connect all ranks of the mesh."""
        return self.per_dim

    @property
    def per_dim(self) -> list[dist.ProcessGroup]:
        """A group for each dimension of the mesh, if it has more than one rank."""
        return [self.reduce] if communicates(self.reduce) else []

    @cached_property
    def refs_per_dim(self) -> list[ref[dist.ProcessGroup]]:
        """What refers to :attr:`per_dim`."""
        return [ref(group) for group in self.per_dim]


class GroupCache:
    """The process groups of one context. Ranks must ask for them in the same order.

    With gloo all groups but those that the user handed in are the context's own, so that
    :meth:`close` ends nobody else's collectives. With other backends contexts share them.

    ``separate``: whether reductions run on another group than all-gathers.
    """

    def __init__(self, separate: bool) -> None:
        self.separate = separate
        self.watchdog: Callable[[], Watchdog | None] = lambda: None
        """Returns the watchdog that is polled when a collective lasts or fails. Does not keep it
        alive."""
        self.groups: dict[tuple[str, tuple[int, ...]], ref[dist.ProcessGroup]] = {}
        """The groups by purpose and ranks."""
        self.configs: Mapping[str, Callable[[dist.ProcessGroup, str], GroupConfig]] = {}
        """What the groups of a comm stream are made with, if not as the mesh's: a function of that
        and the device type."""
        self.own: dict[str, OwnGroup] = {}
        """The groups that the library made, by name."""
        self._uses: dict[str, int] = {}
        """How many contexts have used each group up to this one, by the group's name."""
        finalize(self, _release, self.own).atexit = False

    def get(self, mesh: DeviceMesh, separate: bool = True) -> CommGroups:
        """Return the groups along the last dimension of a mesh. Collective over it at the first
        call.

        ``separate``: whether reductions run on a group of their own, if this context separates
        them at all.
        """
        shard = mesh.get_group(mesh.ndim - 1)
        gather = self.get_like("all_gather", shard, mesh.device_type)
        if not (separate and self.separate):
            return CommGroups(gather, gather)
        return CommGroups(gather, self.get_like("reduce_scatter", shard, mesh.device_type))

    def label(self, group: dist.ProcessGroup) -> str:
        """Return a name for this context's use of ``group``, the same on every rank."""
        return f"{group.group_name}/{self._uses[group.group_name]}"

    def owns(self, name: str) -> bool:
        """Return whether the group of this name is the library's, and not the user's."""
        return name in self.own

    def is_closed(self, name: str) -> bool:
        """Return whether the group of this name was closed or aborted."""
        return name in self.own and self.own[name].is_closed

    def collectives_issued(self) -> dict[str, int | None]:
        """Return how many collectives this rank issued on each group, by the group's name; ``None``
        where its backend does not count."""
        groups = [alive(group) for group in self.groups.values()]
        return {
            group.group_name: collectives_issued(group) for group in groups if communicates(group)
        }

    @property
    def can_close(self) -> bool:
        """Whether there are groups that the user has not destroyed, and whose collectives can be
        ended on every rank."""
        return any(own.is_closable and own.exists for own in self.own.values())

    def close(self) -> None:
        """End the connections of the groups that can be closed. What waits for their collectives
        raises, here and on the other ranks."""
        for own in self.own.values():
            if own.is_closable and own.exists:
                own.close()

    def abort(self, name: str) -> None:
        """End what is under way on the library's group of this name, on this rank."""
        self.own[name].close()

    def renew(self) -> None:
        """Forget the groups that were closed or aborted, also by another context that shares them.
        The next :meth:`get` makes others."""
        for name, own in list(self.own.items()):
            if own.is_closed:
                del self.own[name]
                self.groups = {
                    key: group
                    for key, group in self.groups.items()
                    if group() is not own.reference()
                }
                if own.is_closable:
                    own.destroy()

    def get_like(
        self, purpose: str, group: dist.ProcessGroup, device_type: str
    ) -> dist.ProcessGroup:
        """Return the group that the user handed in, or ``group``. If ``group`` can be closed or
        serves another purpose already, or if it should have other options, return one of the
        library's over the same ranks."""
        key = purpose, tuple(dist.get_process_group_ranks(group))
        if key not in self.groups:
            is_taken = any(group is other() for other in self.groups.values())
            is_needed = (is_taken and self.separate) or purpose in self.configs
            is_needed &= not is_in_python(group, device_type)
            if communicates(group) and (is_needed or can_close(group, device_type)):
                return self.make(key, group, device_type, purpose)
            self.groups[key] = ref(group)
        group = alive(self.groups[key])
        if group.group_name not in self._uses:
            self._count_use(group)
            connect(group, device_type)
        return group

    def make(
        self,
        key: tuple[str, tuple[int, ...]],
        like: dist.ProcessGroup,
        device_type: str,
        comm_stream: str,
        config: GroupConfig | None = None,
        color: int | None = None,
    ) -> dist.ProcessGroup:
        """Make the group of this purpose and these ranks as :func:`own_group` does."""
        if comm_stream in self.configs:
            config = self.configs[comm_stream](like, device_type)
        own = own_group(key[0], like, key[1], device_type, config, color)
        group = alive(own.reference)
        self.groups[key] = own.reference
        self.own[group.group_name] = own
        self._count_use(group)
        if own.is_closable and (watchdog := self.watchdog()) is not None:
            set_watchdog(group, watchdog)
        return group

    def _count_use(self, group: dist.ProcessGroup) -> None:
        uses = _registry().uses
        uses[group.group_name] += 1
        self._uses[group.group_name] = uses[group.group_name]


def _release(own: Mapping[str, OwnGroup]) -> None:
    _unused.extend(group for group in own.values() if group.is_closable)
