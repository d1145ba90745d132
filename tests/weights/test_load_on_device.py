"""Weights from files into shards on the emulated device, or offloaded from it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from fsdp_overlap import CPUOffloadPolicy
from fsdp_overlap.comm.comm_streams import DeviceCommStream
from fsdp_overlap.engine.comm_context import CommContext
from fsdp_overlap.tools.emulator import EmulatedDevice, Stream, fake_ranks, running
from fsdp_overlap.weights import file_reads, load_weights
from fsdp_overlap.weights.chunks import full_chunk, local_chunks
from fsdp_overlap.weights.model_weights import weights_of
from fsdp_overlap.weights.safetensors_format import FileTensor
from support.emulated import Program, Seconds
from support.zoo import ZOO

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "offloaded": {"shard_options": {"offload_policy": CPUOffloadPolicy()}},
}


def read_by_torch(descriptor: int, memory: torch.Tensor, position: int, what: FileTensor) -> None:
    """As ``_read()``, by an operation that the emulated device sees."""
    read = os.pread(descriptor, memory.numel(), position)
    memory.copy_(torch.frombuffer(bytearray(read), dtype=torch.uint8))


def loads(
    folder: Path, name: str, ranks: int = 4, defect: AbstractContextManager[Any] | None = None
) -> EmulatedDevice:
    """Train, load while shards are read, and train on. A ``defect`` may be planted in what
    loads. Without one, check what the rank has."""
    torch.manual_seed(7)
    weights = {
        name: torch.randn(tensor.shape, dtype=torch.bfloat16)
        for name, tensor in weights_of(ZOO["layers"][0]()).items()
    }
    save_file(weights, folder / "model.safetensors")
    timing = Seconds({"mm": 1.0, "addmm": 1.0, "copy_": 1.0, "all_gather": 5.0})
    with running(EmulatedDevice(timing=timing)) as device, fake_ranks(ranks):
        program = Program("layers", (ranks,), **OPTIONS[name])
        program.train(2)
        if name == "offloaded":
            program.forward()  # of which no backward follows
        else:
            program.ctx.start_param_sync()
        with (
            patch.multiple(file_reads, _STAGED_BYTES=64, _DIRECT_BYTES=64),
            patch.object(file_reads, "_read", read_by_torch),
            defect or nullcontext(),
        ):
            load_weights(program.model, folder, num_threads=2)
        for key, tensor in weights_of(program.model).items() if defect is None else ():
            for chunk, values in local_chunks(tensor):
                wanted = chunk.of(full_chunk(tensor.shape), weights[key])
                assert torch.equal(values.cpu(), wanted.to(values.dtype)), key
        program.train(2)
    return device


@pytest.mark.parametrize("name", OPTIONS)
def test_shards_are_loaded_beside_what_runs(name: str, tmp_path: Path) -> None:
    assert not loads(tmp_path, name).findings


@pytest.mark.parametrize(
    ("name", "ranks", "defect"),
    [
        # The host overwrites what a copy to the device still reads.
        ("default", 4, patch.object(Stream, "synchronize", lambda _: None)),
        # Copies to shards do not wait for compute that steps them. One rank alone waits nowhere.
        (
            "default",
            1,
            patch.object(file_reads, "mark_enqueued", lambda _: Stream().record_event()),
        ),
        # Nor for all-gathers that were started ahead.
        ("default", 1, patch.object(DeviceCommStream, "before_compute", lambda _: None)),
        # The host overwrites shards that are on their way to the device.
        ("offloaded", 1, patch.object(CommContext, "finish_reading", lambda _: None)),
    ],
    ids=["staging reused", "compute", "gathers", "shards still read"],
)
def test_the_device_finds_what_does_not_wait(
    name: str, ranks: int, defect: Any, tmp_path: Path
) -> None:
    assert loads(tmp_path, name, ranks, defect).findings
