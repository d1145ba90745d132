"""The CUDA comm streams: parity on real streams, memory that comes back, and overlap.

On one GPU these are one rank's, whose collectives are copies on the comm streams;
test_simulated_ranks has more. With two GPUs, and in the GPU suite's part `ranks`, NCCL's run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.profiler import ProfilerActivity, profile

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, TensorAtomic, fully_shard
from fsdp_overlap.checkpoint import SafeFileSystemReader, SafeFileSystemWriter
from fsdp_overlap.comm.collectives import TensorCollectives
from fsdp_overlap.comm.comm_streams import DeviceCommStream
from fsdp_overlap.layout import Flat, ParamSpec, plan_units
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from fsdp_overlap.tools.profiling import assert_overlapped, read_report
from support.captured import OPTIMIZERS, replay_steps
from support.hostile_streams import CYCLES, RANKS, HostileCommStream
from support.ranks import run_ranks
from support.twins import Twins, loss_of
from support.zoo import VOCABULARY, ZOO, Model, shard_layers

pytestmark = pytest.mark.gpu


def train(name: str, prefetch: int, device: str = "cuda") -> None:
    Twins.of(name, prefetch=prefetch, device=device).train(iterations=4)


# Where parameters without a gradient stay None on a CPU and on one GPU, they get zeros on several.
TRAINED = [name for name in ZOO if RANKS == 1 or not name.startswith(("unused", "skipped"))]


# The schedule is the same on a CPU, where every model is trained with each.
MANY = ["layers", "nested units", "checkpointed", "dynamic order"]


@pytest.mark.parametrize(
    ("name", "prefetch"), [(n, 1) for n in TRAINED] + [(n, p) for n in MANY for p in (0, 2)]
)
def test_training_on_gpus_equals_unsharded_training(name: str, prefetch: int) -> None:
    run_ranks(train, RANKS, name, prefetch, backend="nccl")


def train_on_hostile_streams(name: str, prefetch: int, late_compute: bool) -> None:
    twins = Twins.of(name, prefetch=prefetch, device="cuda", optimizer=AdamW)
    twins.ctx.comm_stream_factory = lambda comm_stream, device: HostileCommStream(
        device, late_compute
    )
    twins.train(iterations=4)


LATE = pytest.mark.parametrize(
    "late_compute", [False, True], ids=["late comm streams", "late compute"]
)


@LATE
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", MANY)
def test_compute_and_lanes_wait_for_each_other(
    name: str, prefetch: int, late_compute: bool
) -> None:
    run_ranks(train_on_hostile_streams, RANKS, name, prefetch, late_compute, backend="nccl")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_of_a_captured_step_equal_the_step(name: str) -> None:
    run_ranks(replay_steps, RANKS, name, "cuda", backend="nccl")


def capture_a_forward() -> None:
    twins = Twins.of("layers", device="cuda")
    tokens, targets = next(twins.batches(1))
    for _ in range(2):
        twins.backward(tokens, targets)
    torch.cuda.synchronize()
    refused = pytest.raises(RuntimeError, match="capture whole steps")
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        twins.model(twins.mine(tokens))
        with refused:
            graph.capture_end()
    torch.cuda.synchronize()
    twins.backward(tokens, targets)


def test_a_captured_forward_without_its_backward_is_refused() -> None:
    run_ranks(capture_a_forward, RANKS, backend="nccl")


def inputs_from_the_host() -> None:
    twins = Twins.of("layers", device="cuda")
    tokens, targets = next(twins.batches(1))
    scores = twins.model(twins.mine(tokens).cpu())
    torch.testing.assert_close(scores, twins.twin(twins.mine(tokens)))
    loss_of(scores, twins.mine(targets)).backward()


def test_inputs_of_the_root_are_moved_to_its_device() -> None:
    run_ranks(inputs_from_the_host, RANKS, backend="nccl")


def train_replicas_on_hostile_streams(
    shard_optimizer_over_replicas: bool, late_compute: bool
) -> None:
    twins = Twins.of(
        "layers",
        device="cuda",
        optimizer=AdamW,
        mesh=(RANKS, 1),
        shard_optimizer_over_replicas=shard_optimizer_over_replicas,
    )
    twins.ctx.comm_stream_factory = lambda comm_stream, device: HostileCommStream(
        device, late_compute
    )
    twins.train(iterations=4)


@pytest.mark.two_ranks
@pytest.mark.skipif(RANKS < 2, reason="copies need two ranks")
@LATE
@pytest.mark.parametrize("shard_optimizer_over_replicas", [False, True])
def test_lanes_of_copies_wait_for_each_other(
    shard_optimizer_over_replicas: bool, late_compute: bool
) -> None:
    run_ranks(
        train_replicas_on_hostile_streams,
        RANKS,
        shard_optimizer_over_replicas,
        late_compute,
        backend="nccl",
    )


def travel_on_a_comm_stream(dtype: torch.dtype) -> None:
    """NCCL itself, which one rank's training does without: values, and who waits for whom."""
    rank, world = dist.get_rank(), dist.get_world_size()
    specs = [ParamSpec("weight", (4096, 8 * world), dtype)]
    [plan] = plan_units([specs], world, Flat())
    group, collectives = dist.group.WORLD, TensorCollectives(plan)
    assert group is not None
    own = plan.shard_numels[rank]
    full = torch.full((plan.numel,), torch.nan, dtype=dtype, device="cuda")
    shard = torch.full((own,), rank + 1, dtype=dtype, device="cuda")
    gradients = torch.arange(world, device="cuda").repeat_interleave(own).to(dtype) + rank
    comm_stream = DeviceCommStream(torch.device("cuda", torch.cuda.current_device()))
    collectives.all_gather(full, shard, group)  # which makes the communicator
    full.fill_(torch.nan)
    torch.cuda.synchronize()

    comm_stream.after_compute()
    with torch.cuda.stream(comm_stream.stream):
        torch.cuda._sleep(100 * CYCLES)
    means: list[torch.Tensor] = []
    gathered = comm_stream.enqueue(
        "all_gather", "weight", lambda: collectives.all_gather(full, shard, group)
    )
    reduced = comm_stream.enqueue(
        "reduce_scatter",
        "weight",
        lambda: collectives.reduce_scatter(gradients, group),
        means.append,
    )
    assert not gathered.done(), "the host waited for the GPU"
    gathered.wait()
    reduced.wait()
    expected = torch.arange(1, world + 1, device="cuda").repeat_interleave(own).to(dtype)
    torch.testing.assert_close(full, expected, rtol=0, atol=0)
    mean = torch.full((own,), rank + (world - 1) / 2, dtype=dtype, device="cuda")
    torch.testing.assert_close(means[0], mean, rtol=0, atol=0)


@pytest.mark.two_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_collectives_of_nccl_run_on_the_lane(dtype: torch.dtype) -> None:
    run_ranks(travel_on_a_comm_stream, RANKS, dtype, backend="nccl")


def run_ahead() -> None:
    twins = Twins.of("layers", device="cuda", optimizer=AdamW)
    tokens, targets = next(twins.batches(1))
    mine = twins.mine(tokens), twins.mine(targets)

    def step() -> None:
        loss_of(twins.model(mine[0]), mine[1]).backward()
        twins.optimizer.step()
        twins.optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(500 * CYCLES)
    step()
    assert not torch.cuda.current_stream().query(), "the host waited for the GPU"
    torch.cuda.synchronize()


def test_the_host_never_waits_for_the_gpu() -> None:
    run_ranks(run_ahead, RANKS, backend="nccl")


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "AdamW, amsgrad": (AdamW, {"amsgrad": True}),
    "torch's AdamW, a loop": (torch.optim.AdamW, {"foreach": False}),
    "torch's AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "Muon": (Muon, {"ns_dtype": torch.float64}),
    "Muon, whole matrices": (Muon, {"ns_dtype": torch.float64, "layout": TensorAtomic()}),
}


def optimize(name: str, device: str = "cuda") -> None:
    optimizer, options = OPTIMIZERS[name]
    Twins.of("layers", device=device, optimizer=optimizer, **options).train(iterations=4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_on_gpus_as_unsharded(name: str) -> None:
    run_ranks(optimize, RANKS, name, backend="nccl")


def clip(device: str = "cuda") -> None:
    for own in (True, False):
        twins = Twins.of("layers", device=device)
        for batch in twins.batches(3):
            twins.backward(*batch)
            clip_ours = clip_grad_norm_ if own else nn.utils.clip_grad_norm_
            total = clip_ours(twins.model.parameters(), 0.1)
            expected = nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
            torch.testing.assert_close(total, expected)
            twins.check_gradients()
            twins.step()
            twins.check_parameters()


def test_gradients_are_clipped_on_gpus() -> None:
    run_ranks(clip, RANKS, backend="nccl")


def train_at_stage(stage: int, starts: bool, device: str = "cuda") -> None:
    twins = Twins.of("layers", device=device)
    twins.model.set_zero_stage(stage)
    batches = twins.batches(6)
    for _ in range(3):
        for is_last in (False, True):
            twins.model.set_is_last_backward(is_last)
            twins.backward(*next(batches))
        twins.check_gradients()
        twins.step()
        if starts:
            twins.ctx.start_param_sync()
        twins.check_parameters()


@pytest.mark.two_ranks
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_stages_on_gpus(stage: int, starts: bool) -> None:
    run_ranks(train_at_stage, RANKS, stage, starts, backend="nccl")


def save_and_load(folder: str, device: str = "cuda") -> None:
    twins = Twins.of("layers", device=device, optimizer=AdamW)
    twins.train(iterations=2)
    model, optimizer = twins.model, twins.optimizer
    names = "model", "optimizer"
    saved = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, storage_writer=SafeFileSystemWriter(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    states = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    dcp.load(states, storage_reader=SafeFileSystemReader(folder))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    twins.check_parameters()
    twins.train(iterations=2)


@pytest.mark.two_ranks
def test_checkpoints_are_saved_from_gpus_and_loaded_to_them(tmp_path: Path) -> None:
    run_ranks(save_and_load, RANKS, str(tmp_path), backend="nccl")


def start_on_meta(device: str = "cuda") -> None:
    twins = Twins.of("layers", device=device)
    with torch.device("meta"):
        model = Model()
    twins.ctx, twins.model = FsdpContext(), model.double()
    shard_layers(twins.model, twins.ctx)
    twins.model.to_empty(device=device).load_state_dict(twins.twin.state_dict())
    twins.optimizer = torch.optim.AdamW(twins.model.parameters(), lr=0.05)
    twins.train(iterations=3)


def test_a_model_that_started_on_meta_trains_on_gpus() -> None:
    run_ranks(start_on_meta, RANKS, backend="nccl")


def compute_in_bfloat16(device: str = "cuda") -> None:
    """All ranks with one batch, so that the mean is what one of them computes."""
    torch.manual_seed(7)
    model = Model().to(device)
    twin = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shard_layers(model, FsdpContext(), mp_policy=policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, twin)]
    tokens, targets = torch.randint(VOCABULARY, (2, 3, 5)).to(device)
    for _ in range(3):
        low = copy.deepcopy(twin).bfloat16()
        losses = [loss_of(each(tokens).float(), targets) for each in (model, low)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)
        for loss in losses:
            loss.backward()
        for parameter, same in zip(low.parameters(), twin.parameters(), strict=True):
            same.grad = parameter.grad.float()
        for (name, parameter), same in zip(
            model.named_parameters(), twin.parameters(), strict=True
        ):
            assert parameter.grad.dtype is torch.float32, name
            # bfloat16 keeps 8 bits.
            torch.testing.assert_close(
                parameter.grad.full_tensor(), same.grad, rtol=0.05, atol=1e-3, msg=name
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_bfloat16_compute_on_gpus() -> None:
    run_ranks(compute_in_bfloat16, RANKS, backend="nccl")


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("refused")


def recover(device: str = "cuda") -> None:
    twins = Twins.of("layers", device=device)
    tokens, targets = next(twins.batches(1))
    hook = twins.model.layers[0].register_forward_hook(lambda *given: Refuses.apply(given[2]))
    with pytest.raises(RuntimeError, match="refused"):
        loss_of(twins.model(twins.mine(tokens)), twins.mine(targets)).backward()
    hook.remove()
    twins.ctx.reset()
    twins.check_rest()
    twins.model.zero_grad()
    twins.train(iterations=2)


def test_a_backward_that_raised_on_a_gpu_leaves_nothing_behind() -> None:
    run_ranks(recover, RANKS, backend="nccl")


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
        comm_streams = {
            kind: {
                comm_stream for c in rank.collectives if c.kind == kind for comm_stream in c.lanes
            }
            for kind in ("all_gather", "reduce_scatter")
        }
        assert comm_streams["all_gather"].isdisjoint(comm_streams["reduce_scatter"])
