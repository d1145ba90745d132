"""Predictions of steps on CPUs: profiles, a shared link, and what one can calculate by hand."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.tools.emulator import Operation, OperatorCall
from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Profile, Step, simulate_on_cpu
from fsdp_overlap.tools.simulator.on_cpu import SharedLink, Transfer
from fsdp_overlap.tools.simulator.profile import MeasuredOperation
from fsdp_overlap.tools.simulator.tables import Curve, HardwareError

mm = torch.ops.aten.mm.default


def shapes_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, 64, device="meta"), torch.empty(64, 32, device="meta")


# The link


def ends(link: SharedLink, *sent: tuple[float, str, Transfer]) -> list[float]:
    """When transfers end that are issued at these times, by these groups."""
    for now, group, transfer in sent:
        link.add(group, transfer, now)
    return [link.end_of(transfer) for *_, transfer in sent]


def test_transfers_share_a_link() -> None:
    found = ends(
        SharedLink(bandwidth=10.0),
        (0.0, "gathers", Transfer(0.0, 100.0)),
        (5.0, "reductions", Transfer(0.0, 25.0)),  # half of the link each, until it is through
    )
    assert found == pytest.approx([12.5, 10.0])


def test_a_group_has_two_transfers_under_way() -> None:
    found = ends(SharedLink(bandwidth=10.0), *((0.0, "one", Transfer(0.0, 50.0)) for _ in range(3)))
    assert found == pytest.approx([10.0, 10.0, 15.0])


def test_latency_passes_beside_others() -> None:
    found = ends(
        SharedLink(bandwidth=10.0),
        (0.0, "one", Transfer(1.0, 10.0)),
        (0.0, "one", Transfer(3.0, 10.0)),
    )
    assert found == pytest.approx([2.0, 4.0])


def test_a_link_rests_until_something_is_sent() -> None:
    link = SharedLink(bandwidth=10.0)
    assert ends(link, (0.0, "one", Transfer(0.0, 10.0))) == pytest.approx([1.0])
    assert ends(link, (7.0, "one", Transfer(0.0, 10.0))) == pytest.approx([8.0])


@pytest.mark.parametrize(("kind", "passes"), [("gather", 1), ("reduce_scatter", 2)])
def test_collectives_of_torch_send_what_gloo_sends(kind: str, passes: int) -> None:
    full, own = torch.ones(8), torch.ones(2)

    def build() -> Step:
        def step() -> None:
            if kind == "gather":
                dist.all_gather_into_tensor(full, own)
            else:
                dist.reduce_scatter_tensor(own, full)

        return step

    fabric = Fabric.read("loopback_2g")
    half = replace(fabric.within, bandwidth=1.0, latency=0.0, efficiency=Curve(((4, 0.5),)))
    fabric = replace(fabric, within=half)
    found = simulate_on_cpu(build, 4, Profile({}, 0.0), fabric, cores=4)
    assert found.seconds == pytest.approx(passes * 3 * full.nbytes / 0.5)


@pytest.mark.parametrize(("fabric", "ranks"), [("nvlink4_400g", 2), ("loopback_2g", 65)])
def test_fabrics_of_other_machines_are_refused(fabric: str, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"ranks_a_node = {ranks} or more"):
        simulate_on_cpu(lambda: None, ranks, Profile({}, 0.0), Fabric.read(fabric), 2)  # type: ignore[arg-type, return-value]


# Profiles


def test_a_profile_says_what_its_trace_says(tmp_path: Path) -> None:
    left, right = torch.ones(48, 64), torch.ones(64, 32)
    with torch.profiler.profile(record_shapes=True) as profiler:
        for _ in range(3):
            left @ right
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    took = sorted(
        1e-6 * event["dur"]
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("name") == "aten::mm"
    )
    read = Profile.read(path)
    assert read.seconds_of(mm, shapes_of(48), {}) == pytest.approx(took[1])
    assert read.host_seconds > 0


def test_other_shapes_take_as_much_more_as_there_is_to_do() -> None:
    known = [
        MeasuredOperation(((8, 64), (64, 32)), (torch.float32, torch.float32), 1.0),
        MeasuredOperation(((64, 64), (64, 32)), (torch.float32, torch.float32), 4.0),
    ]
    profile = Profile({"aten::mm": known}, 0.0)
    assert profile.seconds_of(mm, shapes_of(64), {}) == 4.0
    assert profile.seconds_of(mm, shapes_of(128), {}) == pytest.approx(8.0)
    assert profile.seconds_of(mm, shapes_of(4), {}) == pytest.approx(0.5)
    assert profile.seconds_of(torch.ops.aten.add.Tensor, shapes_of(4), {}) is None


def span(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    found = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}
    return found | {"pid": 0, "tid": 0, "args": args}


def test_operations_of_a_gpu_take_what_their_kernels_take(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[8, 64], [64, 32]], "Input type": ["float", "float"]}
    events = [
        span("cpu_op", "aten::mm", 0.0, 10.0, **shapes, **{"External id": 1}),
        span("kernel", "gemm", 20.0, 300.0, **{"External id": 1}),
        span("kernel", "reduction", 320.0, 50.0, **{"External id": 1}),
        span("cpu_op", "aten::mm", 14.0, 6.0, **shapes, **{"External id": 2}),
        span("kernel", "gemm", 400.0, 350.0, **{"External id": 2}),
        span("kernel", "unfinished", 750.0, 2**64 / 1000, **{"External id": 2}),
        span("cpu_op", "aten::unfinished", 20.0, -1.0),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    read = Profile.read(path)
    assert read.seconds_of(mm, shapes_of(8), {}) == pytest.approx(350e-6)
    assert read.host_seconds == pytest.approx(4e-6)


def test_kernels_of_what_an_operation_calls_are_its_own(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[8, 64]], "Input type": ["float"]}
    events = [
        span("cpu_op", "aten::_to_copy", 0.0, 10.0, **shapes, **{"External id": 1}),
        span("cpu_op", "aten::empty_strided", 1.0, 2.0, **shapes, **{"External id": 2}),
        span("cpu_op", "aten::copy_", 4.0, 6.0, **shapes, **{"External id": 3}),
        span("kernel", "copy", 20.0, 300.0, **{"External id": 3}),
        span("cpu_op", "aten::neg", 10.0, 5.0, **shapes, **{"External id": 4}),
        span("kernel", "neg", 320.0, 50.0, **{"External id": 4}),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    taken = {name: calls[0].seconds for name, calls in Profile.read(path).calls.items()}
    expected = {"aten::_to_copy": 3e-4, "aten::empty_strided": 0, "aten::copy_": 3e-4}
    assert taken == pytest.approx(expected | {"aten::neg": 5e-5})


def test_a_profile_tells_dtypes_apart() -> None:
    shapes = ((8, 64), (64, 32))
    known = [
        MeasuredOperation(shapes, (torch.float32,) * 2, 2.0),
        MeasuredOperation(shapes, (torch.bfloat16,) * 2, 1.0),
    ]
    profile = Profile({"aten::mm": known}, 0.0)
    exact = shapes_of(8)
    assert profile.seconds_of(mm, exact, {}) == 2.0
    assert profile.seconds_of(mm, [each.bfloat16() for each in exact], {}) == 1.0
    assert profile.seconds_of(mm, [each.half() for each in exact], {}) == 2.0  # the slower


def test_a_profile_comes_before_the_numbers_of_a_device() -> None:
    left, right = shapes_of(8)
    calls = {
        name: Operation(
            name, (left, right), (), OperatorCall(func, (left, right), {}, torch.empty(8, 32))
        )
        for name, func in (("mm", mm), ("mul", torch.ops.aten.mul.Tensor))
    }
    shapes = tuple(left.shape), tuple(right.shape)
    profile = Profile({"aten::mm": [MeasuredOperation(shapes, (torch.float32,) * 2, 7.0)]}, 0.0)
    device, fabric = Device.read("h100_sxm"), Fabric.read("nvlink4_400g")
    costs, without = Costs(device, fabric, profile=profile), Costs(device, fabric)
    assert costs.compute(calls["mm"]) == 7.0
    assert costs.compute(calls["mul"]) == without.compute(calls["mul"]) < 1e-4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read as a trace"),
        ("[]", "cannot be read as a trace"),
        ('{"traceEvents": []}', "record_shapes=True"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(HardwareError, match=why):
        Profile.read(path)


# Steps

UNITS, WIDTH, SECONDS = 4, 32, 0.5
UNIT_BYTES = 4 * WIDTH * WIDTH


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * SECONDS)
        return gradient


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(super().forward(x))


def program(ranks: int, prefetch: int, device: str = "cpu", copies: int = 1) -> Step:
    model = nn.Sequential(*(Slow(WIDTH, WIDTH, bias=False) for _ in range(UNITS))).to(device)
    if copies == 1:
        mesh = init_device_mesh(device, (ranks,))
    else:
        sizes = (copies, ranks // copies)
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))
    ctx = FsdpContext(mesh, prefetch=prefetch)
    for layer in model:
        fully_shard(layer, ctx)
    fully_shard(model, ctx)
    batch = torch.ones(2, WIDTH, device=device)

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad()

    return step


def predicted(
    bandwidth: float, ranks: int = 2, prefetch: int = 1, cores: int = 8, **options: Any
) -> float:
    """Seconds of a step in which operations take none."""
    fabric = Fabric.read("loopback_2g")
    fabric = replace(fabric, within=replace(fabric.within, bandwidth=bandwidth, latency=0.0))
    nothing = Profile(options.pop("calls", {}), 0.0)
    with patch.object(time, "sleep", side_effect=AssertionError("slept")):
        found = simulate_on_cpu(
            lambda: program(ranks, prefetch, **options), ranks, nothing, fabric, cores
        )
    return found.seconds


COMPUTE = 3 * UNITS * SECONDS


def test_without_communication_a_step_takes_what_compute_takes() -> None:
    assert predicted(bandwidth=1e15) == pytest.approx(COMPUTE, rel=1e-6)


def test_nothing_ahead_adds_up_gathers_and_compute() -> None:
    one = 0.1  # seconds of a unit on the link, between two ranks
    # Each unit is gathered for forward and for backward, and the last reduction has no compute
    # that could hide it.
    expected = COMPUTE + 2 * UNITS * one + one
    found = predicted(bandwidth=UNIT_BYTES / one, prefetch=0)
    # Where a gather meets the reduction of the unit before, it has half of the link.
    assert expected <= found <= expected + UNITS * one


def test_ahead_all_but_the_edges_is_hidden() -> None:
    one = 0.1
    assert predicted(bandwidth=UNIT_BYTES / one) == pytest.approx(COMPUTE + 2 * one, rel=1e-3)


@pytest.mark.parametrize(("ranks", "copies", "sent"), [(2, 1, 1), (4, 1, 3), (4, 2, 2)])
def test_a_slow_link_is_never_idle(ranks: int, copies: int, sent: int) -> None:
    """``sent``: how often all ranks together send the bytes of a unit when it is gathered, which is
    for each rank of a group but one, of all groups that hold copies."""
    one = 100.0
    # The last unit is kept from forward to backward.
    times = UNITS + (UNITS - 1) + UNITS
    expected = times * sent * one
    if copies == 2:
        # An all-reduce of half a unit, twice over the link, in each of two pairs of ranks.
        expected += UNITS * 2 * one
    found = predicted(bandwidth=UNIT_BYTES / one, ranks=ranks, copies=copies)
    assert expected <= found <= 1.02 * expected + 2 * COMPUTE


def test_more_ranks_than_cores_compute_longer() -> None:
    calls = {
        "aten::mm": [MeasuredOperation(((2, WIDTH), (WIDTH, WIDTH)), (torch.float32,) * 2, 1.0)]
    }
    alone, crowded = (
        predicted(bandwidth=1e15, ranks=4, cores=cores, calls=calls) - COMPUTE for cores in (4, 2)
    )
    assert alone > 0
    assert crowded == pytest.approx(2 * alone, rel=1e-6)


def test_a_program_on_the_emulated_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match='make its tensors and its mesh on "cpu"'):
        predicted(bandwidth=1.0, device="emulated")


def test_memory_is_what_a_step_takes_beyond_what_there_was() -> None:
    def build() -> Step:
        kept = torch.zeros(1000)
        return lambda: kept + 1

    found = simulate_on_cpu(build, 2, Profile({}, 0.0), Fabric.read("loopback_2g"), 2)
    assert found.memory == 4 * 1000


def test_memory_is_that_of_what_exists_at_once() -> None:
    nothing = Profile({}, 0.0)
    found = [
        simulate_on_cpu(
            lambda ahead=ahead: program(2, ahead), 2, nothing, Fabric.read("loopback_2g"), 2
        ).memory
        for ahead in (0, 1)
    ]
    # One more full buffer, while a gradient of less than that is there.
    assert UNIT_BYTES <= found[1] - found[0] < 2 * UNIT_BYTES
