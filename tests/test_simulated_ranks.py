"""The process group whose other ranks are made up, and the suite for one GPU that stands on it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import expect_rank_errors, run_ranks
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from traces import event, read
from twins import loss_of
from zoo import ROWS, VOCABULARY, ZOO, Model, shard_layers

from fsdp_overlap import FsdpContext, Whole

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import _gpu_bench  # noqa: E402
import simulated_ranks  # noqa: E402

WORLD = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def simulate(claim: Callable[..., Any], device: str, *args: Any) -> Any:
    """Runs `claim(device, link, *args)` on rank 0 of `WORLD` simulated ranks, in a process of its
    own."""
    return run_ranks(_simulated, 1, claim, device, args)[0]


def _simulated(claim: Callable[..., Any], device: str, args: tuple[Any, ...]) -> Any:
    dist.destroy_process_group()  # the one real rank's
    return claim(device, simulated_ranks.start(device, WORLD), *args)


def values(device: str, link: simulated_ranks.Link) -> None:
    shard = torch.arange(5.0, device=device)
    whole = torch.zeros(WORLD * 5, device=device)
    dist.all_gather_into_tensor(whole, shard)
    assert whole.tolist() == shard.tolist() * WORLD

    whole = torch.arange(WORLD * 5.0, device=device)
    dist.all_gather_into_tensor(whole, whole[:5])  # in place
    assert whole.tolist() == shard.tolist() * WORLD

    whole, own = torch.arange(WORLD * 5.0, device=device), torch.zeros(5, device=device)
    dist.reduce_scatter_tensor(own, whole, dist.ReduceOp.AVG)
    assert own.tolist() == whole[:5].tolist()
    dist.reduce_scatter_tensor(own, whole, dist.ReduceOp.SUM)
    assert own.tolist() == (whole[:5] * WORLD).tolist()

    dist.all_reduce(own, dist.ReduceOp.MAX)
    assert own.tolist() == (whole[:5] * WORLD).tolist()
    dist.all_reduce(own)
    assert own.tolist() == (whole[:5] * WORLD**2).tolist()

    odd = torch.arange(3, dtype=torch.uint8, device=device)  # not a multiple of a word
    many = torch.zeros(WORLD * 3, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(many, odd)
    assert many.tolist() == odd.tolist() * WORLD


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_give_what_equal_ranks_would(device: str) -> None:
    simulate(values, device)


def duration(device: str, link: simulated_ranks.Link) -> list[float]:
    """Seconds of an all-gather and a reduce-scatter that should take 0.2 each."""
    shard = torch.ones(1 << 16, device=device)
    whole = torch.ones(WORLD << 16, device=device)
    seconds = []
    for collective in (
        lambda: dist.all_gather_into_tensor(whole, shard),
        lambda: dist.reduce_scatter_tensor(shard, whole, dist.ReduceOp.AVG),
    ):
        link.gigabytes_per_s = None
        collective()
        _synchronize(device)
        link.gigabytes_per_s = (whole.nbytes - shard.nbytes) / 0.2 / 1e9
        start = time.perf_counter()
        collective()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_take_the_time_that_the_link_needs(device: str) -> None:
    for seconds in simulate(duration, device):
        assert 0.199 <= seconds < 1.0


def two_groups_on_streams(device: str, link: simulated_ranks.Link) -> tuple[float, float]:
    """Seconds until the host is free again, and until both groups' all-gathers are done, which
    should take 0.1 each."""
    second = dist.new_group(list(range(WORLD)), use_local_synchronization=True)
    shard = torch.ones(1 << 16, device=device)
    wholes = [torch.ones(WORLD << 16, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for rate in (None, (wholes[0].nbytes - shard.nbytes) / 0.1 / 1e9):
        link.gigabytes_per_s = rate
        torch.cuda.synchronize()
        start = time.perf_counter()
        for group, whole, stream in zip((None, second), wholes, streams, strict=True):
            with torch.cuda.stream(stream):
                dist.all_gather_into_tensor(whole, shard, group)
        free = time.perf_counter() - start
        torch.cuda.synchronize()
        done = time.perf_counter() - start
    return free, done


@pytest.mark.gpu
def test_groups_share_the_link_and_the_host_does_not_wait() -> None:
    free, done = simulate(two_groups_on_streams, "cuda")
    assert free < 0.05
    assert 0.199 <= done < 0.5


def groups_and_meshes(device: str, link: simulated_ranks.Link) -> None:
    mesh = init_device_mesh(device, (WORLD,))
    assert (mesh.size(), mesh.get_local_rank()) == (WORLD, 0)
    group = dist.new_group(list(range(WORLD)), use_local_synchronization=True)
    assert (group.size(), group.rank()) == (WORLD, 0)
    assert group is not mesh.get_group()
    assert group._get_backend(torch.device(device)).name() == simulated_ranks.BACKEND


@pytest.mark.parametrize("device", DEVICES)
def test_groups_and_meshes_are_made_as_with_any_backend(device: str) -> None:
    simulate(groups_and_meshes, device)


def train_ragged(device: str, link: simulated_ranks.Link) -> None:
    model = Model()
    ctx = FsdpContext(init_device_mesh(device, (WORLD,)), layout=Whole())
    shard_layers(model, ctx)
    model(torch.zeros(ROWS, 5, dtype=torch.long))


def _simulated_on_a_cpu(claim: Callable[..., Any]) -> None:
    _simulated(claim, "cpu", ())


def test_ragged_layouts_are_refused_by_name() -> None:
    expect_rank_errors(_simulated_on_a_cpu, 1, train_ragged, match=r"use Flat\(\) layouts")


def shard_ours(model: Any, mesh: DeviceMesh) -> None:
    shard_layers(model, FsdpContext(mesh))


def shard_fsdp2(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fsdp2.fully_shard(layer, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(VOCABULARY, (2, ROWS, 5), generator=generator)
    return tokens.to(device), targets.to(device)


def compare(
    model: nn.Module, twin: nn.Module, device: str, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Losses and gradients of two backwards of a sharded model against its unsharded twin's, which
    is given the `weights`; by default those of the shards."""
    if weights is None:
        weights = _gpu_bench.true_weights(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(weights[name])
    for _ in range(2):
        tokens, targets = batch(device)
        losses = [loss_of(each(tokens), targets) for each in (model, twin)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss in losses:
            loss.backward()
    for (name, parameter), same in zip(model.named_parameters(), twin.parameters(), strict=True):
        if same.grad is None:
            # On a GPU, whether another rank has one would be known too late.
            assert parameter.grad is None or not parameter.grad.to_local().any(), name
            continue
        torch.testing.assert_close(
            parameter.grad.to_local().flatten(),
            _gpu_bench.own_range(parameter, same.grad),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def train(device: str, link: simulated_ranks.Link, shard: Callable[..., None]) -> None:
    model = Model(width=8).double().to(device)
    twin = copy.deepcopy(model)
    shard(model, init_device_mesh(device, (WORLD,)))
    compare(model, twin, device)
    assert {transfer.kind for transfer in link.sent} == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shard", [shard_ours, shard_fsdp2])
def test_both_systems_train_as_the_unsharded_model(device: str, shard: Callable[..., None]) -> None:
    simulate(train, device, shard)


def train_from_zoo(device: str, link: simulated_ranks.Link, name: str) -> None:
    build, shard = ZOO[name]
    model = build().double().to(device)
    twin = copy.deepcopy(model)
    shard(model, FsdpContext(init_device_mesh(device, (WORLD,))))
    compare(model, twin, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ZOO)
def test_every_model_trains_as_the_unsharded_one(name: str, device: str) -> None:
    simulate(train_from_zoo, device, name)


def run_ahead(device: str, link: simulated_ranks.Link) -> None:
    model = Model().to(device)
    shard_ours(model, init_device_mesh(device, (WORLD,)))
    tokens, targets = batch(device)

    def step() -> None:
        loss_of(model(tokens), targets).backward()
        model.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles: more than half a second
    step()
    assert not torch.cuda.current_stream().query(), "the host waited for the GPU"


@pytest.mark.gpu
def test_the_host_never_waits_for_the_gpu_nor_for_the_order_check() -> None:
    simulate(run_ahead, "cuda")


def test_reports_take_a_kernel_of_the_simulation_for_a_collective() -> None:
    def launched(name: str, at: float, correlation: int, lane: int) -> list[dict[str, Any]]:
        args = {"correlation": correlation}
        return [
            event("cuLaunchKernel", at, at + 1, cat="cuda_driver", args=args),
            event(name, at + 2, at + 100, lane, cat="kernel", args={**args, "stream": lane}),
        ]

    report = read(
        event("fsdp_overlap::all_gather(layers.0) 4096 B", 0, 10),
        *launched("ncclSimulatedAllGather", 2, correlation=1, lane=20),
        event("aten::mm", 20, 30),
        *launched("gemm", 22, correlation=2, lane=7),
    )
    (gather,) = report.collectives
    assert (gather.kind, gather.name, gather.nbytes) == ("all_gather", "layers.0", 4096)
    assert gather.duration == 98
    assert gather.exposed == 20  # before the GEMM


@pytest.mark.slow
def test_the_suite_runs_at_a_tiny_scale_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPTS / "gpu_suite.py", "--device", "cpu", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["is_of_a_cpu"]
    assert {name: part["status"] for name, part in results["parts"].items()} == dict.fromkeys(
        ("tests", "sanitizer", "parity", "memory", "overlap", "speed"), "passed"
    )
    assert "figures of a CPU" in (tmp_path / "summary.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_suite_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPTS / "gpu_suite.py", "--out", tmp_path / "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "none").exists()
