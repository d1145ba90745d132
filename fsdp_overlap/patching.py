"""Patch FSDP2's names with ours, for code that looks them up in torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch.distributed.fsdp
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap._fully_shard import fully_shard
from fsdp_overlap.context import FsdpContext
from fsdp_overlap.features.full_mesh import DataParallelMeshDims, spmd_mesh
from fsdp_overlap.features.rows.layout import PerTensor
from fsdp_overlap.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp_overlap.schedule.finalization import GradientReductionHandle
from fsdp_overlap.tensor.creation import with_range_shards
from fsdp_overlap.torch_internals import older_fsdp2


def _fully_shard_in_rows(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    context_options: Mapping[str, Any],
    **options: Any,
) -> Any:
    """Return :func:`fully_shard` without a context, whose sharded parameters are placed as FSDP2's
    unless ``context_options`` have another layout."""
    data = mesh if dp_mesh_dims is None else spmd_mesh(mesh, dp_mesh_dims).data
    ctx = FsdpContext(data, **{"layout": PerTensor(), **context_options})
    ctx.is_implicit = ctx.keeps_own_values = True
    return fully_shard(module, ctx, mesh=mesh, dp_mesh_dims=dp_mesh_dims, **options)


@contextmanager
def patch_fsdp2(ctx: FsdpContext | None = None, **context_options: Any) -> Iterator[None]:
    """Make ``from torch.distributed.fsdp import fully_shard, FSDPModule`` give ours inside the
    ``with`` block. It is for other people's code that calls ``fully_shard`` itself, as
    ``Accelerator.prepare()`` does.

    The other names that FSDP2 exports are ours too, and
    ``torch.distributed.tensor.distribute_tensor`` also takes our placements. This holds for all
    threads of the process, until the block ends. Code that imported a name before keeps torch's. A
    module that is imported for the first time inside the block keeps ours, so import it before.
    ``isinstance(module, fsdp_overlap.FSDPModule)`` tells which of the two was called.

    Args:
        ctx: what all units that are made inside the block share; so it is for one model. By default
            the units of a tree share a context from the first forward of their root on, and its
            layout is ``PerTensor()``, so that sharded parameters are placed as FSDP2's are. Ranks
            that start from different weights are warned, and each keeps its part, as with FSDP2.

        context_options: keyword arguments of the contexts that units are given by default, such as
            ``prefetch``.

    Raises:
        RuntimeError: names are replaced already.
        TypeError: options are given beside ``ctx``, which has its own.
    """
    if ctx is not None and context_options:
        raise TypeError(
            f"patch_fsdp2(ctx, {next(iter(context_options))}=...): give options to FsdpContext()"
        )
    fsdp: Any = torch.distributed.fsdp
    tensor = torch.distributed.tensor
    if fsdp.FSDPModule is FSDPModule:
        raise RuntimeError(
            "patch_fsdp2() within another, of this or another thread: one is enough for all "
            "that runs in it; for a context of its own, end the first before"
        )
    shard: Any = (
        partial(_fully_shard_in_rows, context_options=context_options)
        if ctx is None
        else partial(fully_shard, ctx=ctx)
    )
    update_wrapper(shard, fully_shard)
    shard.state = fsdp.fully_shard.state  # it answers for our modules too
    ours = {
        "FSDPModule": FSDPModule,
        "GradientReductionHandle": GradientReductionHandle,
        "UnshardHandle": UnshardHandle,
        "fully_shard": shard,
        "register_fsdp_forward_method": register_fsdp_forward_method,
        "share_comm_ctx": share_comm_ctx,
    }
    replaced: list[tuple[Any, str, Any]] = [
        (module, name, vars(module)[name])
        for module in (fsdp, *older_fsdp2)
        for name in ours
        if name in vars(module)
    ]
    torchs_distribute = tensor.distribute_tensor
    for module, name, _ in replaced:
        setattr(module, name, ours[name])
    tensor.distribute_tensor = with_range_shards(torchs_distribute)
    try:
        yield
    finally:
        for module, name, torchs in replaced:
            setattr(module, name, torchs)
        tensor.distribute_tensor = torchs_distribute
