"""Within ``patch_fsdp2()`` the names of FSDP2 are ours."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp2
import torch.distributed.tensor
from torch import nn
from torch.distributed._composable import fsdp as older_fsdp2

import fsdp_overlap
from fsdp_overlap import FsdpContext, RaggedDTensor, patch_fsdp2
from support.ranks import run_ranks


def names() -> list[Any]:
    modules = (fsdp2, older_fsdp2, sys.modules[f"{older_fsdp2.__name__}.fully_shard"])
    exported = ("fully_shard", "FSDPModule", "register_fsdp_forward_method", "UnshardHandle")
    found = [getattr(module, name, None) for module in modules for name in exported]
    return [*found, torch.distributed.tensor.distribute_tensor]


def replaced() -> None:
    before = names()
    ctx = FsdpContext()
    with contextlib.suppress(ArithmeticError), patch_fsdp2(ctx):
        from torch.distributed.fsdp import FSDPModule, fully_shard

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=None, reshard_after_forward=True)
        fully_shard(model)
        assert FSDPModule is older_fsdp2.FSDPModule is fsdp_overlap.FSDPModule
        assert FSDPModule is sys.modules[f"{older_fsdp2.__name__}.fully_shard"].FSDPModule
        assert fully_shard.__name__ == "fully_shard"
        assert all(isinstance(module, FSDPModule) for module in (model, model[0]))
        assert not isinstance(model[1], FSDPModule)
        with pytest.raises(RuntimeError, match=r"patch_fsdp2\(\) within another"):
            patch_fsdp2().__enter__()
        assert fsdp2.FSDPModule is FSDPModule  # the outer one goes on
        raise ArithmeticError("planned")
    assert names() == before
    assert len(ctx.units) == 2
    weight = torch.ones(4, 4)
    mesh = model[0].weight.device_mesh
    for _ in range(2):
        with patch_fsdp2():
            distribute = torch.distributed.tensor.distribute_tensor
            ranges = distribute(weight, mesh, model[0].weight.placements, src_data_rank=None)
            rows = distribute(weight, mesh, [torch.distributed.tensor.Shard(0)])
            plain = fsdp2.fully_shard(nn.Linear(4, 4))
            assert fsdp2.fully_shard.state(plain)._comm_ctx  # as a pipeline asks it
        assert isinstance(ranges, RaggedDTensor)
        assert not isinstance(rows, RaggedDTensor)
        assert isinstance(plain, fsdp_overlap.FSDPModule)
    theirs = fsdp2.fully_shard(nn.Linear(4, 4))
    assert isinstance(theirs, fsdp2.FSDPModule)
    assert not isinstance(theirs, fsdp_overlap.FSDPModule)


def test_fsdp2s_names_are_ours_within_and_torchs_again_after() -> None:
    run_ranks(replaced, 2)
