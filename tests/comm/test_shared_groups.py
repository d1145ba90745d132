"""Backends whose groups cannot be closed: contexts over the same ranks share one set."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap.comm import process_groups
from fsdp_overlap.tools.emulator.nccl_like import BACKEND as NICKEL
from support.lagging import BACKEND as LAGGING
from support.lagging import LaggingGroup
from support.ranks import run_ranks
from support.twins import COPIES, NAMES, Twins


@contextmanager
def counted(made: list[str]) -> Iterator[None]:
    """Notes the names of groups that are made."""
    make = process_groups.make_group

    def counting(name: str, *rest: Any) -> dist.ProcessGroup:
        made.append(name)
        return make(name, *rest)

    with patch.object(process_groups, "make_group", counting):
        yield


def names_of(twins: Twins) -> set[str]:
    groups = twins.ctx.groups
    return {each.group_name for each in (groups.gather, groups.reduce, groups.replicas) if each}


def side_by_side(**options: Any) -> None:
    """Steps of three models in turn. Ranks free the first at different moments."""
    made: list[str] = []
    gc.disable()  # so that a context is freed at once, and not when Python looks for cycles
    try:
        with counted(made):
            names = in_turn(options)
            last = Twins.of("layers", **options)
            last.train(2)
            assert names_of(last) == names
        assert len(made) == 1, made
    finally:
        gc.enable()


def in_turn(options: dict[str, Any]) -> set[str]:
    """Returns the names of the groups that all had."""
    several = [Twins.of("layers", **options) for _ in range(3)]
    for index in (0, 1, 2, 0, 1, 2):
        several[index].train(1)
    names = [names_of(twins) for twins in several]
    if dist.get_rank() % 2:
        del several[0]
    several.append(Twins.of("layers", **options))
    several[-1].train(1)
    if not dist.get_rank() % 2:
        del several[0]
    for index in range(3):
        several[index].train(1)
    names += [names_of(twins) for twins in several]
    assert names == names[:1] * 6
    return names[0]


def test_contexts_side_by_side_share_one_set_of_groups() -> None:
    run_ranks(side_by_side, 2, backend=NICKEL)


def of_copies() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    with patch("support.twins.init_device_mesh", lambda *_, **__: mesh):
        side_by_side(**COPIES)


@pytest.mark.slow
def test_contexts_with_copies_share_one_set_too() -> None:
    run_ranks(of_copies, 4, backend=NICKEL)


def reset_by_one() -> None:
    """A reset that aborts the shared group. The other context says so, and then resets too."""
    first, second = Twins.of("layers"), Twins.of("layers")
    for twins in (first, second):
        twins.train(1)
    reduce = first.ctx.groups.reduce
    assert second.ctx.groups.reduce is reduce
    LaggingGroup.patience = timedelta(seconds=0.3)
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(1), group=reduce, group_src=1)
    LaggingGroup.patience = None
    first.ctx.reset()
    first.train(1)
    fresh = first.ctx.groups.reduce
    assert fresh is not reduce
    assert reduce.aborted
    with pytest.raises(RuntimeError, match=r"clos|reset"):  # as gloo says it
        second.backward(*next(second.batches(1)))
    second.ctx.reset()
    second.optimizer.zero_grad()
    second.twin_optimizer.zero_grad()
    second.train(2)
    first.train(1)
    assert second.ctx.groups.reduce is fresh


def test_contexts_that_share_a_group_are_reset_one_by_one() -> None:
    run_ranks(reset_by_one, 2, backend=LAGGING)


def on_gloo() -> None:
    first, second = Twins.of("layers"), Twins.of("layers")
    first.train(1)
    second.train(1)
    assert not names_of(first) & names_of(second)


def test_with_gloo_every_context_has_its_own() -> None:
    run_ranks(on_gloo, 2)
