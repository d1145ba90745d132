"""When the communicators of the library's groups are made, and what from.

On real ranks and the emulated device, by the group that behaves as NCCL's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fsdp_overlap.comm import process_groups
from fsdp_overlap.features.kept_parts import neighbors_group
from fsdp_overlap.features.pg_options import GroupOptions
from fsdp_overlap.tools.emulator import EmulatedDevice, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND, NcclLikeGroup, Options
from support.emulated_twins import Trained
from support.ranks import expect_rank_errors, run_ranks
from support.twins import COPIES, Twins


def nothing(*_: object) -> None:
    pass


connect, copied_options = process_groups.connect, process_groups.copied_options


def connect_users(group: dist.ProcessGroup, device_type: str) -> None:
    if not group.group_name.startswith("fsdp_overlap"):
        connect(group, device_type)


def without_priority(options: Any, timeout: timedelta) -> Any:
    made = copied_options(options, timeout)
    made.is_high_priority_stream = False
    return made


DEFECTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "": ("connect", connect),
    "own groups not connected": ("connect", connect_users),
    "not split": ("splits_apart", lambda *_: False),
    "of normal priority": ("copied_options", without_priority),
}


def check_groups(twins: Twins) -> list[NcclLikeGroup]:
    """Returns the groups of the comm streams, each after a look at how it was connected."""
    groups, mesh = twins.ctx.groups, twins.ctx.mesh
    shard, copies = mesh.get_group(mesh.ndim - 1), mesh.get_group(0)
    parents = {groups.gather: shard, groups.reduce: shard, groups.replicas: copies}
    found = []
    for group, parent in parents.items():
        if group is not None:
            assert isinstance(group, NcclLikeGroup)
            assert group.connected_by == "barrier"
            is_own = group is not parent
            assert group.options.split_from is (parent if is_own else None)
            assert group.options.is_high_priority_stream == is_own
            found.append(group)
    return found


def connect_in_settle(options: dict[str, Any], defect: str) -> None:
    """Also again after a fault that ended the library's groups, and with the user's options."""
    given = {"reduce_scatter": Options(), "all_reduce": {"max_ctas": 8}}
    given["reduce_scatter"].is_high_priority_stream = True
    with patch.object(process_groups, *DEFECTS[defect]), running(EmulatedDevice()):
        for more in ({}, given):
            twins = Trained.of("layers", **options)
            cache = twins.ctx.mesh_infos[0].group_cache
            GroupOptions(more).apply_to(cache)
            twins.ctx.lazy_init()
            before = check_groups(twins)
            assert before[0] is not before[1]
            twins.train(1)
            cache.abort(twins.ctx.groups.reduce.group_name)
            twins.ctx.reset()
            twins.optimizer.zero_grad()
            twins.twin_optimizer.zero_grad()
            twins.train(1)
            assert check_groups(twins)[1] is not before[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, COPIES], ids=["one dimension", "copies"])
def test_communicators_are_split_from_the_meshs_when_the_context_initializes(
    options: dict[str, Any],
) -> None:
    run_ranks(connect_in_settle, 4 if options else 2, options, "", backend=BACKEND)


@pytest.mark.parametrize("defect", [name for name in DEFECTS if name])
def test_a_communicator_of_the_first_step_is_found(defect: str) -> None:
    expect_rank_errors(connect_in_settle, 2, {}, defect, backend=BACKEND, match="AssertionError")


def connect_the_meshs(connect: Callable[..., None]) -> None:
    """The only group, if reductions have none of their own."""
    with patch.object(process_groups, "connect", connect), running(EmulatedDevice()):
        twins = Trained.of("layers")
        twins.ctx.mesh_infos[0].group_cache.separate = False
        twins.train(1)
        check_groups(twins)


def test_the_meshs_group_is_connected_too() -> None:
    run_ranks(connect_the_meshs, 2, connect, backend=BACKEND)
    expect_rank_errors(connect_the_meshs, 2, nothing, backend=BACKEND, match="AssertionError")


def split_beside_a_collective(is_drained: bool) -> None:
    """A collective of the user is under way on the mesh's group."""
    connects = connect if is_drained else nothing
    with running(EmulatedDevice()), patch.object(process_groups, "connect", connects):
        twins = Trained.of("layers")
        group = twins.ctx.mesh.get_group()
        dist.barrier(group=group)
        may_finish = threading.Event()
        if is_drained:
            may_finish.set()
        assert isinstance(group, NcclLikeGroup)
        group._thread.submit(may_finish.wait, 30)
        work = dist.all_reduce(torch.ones(8, device="emulated"), async_op=True)
        try:
            twins.ctx.lazy_init()
        finally:
            may_finish.set()
            assert work is not None
            work.wait()


def test_nothing_is_under_way_on_a_communicator_that_is_split() -> None:
    run_ranks(split_beside_a_collective, 2, True, backend=BACKEND)
    expect_rank_errors(
        split_beside_a_collective, 2, False, backend=BACKEND, match="work is outstanding"
    )


def split_parts() -> None:
    """Parts that neighbors keep: all ranks of the mesh make a group at once, in twos."""
    with running(EmulatedDevice()):
        twins = Trained.of("layers")
        cache, shard = twins.ctx.mesh_infos[0].group_cache, twins.ctx.mesh.get_group()
        part: Any = neighbors_group(twins.ctx.mesh_infos[0], 2)
        first = dist.get_rank() // 2 * 2
        assert dist.get_process_group_ranks(part) == [first, first + 1]
        assert (part.options.split_from, part.options.split_color) == (shard, first)
        assert part.options.is_high_priority_stream
        # A fault ends one of the groups alone. Its ranks make another without the others.
        if first == 0:
            cache.abort(part.group_name)
            cache.renew()
        other: Any = neighbors_group(twins.ctx.mesh_infos[0], 2)
        assert (other is part) == (first > 0)
        assert other.options.split_from is (shard if first else None)
        values = torch.ones(2, device="emulated")
        dist.all_reduce(values, group=other)
        assert values.tolist() == [2.0] * 2


def test_parts_are_split_from_the_meshs_group() -> None:
    run_ranks(split_parts, 4, backend=BACKEND)


def make_of_one_color() -> None:
    make = process_groups.make_group

    def made(*args: Any) -> Any:
        return make(*args[:6], 0)

    with patch.object(process_groups, "make_group", made):
        split_parts()


def test_parts_of_one_color_are_found() -> None:
    expect_rank_errors(make_of_one_color, 4, backend=BACKEND, match="AssertionError: colors")


def share() -> None:
    """What shares the parent's resources would end with it."""
    group: Any = dist.group.WORLD
    with running(EmulatedDevice()):
        assert process_groups.splits_apart(group, "emulated")
        group.options.config.split_share = 1
        assert not process_groups.splits_apart(group, "emulated")
        with patch.dict(os.environ, NCCL_COMM_SPLIT_SHARE_RESOURCES="0"):
            assert process_groups.splits_apart(group, "emulated")


def test_nothing_is_split_that_would_share_resources() -> None:
    run_ranks(share, 2, backend=BACKEND)
