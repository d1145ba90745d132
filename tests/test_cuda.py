"""The CUDA lanes: parity on real streams, memory that comes back, and overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile
from twins import Twins
from zoo import ZOO

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.profiling import assert_overlapped, read_report

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


BLOCKS = 6


def profile_blocks(folder: str) -> None:
    blocks = [nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks).cuda()
    ctx = FsdpContext()
    for block in model:
        fully_shard(block, ctx)
    fully_shard(model, ctx)
    batch = torch.randn(16384, 4096, device="cuda")

    def step() -> None:
        model(batch).square().mean().backward()
        model.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(f"{folder}/rank-{dist.get_rank()}.json")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU gathers nothing")
def test_collectives_run_under_compute_on_streams_of_their_own(tmp_path: Path) -> None:
    run_ranks(profile_blocks, 2, str(tmp_path), backend="nccl")
    report = read_report(*tmp_path.iterdir())
    assert_overlapped(report, all_gathers=BLOCKS - 1, reduce_scatters=BLOCKS - 1)
    for rank in report.ranks:
        assert rank.gemm_time > rank.compute_time / 2
        lanes = {
            kind: {lane for c in rank.collectives if c.kind == kind for lane in c.lanes}
            for kind in ("all_gather", "reduce_scatter")
        }
        assert lanes["all_gather"].isdisjoint(lanes["reduce_scatter"])
