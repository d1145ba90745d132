"""Shards, gradients and optimizer states that rest on the host."""

from __future__ import annotations

import torch

from fsdp_overlap.comm.host_copies import D2HCopy, copy_to_host
from fsdp_overlap.engine.param_group import Storage


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
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.pin_memory)

    def to_host(self, reduced: torch.Tensor) -> D2HCopy:
        # Fresh memory each time, so that earlier gradients that a user holds stay as they are.
        return copy_to_host(reduced, self.empty(reduced.numel(), reduced.dtype, reduced.device))
