"""Gradients of shards that rest on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_overlap.comm.host_copies import D2HCopy
from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.options import ReduceOptions
from fsdp_overlap.engine.param_group import ParamGroup


class OffloadedGradients(ParamGroupGradients):
    """Gradients that are copied to the host, and become ``.grad`` at the end of backward."""

    def __init__(
        self, param_group: ParamGroup, reduce_dtype: torch.dtype, reduce_options: ReduceOptions
    ) -> None:
        super().__init__(param_group, reduce_dtype, reduce_options)
        self.offloads: list[tuple[D2HCopy, Sequence[bool] | None]] = []
        """Reduced gradients on their way to the host, and what of them is unused."""

    def _is_stepped(self, mean: torch.Tensor, unused: Sequence[bool] | None) -> bool:
        if self.offloads:  # they come before it
            self.param_group.edits.check_not_ahead(self.param_group.label)
            return False
        return super()._is_stepped(mean, unused)

    def _keep(self, mean: torch.Tensor, unused: Sequence[bool] | None = None) -> None:
        self.offloads.append((self.param_group.storage.to_host(mean), unused))
        self.param_group.mesh_info.has_late_gradients = True

    def complete(self, has_gradient: Sequence[int]) -> None:
        """Block the host until the gradients on their way to it are there, and give them to the
        parameters."""
        for copy, unused in self.offloads:
            self.give(copy.wait(), unused)
        self.offloads.clear()
        super().complete(has_gradient)

    def drop(self) -> None:
        super().drop()
        self.offloads.clear()
