"""Process groups: their properties, how the library makes its own, and which a context uses."""

from __future__ import annotations

import atexit
import copy
import gc
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.streams import current_device, has_streams
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

OPTIMIZER = "optimizer"
"""The purpose of groups that connect other ranks than the comm streams' do."""

# ---- What to know of a group ----


def alive(reference: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group that ``reference`` refers to.

    Raises:
        RuntimeError: the user destroyed the group.
    """
    group = reference()
    if group is None:
        raise RuntimeError(
            "the process groups of this model were destroyed by destroy_process_group(): build and "
            "shard the model again after the next init_process_group()"
        )
    return group


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
    options: dict[str, list[object]] = field(default_factory=dict)
    """The options that users gave, by what the groups are for. Their places tell them apart."""


_registries: WeakKeyDictionary[dist.ProcessGroup, _Registry] = WeakKeyDictionary()

_unused: deque[OwnGroup] = deque()
"""Groups of contexts that were freed. The garbage collector may free one at any moment, also within
torch's own bookkeeping of groups, so they are destroyed when the next group is made."""


def _registry() -> _Registry:
    return _registries.setdefault(default_group(), _Registry())


def own_group(
    purpose: str,
    like: dist.ProcessGroup,
    ranks: Sequence[int],
    device_type: str,
    options: object = None,
    for_hosts: bool = False,
    color: int | None = None,
) -> OwnGroup:
    """Return a group of ``ranks``, in this order, with the backend and the timeout of ``like``. It
    has ``options``, or without them those of ``like`` on a stream of high priority; a mapping is
    what to change in those (:func:`with_fields`). One ``for_hosts`` is of gloo. Collective over
    ``ranks``, which must ask for their groups in the same order. If ``like`` connects only some of
    them, each rank gives its own, made in the same way. See Note [own groups].

    ``color``: given if the other ranks of ``like`` ask for groups among themselves at the same
    time, as an equal number on the ranks of each.

    Raises:
        RuntimeError: the ranks did not all come in time.
    """
    while _unused:
        _unused.popleft().destroy()
    ranks, registry = list(ranks), _registry()
    backend = dist.Backend(registered_backend(like, device_type))
    timeout = group_timeout(like, device_type) or default_timeout(backend)
    if for_hosts:
        backend, device_type = dist.Backend("gloo"), "cpu"
    is_common = set(ranks) <= set(dist.get_process_group_ranks(like))
    # A group along one dimension of a mesh has another name on other ranks.
    key = f"{like.group_name if is_common else f'{backend} {timeout}'} {ranks}"
    if options is not None:
        key += _name_of_options(options, registry.options, f"{purpose} {key}")
    # A digest, because the numbers of a thousand ranks would fill kilobytes.
    name = f"fsdp_overlap_{purpose}_{sha256(key.encode()).hexdigest()[:16]}"
    shared = registry.shared.get(name)
    if shared is not None and shared.exists and not shared.is_closed:
        return shared
    number = registry.made[name]
    registry.made[name] += 1
    if (options is None or isinstance(options, Mapping)) and not for_hosts:
        options = with_fields(options_of(like, device_type), options or {})
    options, split_from = _copied(options, timeout), None
    try:
        # A split is collective over all ranks of `like`. With a color they all ask for a group, but
        # only the first time: if a fault ended one of these groups, the ranks of the others still
        # have theirs. Only its own ranks ask for an optimizer's group.
        takes_all = ranks == dist.get_process_group_ranks(like)
        takes_all |= color is not None and number == 0
        if takes_all and not for_hosts and splits_apart(like, device_type):
            connect(like, device_type)
            split_from = backend_of(like, device_type)
        group = make_group(
            f"{name}_{number}", ranks, backend, options, timeout, split_from, color or 0
        )
        connect(group, device_type)
    except RuntimeError as error:
        raise RuntimeError(
            f"ranks {ranks} did not all come within {timeout} to make the process group of their "
            f"{purpose}s: a rank died or runs something else, or ctx.reset() was not called on "
            f"every rank: {error}"
        ) from error
    own = OwnGroup(ref(group), device_type, can_close(group, device_type))
    if not own.is_closable:
        registry.shared[name] = own
    return own


def _name_of_options(options: object, known: dict[str, list[object]], use: str) -> str:
    """Return what tells ``options`` apart from others for the same use. ``known``: those that were
    given, by use."""
    if isinstance(options, Mapping):
        return f" fields {sorted(options.items())}"
    given = known.setdefault(use, [])
    if all(options is not other for other in given):
        given.append(options)
    return f" options {next(i for i, other in enumerate(given) if other is options)}"


def with_fields(options: Any, fields: Mapping[str, object]) -> Any:
    """Return a copy of a backend's ``options`` with high priority and ``fields``, by name: those of
    the options themselves or, of NCCL, those of their ``config``. What cannot be copied is returned
    as it is.

    Kernels of collectives wait for room on the device, so that without priority they start after
    compute that came later. An asynchronous one runs on a stream of the group, whatever the stream
    is that it is called from.

    Raises:
        ValueError: there is no such field.
        TypeError: a value does not suit its field, or there are fields, and no options that could
            be copied.
    """
    try:
        made = copy.deepcopy(options)
    except TypeError:
        made = None
    if made is None:
        if fields:
            raise TypeError(f"a {type(options).__name__} takes no {', '.join(fields)}")
        return options
    if hasattr(made, "is_high_priority_stream"):
        made.is_high_priority_stream = True
    if fields:
        _set_fields(made, fields)
    return made


def _set_fields(options: Any, fields: Mapping[str, object]) -> None:
    for name, value in fields.items():
        owner = options if hasattr(options, name) else getattr(options, "config", None)
        if not hasattr(owner, name):
            raise ValueError(f"a {type(options).__qualname__} has no {name!r}")
        setattr(owner, name, value)


def _copied(options: Any, timeout: timedelta) -> Any:
    """Return ``options`` for another group. torch writes names and timeouts into NCCL's options, so
    these are copied. Others cannot be."""
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


# ---- Groups that the user made ----

# What a group is for, in the library's words, by the field of MeshGroups.
NEGOTIATION = "negotiation"
"""The purpose of groups on which hosts exchange messages."""

PURPOSES = {
    "gather": "all_gather",
    "reduce": "reduce_scatter",
    "replicas": "all_reduce",
    "confirm": "order_check",
}

PG_OPTION_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
"""The comm streams whose groups can be given options of their own."""


@dataclass(frozen=True)
class MeshGroups:
    """The process groups that collectives over one mesh run on. ``None`` leaves the choice to the
    library.

    They stay the user's: the library never closes, aborts or destroys them, and lends them to
    nobody. Each has the ranks of a dimension of the mesh, in the mesh's order, and the mesh's
    backend.

    Args:
        gather: for all-gathers, along the dimension that parameters are sharded over.
        reduce: for reduce-scatters, and the check of their order, along the same dimension. It may
            be the group of ``gather``. Both then run one after the other.
        replicas: for what travels between ranks that hold replicas, along the first dimension of a
            mesh ``(replicate, shard)``.
        confirm: for confirmations between ranks that hold replicas. Only gloo on a CPU has them.
    """

    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    confirm: dist.ProcessGroup | None = None

    def checked(self, mesh: DeviceMesh) -> Iterator[tuple[str, list[int], dist.ProcessGroup]]:
        """Yield the purpose, the ranks and the group of each one that was given.

        Raises:
            TypeError: one is no process group of this rank.
            ValueError: one does not suit ``mesh``. The text says what does.
        """
        for name, purpose in PURPOSES.items():
            group = getattr(self, name)
            if group is not None:
                _check(group, name, mesh)
                yield purpose, dist.get_process_group_ranks(group), group


def _check(group: object, name: str, mesh: DeviceMesh) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"groups: {name} is a {type(group).__name__}; give a process group that this rank is a "
            "member of"
        )
    if not is_registered(group):
        raise ValueError(f"groups: {name} was destroyed; give a process group that still exists")
    is_across = name in ("replicas", "confirm")
    if is_across and mesh.ndim == 1:
        raise ValueError(
            f"groups: {name} connects ranks that hold replicas, and {mesh} has no replicas; leave "
            "it out, or use a mesh (replicate, shard)"
        )
    wanted = mesh.get_group(0 if is_across else mesh.ndim - 1)
    ranks, expected = map(dist.get_process_group_ranks, (group, wanted))
    if ranks != expected:
        raise ValueError(
            f"groups: {name} connects ranks {ranks}; give a group of ranks {expected}, in this "
            f"order, as {mesh} has them on this rank"
        )
    backend = registered_backend(group, mesh.device_type)
    suitable = registered_backend(wanted, mesh.device_type)
    if backend != suitable:
        raise ValueError(
            f"groups: {name} has the backend {backend or 'of other devices'} for "
            f"{mesh.device_type}; give a group with {suitable}, which {mesh} has"
        )


# ---- The groups of a context ----


class CommGroups:
    """The groups that a param group's collectives run on, with the names of :class:`MeshGroups`. A
    communicator runs one collective at a time, so collectives that are to run beside each other
    need a group each.

    ``replicas`` and ``confirm`` are ``None`` on a mesh of one dimension, and ``confirm`` also where
    nothing is confirmed. They are two, because a reduction over replicas starts at another moment
    on each rank. It would hold up a confirmation that other ranks need before they start theirs.

    Groups are referred to weakly, so that the user can destroy them. Afterwards the properties
    raise.
    """

    def __init__(
        self,
        gather: dist.ProcessGroup,
        reduce: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None = None,
        confirm: dist.ProcessGroup | None = None,
    ) -> None:
        self.gather_ref = ref(gather)
        """As the next, what each step asks without a call of a property."""
        self.reduce_ref = ref(reduce)
        self._replicas = None if replicas is None else ref(replicas)
        self._confirm = None if confirm is None else ref(confirm)

    @property
    def gather(self) -> dist.ProcessGroup:
        return alive(self.gather_ref)

    @property
    def reduce(self) -> dist.ProcessGroup:
        return alive(self.reduce_ref)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        return None if self._replicas is None else alive(self._replicas)

    @property
    def confirm(self) -> dist.ProcessGroup | None:
        return None if self._confirm is None else alive(self._confirm)

    @property
    def to_confirm(self) -> list[dist.ProcessGroup]:
        """Groups for confirmations that together connect all ranks of the mesh."""
        groups = (self.reduce, self.confirm)
        return [group for group in groups if group is not None and communicates(group)]

    @property
    def per_dim(self) -> list[dist.ProcessGroup]:
        """A group for each dimension of the mesh, if it has more than one rank."""
        groups = (self.reduce, self.replicas)
        return [group for group in groups if group is not None and communicates(group)]

    @cached_property
    def refs_per_dim(self) -> list[ref[dist.ProcessGroup]]:
        """What refers to :attr:`per_dim`."""
        return [ref(group) for group in self.per_dim]


def _check_kinds(options: Mapping[str, object]) -> None:
    """Raise ValueError if ``options`` names something that is no comm stream."""
    for comm_stream in options:
        if comm_stream not in PG_OPTION_KINDS:
            raise ValueError(
                f"pg_options: there is no comm stream {comm_stream!r}; use "
                f"{', '.join(PG_OPTION_KINDS)}"
            )


class GroupCache:
    """The process groups of one context. Ranks must ask for them in the same order.

    With gloo all groups but those that the user handed in are the context's own, so that
    :meth:`close` ends nobody else's collectives. With other backends contexts share them.

    Args:
        separate: whether reductions run on another group than all-gathers.
        given: the groups that the user handed in, by mesh.
        options: the backend's options for the groups of a comm stream, by its name, or what to
            change in those of the mesh's group (:func:`with_fields`). Groups of other comm streams
            have those of the mesh's group.

    Raises:
        TypeError: what was given for a mesh is no :class:`MeshGroups`, or a group in it is none of
            this rank.
        ValueError: a group does not suit its mesh, two were handed in for the same use, or there is
            no such comm stream.
    """

    def __init__(
        self,
        separate: bool,
        given: Mapping[DeviceMesh, MeshGroups] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.separate = separate
        self.options = dict(options or {})
        if self.options:
            _check_kinds(self.options)
        self.watchdog: Callable[[], Watchdog | None] = lambda: None
        """Returns the watchdog that is polled when a collective lasts or fails. Does not keep it
        alive."""
        self._groups: dict[tuple[str, tuple[int, ...]], ref[dist.ProcessGroup]] = {}
        self._given: dict[DeviceMesh, dict[str, ref[dist.ProcessGroup]]] = {}
        self._own: dict[str, OwnGroup] = {}
        """The groups that the library made, by name."""
        self._uses: dict[str, int] = {}
        """How many contexts have used each group up to this one, by the group's name."""
        for mesh, groups in (given or {}).items():
            self._add_given(mesh, groups)
        finalize(self, _release, self._own).atexit = False

    def _add_given(self, mesh: DeviceMesh, groups: MeshGroups) -> None:
        if not isinstance(groups, MeshGroups):
            raise TypeError(f"groups: {mesh} has a {type(groups).__name__}; give a MeshGroups")
        if groups.reduce not in (None, groups.gather) and not self.separate:
            raise ValueError(
                "groups: reduce is another group than gather, and "
                "separate_reduce_scatter_group=False makes both use one; leave one of the two out"
            )
        for purpose, ranks, group in groups.checked(mesh):
            known = self._groups.setdefault((purpose, tuple(ranks)), ref(group))
            if known() is not group:
                raise ValueError(
                    f"groups: two groups for the {purpose} of ranks {ranks}, for meshes that have "
                    "the same ranks; hand in the same one for both"
                )
        self._given[mesh] = {
            name: ref(group) for name in PURPOSES if (group := getattr(groups, name)) is not None
        }

    @property
    def given(self) -> dict[DeviceMesh, MeshGroups]:
        """The groups that the user handed in, by mesh."""
        return {
            mesh: MeshGroups(**{name: alive(group) for name, group in groups.items()})
            for mesh, groups in self._given.items()
        }

    def check_options(self, mesh: DeviceMesh) -> None:
        """Check that groups over ``mesh`` can be made with the options that the user gave.

        Raises:
            TypeError: they are those of another backend, or the backend of ``mesh`` takes none.
        """
        for comm_stream, options in self.options.items():
            shard = mesh.get_group(mesh.ndim - 1)
            backend = backend_name(shard, mesh.device_type)
            if backend == "gloo":
                raise TypeError(f"pg_options: gloo, which {mesh} has, takes none; leave them out")
            suitable = options_of(shard, mesh.device_type)
            if isinstance(options, Mapping):
                try:
                    with_fields(suitable, options)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"pg_options: {comm_stream}: {error}") from error
            elif suitable is not None and not isinstance(options, type(suitable)):
                raise TypeError(
                    f"pg_options: those of {comm_stream} are a {type(options).__name__}; "
                    f"{backend}, which {mesh} has, takes a {type(suitable).__qualname__}"
                )

    def get(self, mesh: DeviceMesh, separate: bool = True) -> CommGroups:
        """Return the groups of a mesh of one dimension, or of ``(replicate, shard)``. Collective
        over the mesh at its first call.

        ``separate``: whether reductions run on a group of their own, if this context separates
        them at all.
        """
        shard = mesh.get_group(mesh.ndim - 1)
        gather = self._get("all_gather", shard, mesh)
        separate = separate and self.separate
        reduce = self._get("reduce_scatter", shard, mesh) if separate else gather
        if mesh.ndim == 1:
            return CommGroups(gather, reduce)
        like = mesh.get_group(0)
        replicas = self._get("all_reduce", like, mesh)
        is_confirmed = can_close(like, mesh.device_type)
        confirm = self._get("order_check", like, mesh) if is_confirmed else None
        return CommGroups(gather, reduce, replicas, confirm)

    def get_neighbors(self, mesh: DeviceMesh, size: int) -> dist.ProcessGroup:
        """Return the group of ``size`` neighbours that this rank belongs to, along the dimension
        that ``mesh`` shards over. ``size`` divides that dimension. Collective over the mesh at its
        first call."""
        shard = mesh.get_group(mesh.ndim - 1)
        first = shard.rank() // size * size
        ranks = dist.get_process_group_ranks(shard)[first : first + size]
        key = "part", tuple(ranks)
        if key not in self._groups:
            self._make(key, shard, mesh.device_type, "all_gather", color=first)
        return alive(self._groups[key])

    def get_for_hosts(self, mesh: DeviceMesh, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return a group on which the hosts of these ``ranks`` of ``mesh`` exchange messages.
        Collective over ``ranks`` at its first call."""
        key = NEGOTIATION, tuple(ranks)
        if key not in self._groups:
            like = mesh.get_group(mesh.ndim - 1)
            self._make(key, like, mesh.device_type, NEGOTIATION, for_hosts=True)
        return alive(self._groups[key])

    def find_for_optimizer(
        self, ranks: Sequence[int], like: dist.ProcessGroup, device_type: str
    ) -> dist.ProcessGroup | None:
        """Return the group that an optimizer's step uses to connect ``ranks``, in this order. It
        may serve another purpose too, because ranks issue all they issue on it in the same order.
        ``like`` itself serves if it connects them and cannot be closed. ``None`` if there is none
        yet."""
        for (purpose, its), group in self._groups.items():
            if its == tuple(ranks) and purpose != NEGOTIATION:
                return alive(group)
        is_enough = list(ranks) == dist.get_process_group_ranks(like)
        return like if is_enough and not can_close(like, device_type) else None

    def get_for_optimizer(
        self, ranks: Sequence[int], like: dist.ProcessGroup, device_type: str
    ) -> dist.ProcessGroup:
        """Return the group that :meth:`find_for_optimizer` gives, or a new one, made as ``like``.
        Collective over ``ranks`` at its first call."""
        group = self.find_for_optimizer(ranks, like, device_type)
        if group is None:
            group = self._make((OPTIMIZER, tuple(ranks)), like, device_type, OPTIMIZER)
        return group

    @property
    def of_optimizers(self) -> list[OwnGroup]:
        """The groups that serve optimizers' steps alone."""
        references = [ref for (purpose, _), ref in self._groups.items() if purpose == OPTIMIZER]
        return [own for own in self._own.values() if own.reference in references]

    def label(self, group: dist.ProcessGroup) -> str:
        """Return a name for this context's use of ``group``, the same on every rank."""
        return f"{group.group_name}/{self._uses[group.group_name]}"

    def owns(self, name: str) -> bool:
        """Return whether the group of this name is the library's, and not the user's."""
        return name in self._own

    def is_closed(self, name: str) -> bool:
        """Return whether the group of this name was closed or aborted."""
        return name in self._own and self._own[name].is_closed

    def collectives_issued(self) -> dict[str, int | None]:
        """Return how many collectives this rank issued on each group, by the group's name; ``None``
        where its backend does not count."""
        groups = [alive(group) for group in self._groups.values()]
        return {
            group.group_name: collectives_issued(group) for group in groups if communicates(group)
        }

    @property
    def can_close(self) -> bool:
        """Whether there are groups that the user has not destroyed, and whose collectives can be
        ended on every rank."""
        return any(own.is_closable and own.exists for own in self._own.values())

    def close(self) -> None:
        """End the connections of the groups that can be closed. What waits for their collectives
        raises, here and on the other ranks."""
        for own in self._own.values():
            if own.is_closable and own.exists:
                own.close()

    def abort(self, name: str) -> None:
        """End what is under way on the library's group of this name, on this rank."""
        self._own[name].close()

    def renew(self) -> None:
        """Forget the groups that were closed or aborted, also by another context that shares them.
        The next :meth:`get` makes others."""
        for name, own in list(self._own.items()):
            if own.is_closed:
                del self._own[name]
                self._groups = {
                    key: group
                    for key, group in self._groups.items()
                    if group() is not own.reference()
                }
                if own.is_closable:
                    own.destroy()

    def _get(self, purpose: str, group: dist.ProcessGroup, mesh: DeviceMesh) -> dist.ProcessGroup:
        """Return the group that the user handed in, or ``group``. If ``group`` can be closed or
        serves another purpose already, or if it should have other options, return one of the
        library's over the same ranks."""
        key = purpose, tuple(dist.get_process_group_ranks(group))
        if key not in self._groups:
            is_taken = any(group is other() for other in self._groups.values())
            is_needed = (is_taken and self.separate) or purpose in self.options
            is_needed &= not is_in_python(group, mesh.device_type)
            if communicates(group) and (is_needed or can_close(group, mesh.device_type)):
                return self._make(key, group, mesh.device_type, purpose)
            self._groups[key] = ref(group)
        group = alive(self._groups[key])
        if group.group_name not in self._uses:
            self._count_use(group)
            connect(group, mesh.device_type)
        return group

    def _make(
        self,
        key: tuple[str, tuple[int, ...]],
        like: dist.ProcessGroup,
        device_type: str,
        comm_stream: str,
        for_hosts: bool = False,
        color: int | None = None,
    ) -> dist.ProcessGroup:
        purpose, ranks = key
        options = self.options.get(comm_stream)
        own = own_group(purpose, like, ranks, device_type, options, for_hosts, color)
        group = own.group
        self._groups[key] = own.reference
        self._own[group.group_name] = own
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
