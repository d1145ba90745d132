"""The process group whose other ranks are made up, and the suite for one GPU that stands on it."""

from __future__ import annotations

import copy
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_overlap import BlockAtomic, FsdpContext, TensorAtomic
from fsdp_overlap.optim import Muon
from harness import simulated_link, simulated_ranks
from harness.simulated_link import Transfer
from support.pages import ROOT
from support.ranks import run_ranks
from support.simulated import WORLD, batch, compare, simulate
from support.traces import event, read
from support.twins import loss_of
from support.zoo import ZOO, Model, shard_layers

SUITE = ROOT / "scripts" / "bench" / "gpu_suite.py"

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def values(device: str, link: simulated_ranks.Link) -> None:
    shard = torch.arange(5.0, device=device)
    whole = torch.zeros(WORLD * 5, device=device)
    dist.all_gather_into_tensor(whole, shard)
    assert whole.tolist() == shard.tolist() * WORLD

    found = functional.all_gather_tensor(shard, 0, dist.group.WORLD)  # as DTensors do
    assert found.tolist() == shard.tolist() * WORLD
    found = functional.reduce_scatter_tensor(found, "sum", 0, dist.group.WORLD)
    assert found.tolist() == (shard * WORLD).tolist()

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

    large = torch.arange(1000.0, device=device)
    work = dist.all_reduce(large, async_op=True)
    assert work is not None
    work.wait()
    assert large.tolist() == [WORLD * float(n) for n in range(1000)]
    assert link.sent[-1] == Transfer("all_reduce", 2 * large.nbytes * (WORLD - 1) // WORLD)

    odd = torch.arange(3, dtype=torch.uint8, device=device)  # not a multiple of a word
    many = torch.zeros(WORLD * 3, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(many, odd)
    assert many.tolist() == odd.tolist() * WORLD


def values_of_lists(device: str, link: simulated_ranks.Link) -> None:
    own = torch.tensor([1.0, 2.0, 3.0], device=device)
    ranges = [torch.zeros(size, device=device) for size in (3, 7, 0, 2)]
    dist.all_gather(ranges, own)
    expected = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0], [], [1.0, 2.0]]
    assert [held.tolist() for held in ranges] == expected
    dist.all_gather(ranges, ranges[0])  # in place
    assert [held.tolist() for held in ranges] == expected
    dist.reduce_scatter(own, ranges, dist.ReduceOp.AVG)
    assert own.tolist() == expected[0]
    dist.reduce_scatter(own, ranges)
    assert own.tolist() == [WORLD * value for value in expected[0]]
    assert [held.tolist() for held in ranges] == expected
    ranges[0] = torch.zeros(0, device=device)
    dist.all_gather(ranges, own[:0])  # of a rank that holds nothing
    assert not any(held.any() for held in ranges)

    sent = torch.arange(6.0, device=device)
    received = torch.zeros(9, device=device)
    dist.all_to_all_single(received, sent, [2, 4, 0, 3], [2, 1, 3, 0])
    assert received.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    dist.all_to_all_single(received[:8], torch.arange(8.0, device=device))
    assert received[:8].tolist() == [0.0, 1.0] * WORLD
    for root in range(2):
        dist.broadcast(sent, root)
    assert sent.tolist() == list(range(6))
    if device == "cpu":  # which objects travel on
        found: list[Any] = [None] * WORLD
        dist.all_gather_object(found, "here")
        assert found == ["here"] * WORLD
    with pytest.raises(ValueError, match=r"has 0 elements .* and 3 of"):
        dist.all_gather(ranges, own)


@pytest.mark.parametrize("device", DEVICES)
def test_lists_and_splits_give_what_ranks_that_hold_the_same_would(device: str) -> None:
    simulate(values_of_lists, device)


class GpusLinkOnACpu(simulated_ranks.CudaLink):
    """Its kernels are read from their arguments alone."""

    def __init__(self) -> None:
        self.gigabytes_per_s = 1.0
        self.sent = []
        self.carried: list[int] = []
        self._free_at = torch.zeros(1)
        self.waiting_blocks, self._launches = 4, 0
        self._over = torch.zeros(2 * simulated_link.RUNNING, dtype=torch.int32)
        self._tables = {}
        self._kernels = {
            (name, size): partial(self._run, name, size)
            for name in ("ncclSimulatedAllGather", "ncclSimulatedReduceScatter")
            for size in (1, 2, 4, 8)
        }

    def _run(self, name: str, size: int, grid: Any, block: Any, args: list[Any]) -> None:
        whole, own, _, over, table, count, held, period, nanoseconds, launch, waiting = args
        assert (over.data_ptr() - self._over.data_ptr()) // 8 == launch % simulated_link.RUNNING
        assert waiting == self.waiting_blocks
        self.carried.append(nanoseconds)
        places = [(whole.data_ptr() + start * size, words) for start, words in table.tolist()]
        assert len(places) == count
        longest = max(words for _, words in places)
        if name == "ncclSimulatedReduceScatter":
            assert period == longest
            assert places[0][1] == held
            ctypes.memmove(own.data_ptr(), places[0][0], held * size)
            return
        if held:
            assert period % held == 0
            assert period >= simulated_link.BLOCKS * simulated_link.THREADS
        else:
            assert period == longest
        of_rank = ctypes.string_at(own.data_ptr(), held * size) if held else b"\0"
        for start, words in places:
            repeated = of_rank * -(-words * size // len(of_rank))
            ctypes.memmove(start, repeated, words * size)


def launches() -> None:
    dist.destroy_process_group()
    link = simulated_ranks._link = GpusLinkOnACpu()
    store = dist.HashStore()
    dist.init_process_group(simulated_ranks.BACKEND, store=store, rank=0, world_size=WORLD)
    values("cpu", link)
    values_of_lists("cpu", link)
    # One launch of each, also of ranges of different sizes. 1e9 bytes a second: a nanosecond for
    # each.
    assert link.carried == [transfer.nbytes for transfer in link.sent]


def test_ranges_that_begin_anywhere_are_copied_in_the_widest_words() -> None:
    link = GpusLinkOnACpu()
    sizes = []
    link._kernels = {
        key: partial(lambda size, **_: sizes.append(size), key[1]) for key in link._kernels
    }
    for dtype, start, numels in (
        (torch.float32, 0, (4, 6)),
        (torch.float32, 0, (4, 5)),
        (torch.float32, 1, (4, 6)),
        (torch.bfloat16, 0, (4, 3)),
        (torch.uint8, 0, (8, 1)),
    ):
        flat = torch.zeros(32, dtype=dtype)[start : start + sum(numels)]
        link.fill("all_gather", flat.split(numels), flat[: numels[0]])
    assert sizes == [8, 4, 4, 2, 1]
    link.gigabytes_per_s = 1e-10
    with pytest.raises(ValueError, match="too long to simulate"):
        link.fill("all_gather", flat.split(numels), flat[: numels[0]])


def test_the_kernels_for_a_gpu_are_launched_for_the_same_values_and_bytes() -> None:
    run_ranks(launches, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_give_what_equal_ranks_would(device: str) -> None:
    simulate(values, device)


def duration(device: str, link: simulated_ranks.Link) -> list[float]:
    """Seconds of collectives that should take 0.1 each."""
    link.waiting_blocks = simulated_link.BLOCKS
    shard = torch.ones(1 << 16, device=device)
    whole = torch.ones(WORLD << 16, device=device)
    sizes = [1 << 16, 3 << 15, 0, 3 << 15]  # the others receive as much as in equal ranges
    ranges = list(whole.split(sizes))
    seconds = []
    for collective in (
        lambda: dist.all_gather_into_tensor(whole, shard),
        lambda: dist.reduce_scatter_tensor(shard, whole, dist.ReduceOp.AVG),
        lambda: dist.all_gather(ranges, shard),
        lambda: dist.reduce_scatter(shard, ranges, dist.ReduceOp.AVG),
        lambda: dist.all_to_all_single(whole, whole.clone(), sizes, sizes),
        lambda: dist.broadcast(whole[: 3 << 16], 1),
        lambda: dist.all_reduce(whole[: 1 << 17]),
    ):
        link.gigabytes_per_s = None
        collective()
        _synchronize(device)
        link.gigabytes_per_s = link.sent[-1].nbytes / 0.1 / 1e9
        assert link.sent[-1].nbytes == whole.nbytes - shard.nbytes
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
        assert 0.099 <= seconds < 0.9


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
    dist.destroy_process_group(group)


@pytest.mark.parametrize("device", DEVICES)
def test_groups_and_meshes_are_made_as_with_any_backend(device: str) -> None:
    simulate(groups_and_meshes, device)


def shard_ours(model: Any, mesh: DeviceMesh) -> None:
    shard_layers(model, FsdpContext(mesh))


def shard_ragged(model: Any, mesh: DeviceMesh) -> None:
    ctx = FsdpContext(mesh, layout=TensorAtomic())
    shard_layers(model, ctx)
    assert any(
        not param_group.plan.is_equal for unit in ctx.units for param_group in unit.param_groups
    )


def shard_fsdp2(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fsdp2.fully_shard(layer, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)


def train(device: str, link: simulated_ranks.Link, shard: Callable[..., None]) -> None:
    model = Model(width=8).double().to(device)
    twin = copy.deepcopy(model)
    shard(model, init_device_mesh(device, (WORLD,)))
    compare(model, twin, device)
    assert {transfer.kind for transfer in link.sent} == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shard", [shard_ours, shard_ragged, shard_fsdp2])
def test_both_systems_train_as_the_unsharded_model(device: str, shard: Callable[..., None]) -> None:
    simulate(train, device, shard)


def step_with_muon(device: str, link: simulated_ranks.Link) -> None:
    model = Model(width=8).to(device)
    shard_layers(model, FsdpContext(init_device_mesh(device, (WORLD,)), layout=BlockAtomic(rows=3)))
    tokens, targets = batch(device)
    loss_of(model(tokens), targets).backward()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    link.sent.clear()
    Muon(model).step()
    sent = [transfer for transfer in link.sent if transfer.kind == "all_to_all"]
    assert len(sent) >= 2  # there and back
    assert all(transfer.nbytes for transfer in sent)
    for old, parameter in zip(before, model.parameters(), strict=True):
        new = parameter.to_local()
        assert new.isfinite().all()
        assert not old.numel() or not torch.equal(old, new)


@pytest.mark.parametrize("device", DEVICES)
def test_muon_exchanges_matrices(device: str) -> None:
    simulate(step_with_muon, device)


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
    parts = "speed memory overlap training".split()  # of its part of tests, see test_gpu_parts
    command = [sys.executable, SUITE, "--device", "cpu", "--out", tmp_path, "--parts", *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["is_of_a_cpu"]
    assert {name: part["status"] for name, part in results["parts"].items()} == dict.fromkeys(
        parts, "passed"
    )
    summary = (tmp_path / "summary.md").read_text()
    assert "figures of a CPU" in summary
    assert "raised" not in summary  # a system that a table is without


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_suite_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    command = [sys.executable, SUITE, "--out", tmp_path / "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "none").exists()
