"""Shards, gradients and optimizer states that rest on the host."""

from __future__ import annotations

from functools import partial
from weakref import ref

import torch

from fsdp_overlap.comm.comm_streams import CollectiveOp
from fsdp_overlap.comm.host_copies import D2HCopy, copy_to_host
from fsdp_overlap.engine.param_group import DIRECT, Gatherer, ParamGroup, Storage
from fsdp_overlap.features.pinned_memory import empty_pinned


class ComputeCopy:
    """A copy of a shard in the dtype of compute, beside it on the host. All-gathers read it, so
    that fewer bytes travel to the device.

    The host casts before the first all-gather after an edit, and not a thread that steps shards:
    there the casts would come on top of the steps, which are what a step of training waits for."""

    def __init__(self, param_group: ParamGroup) -> None:
        shard, dtype = param_group.shard, param_group.compute_dtype
        storage, device = param_group.storage, param_group.device
        with torch.inference_mode(False):  # it is written outside of that, too
            self.values = storage.empty(shard.numel(), dtype, device)
        self._shard = ref(shard)
        self._version = -1

    def is_of(self, param_group: ParamGroup) -> bool:
        """Return whether this is the copy for the memory and the dtype that the shard has now."""
        return self._shard() is param_group.shard and self.values.dtype == param_group.compute_dtype

    def refresh(self, param_group: ParamGroup) -> None:
        """Cast the shard, unless that was done since its last edit. Block until the device has read
        the values before."""
        if self._version == param_group.version:
            return
        if param_group.reading is not None:
            param_group.reading.wait_on_host()
        self.values.copy_(param_group.shard)
        self._version = param_group.version


class HostStorage(Storage):
    """The memory of the host. ``pin_memory``: whether it is pinned."""

    is_on_host = True

    def __init__(self, pin_memory: bool) -> None:
        self.pin_memory = pin_memory

    def rest_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "meta":
            return super().empty(numel, dtype, device)
        if not self.pin_memory:
            return torch.empty(numel, dtype=dtype, device="cpu")
        return empty_pinned(numel, dtype, device)

    def to_host(self, reduced: torch.Tensor) -> D2HCopy:
        # Fresh memory each time, so that earlier gradients that a user holds stay as they are.
        # torch's allocator has it from gradients that nobody holds any more.
        host = torch.empty(
            reduced.numel(), dtype=reduced.dtype, device="cpu", pin_memory=self.pin_memory
        )
        return copy_to_host(reduced, host)

    def compute_copy(self, param_group: ParamGroup) -> ComputeCopy | None:
        """Return the copy of the shard of ``param_group`` in the dtype of compute. ``None`` if that
        takes no fewer bytes, or if something else than a cast makes of the shard what travels."""
        is_narrower = param_group.compute_dtype.itemsize < param_group.shard.dtype.itemsize
        if not is_narrower or param_group.is_extension or param_group.comm_policy is not None:
            return None
        copy: ComputeCopy | None = param_group.compute_copy
        if copy is None or not copy.is_of(param_group):
            copy = param_group.compute_copy = ComputeCopy(param_group)
        return copy


class FromHost(Gatherer):
    """Gathers shards that rest on the host, from their copies in the dtype of compute if there are
    any."""

    def source(self, param_group: ParamGroup) -> torch.Tensor:
        storage = param_group.storage
        assert isinstance(storage, HostStorage)
        if (copy := storage.compute_copy(param_group)) is None:
            return param_group.shard
        copy.refresh(param_group)
        return copy.values

    def collective_op(self, param_group: ParamGroup) -> CollectiveOp:
        group = param_group.groups.gather_ref() or param_group.groups.gather
        full, source = param_group.full.flat, self.source(param_group)
        issue = partial(param_group.collectives.all_gather, full, source, group)
        return issue, None, param_group.comm_nbytes


FROM_HOST = FromHost()


def gatherer_of_shard(param_group: ParamGroup) -> Gatherer:
    """Return what gathers the shard of ``param_group`` from where it rests."""
    return FROM_HOST if param_group.storage.is_on_host else DIRECT
