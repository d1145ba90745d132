"""Training at the debug level ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which wraps every group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from fsdp_overlap import PerTensor
from fsdp_overlap.comm.collectives import all_gather_coalesced, coalesces
from fsdp_overlap.comm.process_groups import OwnGroup, backend_name, backend_of, options_of
from fsdp_overlap.features.rows.collectives import InPlaceRows
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout import ParamSpec
from fsdp_overlap.torch_internals import unwrapped
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import Model


@contextmanager
def detailed() -> Iterator[dist.ProcessGroup]:
    """Groups are made at that level within. Gives one of all ranks."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    coalesces.cache_clear()
    try:
        group = dist.new_group()
        backend = group._get_backend(torch.device("cpu"))
        assert unwrapped(backend) is not backend
        yield group
    finally:
        dist.set_debug_level(before)
        coalesces.cache_clear()


def coalesced() -> None:
    """As for NCCL, on gloo, which the wrapper serves alike."""
    with detailed() as group:
        rank = group.rank()
        own = [torch.full((size,), float(rank)) for size in (2, 3)]
        full = [torch.zeros(4), torch.zeros(6)]
        all_gather_coalesced((full, own), group)
        assert [each.tolist() for each in full] == [[0.0] * 2 + [1.0] * 2, [0.0] * 3 + [1.0] * 3]
        specs = tuple(ParamSpec(name, shape, torch.float32) for name, shape in SHAPES.items())
        plan = RowsPlan(specs, 2)
        gradients = torch.arange(plan.numel, dtype=torch.float32) * (rank + 1)
        issued = InPlaceRows(plan).reduce_scatter(gradients.clone(), group, divisor=3.0)
        total = torch.arange(plan.numel, dtype=torch.float32)
        whole = [
            total[offset : offset + spec.numel].view(2, -1)[rank]
            for spec, offset in zip(plan.specs, plan.offsets, strict=True)
        ]
        torch.testing.assert_close(issued.finish()[: sum(map(len, whole))], torch.cat(whole))


SHAPES = {"one": (4, 8), "other": (2, 16)}


def test_collectives_are_issued_one_by_one_where_groups_are_wrapped() -> None:
    run_ranks(coalesced, 2)


def training() -> None:
    """Beside FSDP2, which has one collective a unit."""
    with detailed() as group:
        mesh = DeviceMesh.from_group(group, "cpu")
        with patch("support.twins.init_device_mesh", lambda *_, **__: mesh):
            for options in ({}, {"layout": PerTensor()}):
                Twins.of("layers", **options).train(2)
        torch.manual_seed(0)
        model = Model()
        for module in (*model.layers, model):
            torchs_fully_shard(module, mesh=mesh)
        model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()


def test_ours_trains_there_as_fsdp2_does() -> None:
    run_ranks(training, 2)


def aborted() -> list[str]:
    """The wrapper's abort() does nothing in torch 2.11."""
    with detailed() as group:
        assert backend_name(group, "cpu") == "gloo"
        assert options_of(group, "cpu") is not None
        called: list[str] = []

        class Backend:
            def name(self) -> str:
                return "nccl"

            def abort(self) -> None:
                called.append("abort")

        def inner(group: Any, device_type: str) -> Any:
            assert type(backend_of(group, device_type)) is dist.ProcessGroupGloo
            return Backend()

        with patch("fsdp_overlap.comm.process_groups.backend_of", inner):
            OwnGroup(ref(group), "cpu", is_closable=False).close()
        return called


def test_a_fault_aborts_the_backend_in_the_wrapper() -> None:
    assert run_ranks(aborted, 2) == [["abort"]] * 2
