"""Process groups for the lanes, made at first use and once for each distinct set of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class LaneGroups:
    """Groups over the same ranks. A communicator runs one collective at a time, so all-gathers and
    reduce-scatters that are to run beside each other need one each."""

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup


class GroupCache:
    """The lane groups of one context. Ranks must ask for meshes in the same order."""

    def __init__(self, separate: bool) -> None:
        self.separate = separate
        self._groups: dict[tuple[int, ...], LaneGroups] = {}

    def get(self, mesh: DeviceMesh) -> LaneGroups:
        """The groups of a 1-D ``mesh``. Collective over the mesh at its first call."""
        gather = mesh.get_group()
        ranks = tuple(dist.get_process_group_ranks(gather))
        groups = self._groups.get(ranks)
        if groups is None:
            reduce = gather
            if self.separate and len(ranks) > 1:
                reduce = dist.new_group(
                    list(ranks),
                    timeout=group_timeout(gather, mesh.device_type),
                    # Only the members take part, so that submeshes need no help from other ranks.
                    use_local_synchronization=True,
                    group_desc="fsdp_overlap_reduce",
                )
            groups = self._groups[ranks] = LaneGroups(gather, reduce)
        return groups


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """The timeout of ``group``, or ``None`` where its backend does not tell."""
    backend = group._get_backend(torch.device(device_type))
    return getattr(getattr(backend, "options", None), "_timeout", None)
