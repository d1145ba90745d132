"""Process groups that a user hands in, and options for those that the library makes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_overlap import FsdpContext, MeshGroups, fully_shard
from fsdp_overlap.comm import process_groups
from fsdp_overlap.tools.emulator.nccl_like import BACKEND as NICKEL
from fsdp_overlap.tools.emulator.nccl_like import CollectiveCall, NcclLikeGroup
from support import experts
from support.lagging import BACKEND as LAGGING
from support.lagging import LaggingGroup, Options
from support.ranks import run_ranks
from support.twins import NAMES, Twins

PURPOSES = {
    "gather": "all_gather",
    "reduce": "reduce_scatter AVG",
    "replicas": "all_reduce AVG",
}


def like(mesh: DeviceMesh, dim: int = 0) -> dist.ProcessGroup:
    """A new group over the ranks of a dimension."""
    ranks = dist.get_process_group_ranks(mesh.get_group(dim))
    return dist.new_group(ranks, use_local_synchronization=True)


def all_for(mesh: DeviceMesh) -> MeshGroups:
    if mesh.ndim == 1:
        return MeshGroups(like(mesh), like(mesh))
    return MeshGroups(like(mesh, 1), like(mesh, 1), like(mesh, 0), like(mesh, 0))


def given(groups: MeshGroups) -> dict[str, dist.ProcessGroup]:
    return {name: group for name in vars(groups) if (group := getattr(groups, name)) is not None}


@contextmanager
def making_none() -> Iterator[None]:
    """Whoever makes a group fails."""
    with patch.object(process_groups, "make_group", side_effect=AssertionError("made a group")):
        yield


def issued() -> dict[dist.ProcessGroup, int]:
    """How many collectives this rank has issued on each group that exists."""
    return {group: group._get_sequence_number_for_group() for group in c10d._world.pg_map}


# ---- where collectives run ----


def run_where_told(dims: tuple[int, ...]) -> None:
    """On gloo, where all groups would be the context's own."""
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=NAMES[-len(dims) :])
    groups = all_for(mesh)
    with making_none():
        twins = Twins.of("layers", mesh=dims if mesh.ndim == 2 else None, groups=groups)
        before = issued()
        batch = next(twins.batches(1))
        loss, _ = twins.losses(*batch)
        loss.backward()
    after = issued()
    used = {group for group, count in after.items() if count != before.get(group, 0)}
    wanted = given(groups)
    assert used == set(wanted.values())
    for name in ("gather", "reduce"):
        assert getattr(twins.ctx.groups, name) is wanted[name]
    assert twins.ctx.groups.replicas is wanted.get("replicas")
    assert twins.ctx.groups.confirm is wanted.get("confirm")
    twins.optimizer.zero_grad()
    twins.train(3)
    twins.ctx.reset()
    twins.train(1)
    assert twins.ctx.groups.gather is wanted["gather"]
    group = wanted["reduce"]
    del twins
    dist.barrier(group)  # nobody has closed or destroyed it


def test_collectives_run_on_the_groups_that_were_handed_in_and_no_others() -> None:
    run_ranks(run_where_told, 2, (2,))
    run_ranks(run_where_told, 4, (2, 2))


@contextmanager
def noted(log: dict[str, set[int]]) -> Iterator[None]:
    """Notes which groups each kind of collective runs on."""
    run = NcclLikeGroup._run

    def noting(group: NcclLikeGroup, collective: CollectiveCall, start: Any) -> Any:
        log.setdefault(collective.kind, set()).add(id(group))
        return run(group, collective, start)

    with patch.object(NcclLikeGroup, "_run", noting):
        yield


def each_kind_on_its_own(name: str) -> None:
    """One group is handed in. The mesh's serves what it is not taken for."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    groups = all_for(mesh)
    one = MeshGroups(**{name: getattr(groups, name)})
    with patch("support.twins.init_device_mesh", lambda *_, **__: mesh):
        twins = Twins.of("layers", mesh=(2, 2), groups=one)
    twins.train(1)
    log: dict[str, set[int]] = {}
    with noted(log):
        twins.losses(*next(twins.batches(1)))[0].backward()
    wanted = {"gather": mesh.get_group(1), "replicas": mesh.get_group(0), name: getattr(one, name)}
    if name == "gather":
        wanted["reduce"] = mesh.get_group(1)
    for each, group in wanted.items():
        assert log[PURPOSES[each]] == {id(group)}, (each, log)
    assert not log["all_gather"] & log["reduce_scatter AVG"]


@pytest.mark.parametrize("name", PURPOSES)
def test_a_group_serves_what_it_was_handed_in_for_and_nothing_else(name: str) -> None:
    run_ranks(each_kind_on_its_own, 4, name, backend=NICKEL)


def both_on_one() -> None:
    mesh = init_device_mesh("cpu", (2,))
    group = like(mesh)
    with making_none():
        twins = Twins.of("layers", groups=MeshGroups(gather=group, reduce=group))
        twins.train(2)
        fully_shard(
            nn.Linear(2, 2),
            FsdpContext(
                separate_reduce_scatter_group=False, groups=twins.ctx._given_groups.by_mesh()
            ),
        )
    assert twins.ctx.groups.gather is twins.ctx.groups.reduce is group


def test_gathers_and_reductions_may_be_handed_the_same_group() -> None:
    run_ranks(both_on_one, 2)


def of_experts() -> None:
    whole, shards, ep = experts.meshes()
    groups = {whole: all_for(whole), shards: all_for(shards)}
    with making_none(), patch.object(experts, "meshes", lambda: (whole, shards, ep)):
        with patch.object(experts, "FsdpContext", partial(FsdpContext, groups=groups)):
            experts.train(True, False)
        ctx = FsdpContext(whole, groups=groups)
        experts.shard(experts.Moe(ep), whole, shards, ctx)
    for mesh, wanted in groups.items():
        assert ctx.mesh_info_of(mesh).groups.gather is wanted.gather
        assert ctx.mesh_info_of(mesh).groups.reduce is wanted.reduce


def test_experts_have_groups_by_their_mesh() -> None:
    run_ranks(of_experts, 4)


def copied() -> None:
    groups = all_for(init_device_mesh("cpu", (2,)))
    twins = Twins.of("layers", groups=groups)
    twins.train(1)
    duplicate = copy.deepcopy(twins.model)
    with making_none():
        duplicate(next(twins.batches(1))[0]).sum().backward()
    copied = duplicate._fsdp_unit.context
    assert copied is not twins.ctx
    assert copied.groups.gather is groups.gather
    assert copied.groups.reduce is groups.reduce


def test_a_copied_model_runs_on_the_same_groups() -> None:
    run_ranks(copied, 2)


def destroyed() -> None:
    groups = all_for(init_device_mesh("cpu", (2,)))
    twins = Twins.of("layers", groups=groups)
    twins.train(1)
    del groups
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="destroyed by destroy_process_group"):
        twins.ctx.groups.gather.size()


def test_a_context_keeps_no_group_alive() -> None:
    run_ranks(destroyed, 2)


# ---- faults ----


def at_different_places(is_apart: bool) -> None:
    """Only gathers are the user's: reductions are closed by a reset, and gathers are not."""
    twins = Twins.of("layers", groups=MeshGroups(gather=like(init_device_mesh("cpu", (2,)))))
    twins.train(1)
    if is_apart and dist.get_rank():
        dist.broadcast(torch.ones(1), group=twins.ctx.groups.gather, group_src=1, async_op=True)
    if is_apart:
        with pytest.raises(RuntimeError, match="which belongs to the program"):
            twins.ctx.reset()
        return
    reduce = twins.ctx.groups.reduce.group_name
    twins.ctx.reset()
    assert twins.ctx.groups.reduce.group_name != reduce
    twins.train(1)


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_reset_looks_at_groups_that_it_cannot_close(is_apart: bool) -> None:
    run_ranks(at_different_places, 2, is_apart)


# ---- what is refused ----


def refused() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    line = init_device_mesh("cpu", (4,))
    world, shard, replicas = dist.group.WORLD, mesh.get_group(1), mesh.get_group(0)
    gone, twin = like(line), like(mesh, 1)
    dist.destroy_process_group(gone)
    other = dist.new_group(backend=LAGGING)
    row = [rank // 2 * 2, rank // 2 * 2 + 1]
    for mesh_given, groups, said in (
        (mesh, MeshGroups(gather=world), rf"gather connects ranks \[0, 1, 2, 3\]; .* \[{row[0]}, "),
        (
            mesh,
            MeshGroups(replicas=shard),
            rf"replicas connects ranks \[{row[0]}, {row[1]}\]; give",
        ),
        (mesh, MeshGroups(confirm=shard), "confirm connects ranks"),
        (line, MeshGroups(replicas=world), "has no replicas; leave it out"),
        (line, MeshGroups(reduce=gone), "reduce was destroyed"),
        (line, MeshGroups(reduce=other), "has the backend lagging for cpu; give .* with gloo"),
        (line, {mesh: MeshGroups(replicas=world)}, "replicas connects"),
        (line, {line: MeshGroups(gather=world), mesh: MeshGroups(gather=world)}, "gather connects"),
        (
            mesh,
            {mesh: MeshGroups(gather=shard), mesh["shard"]: MeshGroups(gather=twin)},
            "two groups for the all_gather",
        ),
    ):
        with pytest.raises(ValueError, match=f"groups: .*{said}"):
            FsdpContext(mesh_given, groups=groups)
    two: Any = MeshGroups(gather=replicas, reduce=world)
    with pytest.raises(ValueError, match="separate_reduce_scatter_group=False"):
        FsdpContext(mesh, groups=two, separate_reduce_scatter_group=False)
    none: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(TypeError, match=r"gather is a .*this rank is a member of"):
        FsdpContext(line, groups=MeshGroups(gather=none))
    bare: Any = {line: world}
    with pytest.raises(TypeError, match="give a MeshGroups"):
        FsdpContext(line, groups=bare)
    with pytest.raises(
        ValueError, match=r"no comm stream 'gather'; use all_gather, reduce_scatter, "
    ):
        FsdpContext(line, pg_options={"gather": Options()})
    with pytest.raises(TypeError, match=r"gloo, which .* has, takes none"):
        FsdpContext(line, pg_options={"all_gather": Options()})


def test_bad_groups_and_options_are_refused() -> None:
    run_ranks(refused, 4)


def refuse_others_options() -> None:
    wrong: Any = object()
    with pytest.raises(TypeError, match=r"all_gather are a object; lagging, .* takes a Options"):
        FsdpContext(pg_options={"all_gather": wrong})
    with pytest.raises(ValueError, match=r"pg_options: all_reduce: a Options has no 'max_cta'"):
        FsdpContext(pg_options={"all_reduce": {"max_cta": 8}})


def test_options_of_another_backend_are_refused() -> None:
    run_ranks(refuse_others_options, 1, backend=LAGGING)


# ---- options ----


def lagging(group: dist.ProcessGroup | None) -> LaggingGroup:
    assert isinstance(group, LaggingGroup)
    return group


def by_comm_stream() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    theirs = lagging(mesh.get_group(1)).options
    theirs.max_ctas = 4
    gathers, across = Options(max_ctas=16), Options(max_ctas=1)
    options = {"all_gather": gathers, "all_reduce": across}
    contexts = [FsdpContext(mesh, pg_options=options) for _ in range(2)]
    first, second = (ctx.groups for ctx in contexts)
    for group, wanted in ((first.gather, gathers), (first.replicas, across)):
        made = lagging(group).given
        assert (made.max_ctas, made is wanted) == (wanted.max_ctas, False)
        assert made._timeout == theirs._timeout
    # The mesh's own has its own options, which a comm stream without others takes.
    assert first.reduce is mesh.get_group(1)
    assert (first.gather, first.replicas) == (second.gather, second.replicas)
    assert FsdpContext(mesh).groups.gather is mesh.get_group(1)
    reduce = lagging(FsdpContext(mesh).groups.reduce)
    assert reduce.given.max_ctas == 4
    assert reduce.given.is_high_priority_stream
    assert not theirs.is_high_priority_stream
    assert not lagging(first.gather).given.is_high_priority_stream  # as it was given
    # What to change in the mesh's, which contexts that give the same share.
    for _ in range(2):
        few = FsdpContext(mesh, pg_options={"reduce_scatter": {"max_ctas": 8}}).groups.reduce
        made = lagging(few).given
        assert (made.max_ctas, made.is_high_priority_stream, theirs.max_ctas) == (8, True, 4)
        assert few is not reduce
    again = FsdpContext(mesh, pg_options={"reduce_scatter": {"max_ctas": 8}}).groups.reduce
    assert again is few
    # Another object may hold other options.
    other = FsdpContext(mesh, pg_options={"all_gather": Options(max_ctas=32)})
    assert lagging(other.groups.gather).given.max_ctas == 32
    model = fully_shard(nn.Linear(2, 2), contexts[0])
    model(torch.ones(1, 2)).sum().backward()
    duplicate = copy.deepcopy(model)
    duplicate(torch.ones(1, 2)).sum().backward()
    assert duplicate._fsdp_unit.context.groups.gather is first.gather


def test_each_lane_may_have_options_and_others_have_those_of_the_mesh() -> None:
    run_ranks(by_comm_stream, 4, backend=LAGGING)
