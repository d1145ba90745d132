"""Storage of shards and of their gradients."""

from __future__ import annotations

import torch

from fsdp_overlap.comm.host_copies import D2HCopy


class Storage:
    """Where shards and their gradients rest: on the device that computes."""

    is_on_host = False
    """Whether they rest on the host, and another device computes."""

    def rest_device(self, device: torch.device) -> torch.device:
        """Return where shards rest of which ``device`` computes with the parameters."""
        return device

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a shard or its gradient. ``device``: where the full buffer is."""
        return torch.empty(numel, dtype=dtype, device=device)

    def to_host(self, reduced: torch.Tensor) -> D2HCopy:
        """Enqueue the copy of a gradient to where its shard rests, if that is the host. The copy
        runs after the work that makes ``reduced``."""
        raise NotImplementedError


DEVICE = Storage()
