"""Process groups of ``"nccl"`` beside the emulated device: torch makes them of the classes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from fsdp_overlap.tools.emulator.nccl_like import NcclLikeGroup, Options
from fsdp_overlap.tools.emulator.ranks import FakeProcessGroup
from fsdp_overlap.tools.torch_internals import c10d


class NcclOptions(Options):
    """What ``ProcessGroupNCCL.Options`` has."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__()
        self.is_high_priority_stream = is_high_priority_stream
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""

    def __copy__(self) -> NcclOptions:
        made = NcclOptions(self.is_high_priority_stream)
        vars(made).update(vars(self))
        return made


def _devices_of(group: Any) -> list[torch.device]:
    """Return the devices whose tensors ``group`` takes, as it was made."""
    try:
        backends = str(c10d.get_backend_config(group)).split(",")
    except TypeError:  # torch 2.15 asks before it has written that down
        return []
    return [torch.device(each.partition(":")[0]) for each in backends]


class _FakeNccl(FakeProcessGroup):
    """A group of NCCL whose other ranks do not exist."""

    Options = NcclOptions
    backend = "nccl"
    supports_splitting = True
    supports_coalescing = True

    def __init__(
        self, store: dist.Store, rank: int, size: int, options: Any = None, device: object = None
    ) -> None:
        super().__init__(rank, size)
        self.store, self.options = store, options or NcclOptions()
        self._told_name = ""

    @property
    def group_name(self) -> str:
        return self._told_name or super().group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return _devices_of(self)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_default_timeout(self, timeout: timedelta) -> None:
        pass

    def eager_connect_single_device(self, device: object) -> None:
        pass

    def perform_nocolor_split(self, device: object) -> None:
        pass

    def comm_split_count(self) -> int:
        return 0

    def get_group_store(self) -> dist.Store:
        return self.store

    def split_group(
        self, ranks: list[int], group_name: str = "", opts: Any = None, **options: object
    ) -> _FakeNccl | None:
        if self.rank() not in ranks:
            return None
        store = dist.PrefixStore(group_name, self.store)
        made = type(self)(store, ranks.index(self.rank()), len(ranks), copy(opts))
        made._told_name = group_name
        return made

    def shutdown(self) -> None:
        pass

    abort = shutdown


class _FakeGloo(_FakeNccl):
    """The same, for the host's tensors. Of a group for "cpu:gloo,cuda:nccl" torch keeps this
    alone, as it does where the first backend is a whole group."""

    backend = "gloo"

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta | None = None,
        **_: object,
    ) -> None:
        super().__init__(store, rank, size, SimpleNamespace())
        self._nccl = _FakeNccl(store, rank, size)

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self._nccl


class _RealNccl(NcclLikeGroup):
    """A group of NCCL among real processes."""

    Options = NcclOptions
    backend = "nccl"

    def __init__(
        self, store: dist.Store, rank: int, size: int, options: Any = None, device: object = None
    ) -> None:
        made = SimpleNamespace(
            store=store, group_rank=rank, group_size=size, timeout=options._timeout
        )
        super().__init__(made, options)

    @property
    def _device_types(self) -> list[torch.device]:
        return _devices_of(self)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def eager_connect_single_device(self, device: object) -> None:
        pass

    def perform_nocolor_split(self, device: object) -> None:
        pass


@contextmanager
def real_nccl() -> Iterator[None]:
    """Make groups of ``"nccl"`` behave as NCCL's, among real processes."""
    with _making(ProcessGroupNCCL=_RealNccl, ProcessGroupNCCL2=_RealNccl):
        yield


@contextmanager
def nccl_in_name_only(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one of ``world_size`` ranks, of which the others do not exist."""
    begin = dist.init_process_group
    of_begin = signature(begin)

    @wraps(begin)
    def begin_alone(*args: Any, **kwargs: Any) -> None:
        given = of_begin.bind(*args, **kwargs).arguments
        told = given.get("rank", -1), given.get("world_size", -1)
        given["rank"], given["world_size"] = (rank, world_size) if -1 in told else told
        given |= {"init_method": None, "store": dist.HashStore()}
        begin(**given)

    def meet(*_: object, **__: object) -> Iterator[tuple[dist.Store, int, int]]:
        """Find the others, where a module that has imported ``init_process_group`` before has
        called it."""
        yield dist.HashStore(), rank, world_size

    def spawn(
        function: Callable[..., object], args: Sequence[Any] = (), *_: object, **__: object
    ) -> None:
        """Be one of the processes that a program starts by itself."""
        function(rank, *args)

    with (
        _making(
            ProcessGroupNCCL=_FakeNccl, ProcessGroupNCCL2=_FakeNccl, ProcessGroupGloo=_FakeGloo
        ),
        patch.object(dist, "init_process_group", begin_alone),
        patch.object(c10d, "init_process_group", begin_alone),
        patch.object(c10d, "rendezvous", meet),
        patch.object(torch.multiprocessing, "spawn", spawn),
        patch.object(device_mesh, "init_process_group", begin_alone),
    ):
        yield


@contextmanager
def _making(**classes: Any) -> Iterator[None]:
    """Have torch make groups of ``classes``. Destroy those that the program has left."""
    with (
        patch.multiple(c10d, create=True, **classes),
        patch.multiple(dist, create=True, **classes),
        patch.object(c10d, "default_pg_nccl_timeout", timedelta(minutes=10)),
    ):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
