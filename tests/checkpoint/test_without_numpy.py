"""What ranks do where numpy is not installed."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp_overlap import FsdpContext
from fsdp_overlap.checkpoint import SafeFileSystemReader, SafeFileSystemWriter
from fsdp_overlap.comm.objects import exchange_bytes
from fsdp_overlap.weights import WeightResharder, save_weights
from support.ranks import run_ranks
from support.zoo import Model, shard_layers


def sharded(value: float) -> Model:
    model = Model()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    shard_layers(model, FsdpContext(validate_layouts=True))
    return model


def not_available(tensor: torch.Tensor) -> None:
    raise RuntimeError("Numpy is not available")  # as torch says


def trains_and_reshards_but_saves_nothing(folder: str) -> None:
    source, target = sharded(1.0), sharded(2.0)
    with patch.object(torch.Tensor, "numpy", not_available):
        source(torch.zeros(1, 2, dtype=torch.long)).sum().backward()  # ranks compare their plans
        WeightResharder(source, target).run()
        mine = bytes([dist.get_rank()])
        group = dist.group.WORLD
        assert group is not None
        assert exchange_bytes(mine, group, "test") == b"\0\1"
        save_weights(source, f"file://{folder}/weights")
        says = "torch.distributed.checkpoint needs numpy .*: pip install numpy"
        state = source.state_dict()
        with pytest.raises(RuntimeError, match=says):
            dcp.save(state, storage_writer=SafeFileSystemWriter(f"{folder}/step"))
        with pytest.raises(RuntimeError, match=says):
            dcp.load(state, storage_reader=SafeFileSystemReader(f"{folder}/step"))
        alone = SafeFileSystemWriter(f"{folder}/alone-{dist.get_rank()}")
        dcp.save({"x": torch.ones(1)}, storage_writer=alone, no_dist=True)
    assert all(p.full_tensor().eq(1).all() for p in target.parameters())


def test_ranks_train_and_reshard_and_dcp_says_what_it_needs(tmp_path: Path) -> None:
    run_ranks(trains_and_reshards_but_saves_nothing, 2, str(tmp_path))
    assert not (tmp_path / "step").exists()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]
