"""FSDP2, unmodified, on the emulated device: it leaves nothing unordered, and what it would leave
without one of its waits is found."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_overlap.tools.emulator import EmulatedDevice, Event, Stream, fake_ranks, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND
from fsdp_overlap.tools.emulator.works import FinishedWork
from support.ranks import run_ranks
from support.tensor_parallel import LENGTH, WORDS, Transformer, loss_of, parallelize

WIDTH = 8
MESHES = {(4,): ("shard",), (2, 2): ("replicate", "shard")}


class Layers(nn.Module):
    def __init__(self, checkpoints: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)
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


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    if "offload_policy" not in options:
        model.to("emulated")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    assert isinstance(fully_shard(model, mesh=mesh, **options), FSDPModule)
    return model


def batch(tensor: torch.Tensor | None = None) -> torch.Tensor:
    tensor = torch.randn(2, WIDTH) if tensor is None else tensor
    return tensor.to("emulated").requires_grad_()


def train(
    dims: tuple[int, ...] = (4,),
    batches: int = 1,
    checkpoints: str = "",
    asks_ahead: bool = False,
    **options: Any,
) -> EmulatedDevice:
    """Trains for two steps, as the first rank of four, and evaluates."""
    with fake_ranks(4), running(EmulatedDevice()) as device:
        mesh = init_device_mesh("emulated", dims, mesh_dim_names=MESHES[dims])
        model = sharded(Layers(checkpoints), mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            for index in range(batches):
                model.set_requires_gradient_sync(index == batches - 1)
                for layer in model.layers if asks_ahead else ():
                    layer.unshard(async_op=True)
                model(batch()).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch())
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
    "asked for ahead": {"asks_ahead": True},
    "kept until backward": {"reshard_after_forward": False},
    "all of it": {**OFFLOAD, **MIXED, "batches": 2, "checkpoints": "plain"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dims", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_leaves_nothing_unordered(name: str, dims: tuple[int, ...]) -> None:
    device = train(dims, **PROGRAMS[name])
    assert not device.findings, "\n".join(map(str, dict.fromkeys(device.findings)))
    assert device.operations > 300
    assert {issued.kind for issued in device.issued} >= {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize(
    ("owner", "method", "options"),
    [
        (Event, "synchronize", OFFLOAD),
        (Event, "wait", {}),
        (Stream, "wait_event", {}),
        (Stream, "wait_stream", {}),
        (FinishedWork, "wait", {"asks_ahead": True}),
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


def test_beside_tensor_parallelism() -> None:
    with fake_ranks(4, "cpu:fake,emulated:fake"), running(EmulatedDevice()) as device:
        mesh = init_device_mesh("emulated", (2, 2), mesh_dim_names=("dp", "tp"))
        model = sharded(parallelize(Transformer().to("emulated"), mesh["tp"]), mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            tokens, targets = torch.randint(WORDS, (2, 3, LENGTH), device="emulated")
            loss_of(model, tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not device.findings, "\n".join(map(str, dict.fromkeys(device.findings)))


VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.mark.skipif(VERSION == (2, 12), reason="not tried with torch 2.12")
def test_hooks_that_read_offloaded_gradients_are_found_where_fsdp2_did_not_wait_for_them() -> None:
    """A fault of torch 2.11, which its maintainers found and mended in
    https://github.com/pytorch/pytorch/pull/180666."""
    with fake_ranks(4), running(EmulatedDevice()) as device:
        model = sharded(Layers(""), init_device_mesh("emulated", (4,)), **OFFLOAD)

        def step(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            model(batch()).sum().backward()
    assert bool(device.findings) == (VERSION < (2, 13))


def trains_as_unsharded() -> None:
    """On real ranks, each of which has the same batches."""
    for options in ({}, OFFLOAD):
        torch.manual_seed(3)
        twin, inputs = Layers(""), torch.randn(3, 2, WIDTH)
        with running(EmulatedDevice()) as device:
            model = sharded(copy.deepcopy(twin), init_device_mesh("emulated", (2,)), **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for each in inputs:
                model(batch(each)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            mine = [parameter.to_local().cpu() for parameter in model.parameters()]
            assert not device.findings
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for each in inputs:
            twin(each).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for part, whole in zip(mine, twin.parameters(), strict=True):
            torch.testing.assert_close(part, whole.detach().chunk(2)[dist.get_rank()])


def test_on_real_ranks_its_numbers_are_right() -> None:
    run_ranks(trains_as_unsharded, 2, backend=BACKEND)
