"""A model in rows, beside FSDP2's and a plain one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from support.zoo import VOCABULARY, Model


def deep() -> Any:
    torch.manual_seed(1)
    return Model(layers=3).double()


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(5))


def torchs(module: nn.Module, **options: Any) -> None:
    torchs_fully_shard(module, **options)


def check_alike(ours: nn.Module, theirs: nn.Module, beside_others: bool = False) -> None:
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert isinstance(mine, nn.Parameter)
        assert isinstance(its, DTensor)
        assert (mine.device_mesh, mine.placements) == (its.device_mesh, its.placements), name
        assert mine.to_local().shape == its.to_local().shape, name
        assert torch.equal(mine.to_local(), its.to_local()), name
        assert torch.equal(mine.full_tensor(), its.full_tensor()), name
        if not beside_others:  # torch cannot cut a tensor into strided shards
            whole = mine.full_tensor().detach()
            again = distribute_tensor(whole, mine.device_mesh, mine.placements)
            assert torch.equal(again.to_local(), mine.to_local())
