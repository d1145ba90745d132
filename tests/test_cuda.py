"""The CUDA lanes: parity on real streams, and memory that comes back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from twins import Twins
from zoo import ZOO

pytestmark = pytest.mark.gpu


def train(name: str, prefetch: int) -> None:
    torch.cuda.set_device(dist.get_rank())
    Twins.of(name, prefetch=prefetch, device="cuda").train(iterations=4)


# Where parameters without a gradient stay None on a CPU they get zeros on several GPUs.
EVERYWHERE = [name for name in ZOO if "unused" not in name]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_training_on_gpus_equals_unsharded_training(name: str, prefetch: int) -> None:
    run_ranks(train, min(2, torch.cuda.device_count()), name, prefetch, backend="nccl")


def memory() -> None:
    twins = Twins.of("layers", device="cuda")
    batch = next(twins.batches(1))
    seen = []
    for _ in range(4):
        twins.backward(*batch)
        twins.step()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert seen[-1] == seen[-2]


def test_gpu_memory_does_not_grow() -> None:
    run_ranks(memory, 1, backend="nccl")
