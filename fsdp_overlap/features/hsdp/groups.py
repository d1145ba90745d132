"""Process groups of a mesh ``(replicate, shard)``."""

from __future__ import annotations

from weakref import ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.process_groups import (
    CommGroups,
    GroupCache,
    alive,
    can_close,
    communicates,
)


class ReplicatedGroups(CommGroups):
    """Those along the second dimension, and between ranks that hold replicas.

    ``confirm`` is ``None`` where nothing is confirmed. It is another group than ``replicas``,
    because a reduction over replicas starts at another moment on each rank. It would hold up a
    confirmation that other ranks need before they start theirs.
    """

    def __init__(
        self,
        along_shard: CommGroups,
        replicas: dist.ProcessGroup,
        confirm: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(along_shard.gather, along_shard.reduce)
        self._replicas = ref(replicas)
        self._confirm = None if confirm is None else ref(confirm)

    @property
    def replicas(self) -> dist.ProcessGroup:  # type: ignore[override]
        return alive(self._replicas)

    @property
    def confirm(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        return None if self._confirm is None else alive(self._confirm)

    @property
    def to_confirm(self) -> list[dist.ProcessGroup]:
        groups = (self.reduce, self.confirm)
        return [group for group in groups if group is not None and communicates(group)]

    @property
    def per_dim(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.reduce, self.replicas) if communicates(group)]


def replicated_groups(cache: GroupCache, mesh: DeviceMesh, separate: bool) -> ReplicatedGroups:
    """Return the groups of ``mesh`` from ``cache``. Collective over it at the first call."""
    along_shard, like = cache.get(mesh, separate), mesh.get_group(0)
    replicas = cache.get_like("all_reduce", like, mesh.device_type)
    is_confirmed = can_close(like, mesh.device_type)
    confirm = cache.get_like("order_check", like, mesh.device_type) if is_confirmed else None
    return ReplicatedGroups(along_shard, replicas, confirm)
