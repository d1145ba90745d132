"""FSDP2, unmodified, on the emulated device: it leaves nothing unordered, and what it would leave
without one of its waits is found."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_overlap.modelled import Event, ModelledDevice, Stream, fake_ranks, running

WIDTH = 8
MESHES = {(4,): ("shard",), (2, 2): ("replicate", "shard")}


class Layers(nn.Module):
    def __init__(self, checkpoints: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpoints:
                x = checkpoint(layer, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                x = layer(x)
        return self.head(x)


def train(
    dims: tuple[int, ...] = (4,),
    batches: int = 1,
    checkpoints: str = "",
    **options: Any,
) -> ModelledDevice:
    """Trains for three steps, as the first rank of four, and evaluates."""
    with fake_ranks(4), running(ModelledDevice()) as device:
        mesh = init_device_mesh("modelled", dims, mesh_dim_names=MESHES[dims])
        model: Any = Layers(checkpoints)
        if "offload_policy" not in options:
            model.to("modelled")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        assert isinstance(model, FSDPModule)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            for batch in range(batches):
                model.set_requires_gradient_sync(batch == batches - 1)
                x = torch.randn(2, WIDTH, device="modelled", requires_grad=True)
                model(x).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(2, WIDTH, device="modelled", requires_grad=True))
    return device


OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": OFFLOAD,
    "offload without pinned memory": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "mixed precision": MIXED,
    "accumulation": {"batches": 2},
    "checkpoints": {"checkpoints": "plain"},
    "reentrant checkpoints": {"checkpoints": "reentrant"},
    "kept until backward": {"reshard_after_forward": False},
    "all of it": {**OFFLOAD, **MIXED, "batches": 2, "checkpoints": "plain"},
}


@pytest.mark.parametrize("dims", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_leaves_nothing_unordered(name: str, dims: tuple[int, ...]) -> None:
    device = train(dims, **PROGRAMS[name])
    assert not device.findings, "\n".join(map(str, dict.fromkeys(device.findings)))
    assert device.operations > 500
    assert {issued.kind for issued in device.issued} >= {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize(
    ("owner", "method", "options"),
    [
        (Event, "synchronize", OFFLOAD),
        (Event, "wait", {}),
        (Stream, "wait_event", {}),
        (Stream, "wait_stream", {}),
    ],
)
def test_what_it_leaves_out_is_found(owner: type, method: str, options: dict[str, Any]) -> None:
    with patch.object(owner, method, lambda *_: None):
        device = train(**options)
    assert device.findings


def test_offloaded_gradients_read_too_early_are_found() -> None:
    with patch.object(Event, "synchronize", lambda _: None):
        device = train(**OFFLOAD)
    found = "\n".join(map(str, device.findings))
    assert "reads memory" in found
    assert "_to_copy on stream" in found
