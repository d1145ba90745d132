"""Offloading without a device: what rests on the host is copied as if from and to one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from fsdp_overlap import _fully_shard
from fsdp_overlap.features.offload import HostStorage
from fsdp_overlap.optim import contiguous
from fsdp_overlap.tensor import creation, sums_and_norms


@contextmanager
def pretending() -> Iterator[None]:
    """Shard as if there were a device to offload from."""
    storage = HostStorage(pin_memory=False)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(_fully_shard, "_storage_on", return_value=storage))
        for module in (creation, sums_and_norms, contiguous):
            stack.enter_context(mock.patch.object(module, "is_on_mesh", return_value=False))
        yield
