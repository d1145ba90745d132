"""CUDA graphs of the emulated device: what they replay, and which rules of CUDA they hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fsdp_overlap.tools.emulator import (
    CUDAGraph,
    EmulatedDevice,
    Event,
    Stream,
    current_stream,
    graph,
    running,
    stream,
)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with running(EmulatedDevice()) as device:
        yield device


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="emulated")


def test_a_capture_runs_nothing_and_a_replay_all(device: EmulatedDevice) -> None:
    x, total = ones(4), ones(4)
    state = torch.get_rng_state()
    with graph(captured := CUDAGraph()):
        noise = torch.rand_like(x)
        total.add_(x)
        double = total * 2
    assert torch.equal(total, ones(4))
    assert double.isnan().all()
    assert torch.equal(torch.get_rng_state(), state)
    for count in range(1, 4):
        captured.replay()
        assert torch.equal(total, ones(4) + count)
        assert torch.equal(double, 2 * total)
    drawn = noise.clone()
    torch.set_rng_state(state)
    assert torch.equal(torch.stack([torch.rand(4) for _ in range(3)])[-1], drawn.cpu())
    assert not device.findings


def test_a_replay_reads_inputs_and_numbers_as_a_gpu_does(device: EmulatedDevice) -> None:
    x, number = ones(4), torch.tensor(2.0)
    with graph(captured := CUDAGraph()):
        y = x * number
    x.fill_(3)
    number.fill_(5)  # the host read it when the product was captured
    captured.replay()
    assert torch.equal(y, 6 * ones(4))


def test_memory_of_the_pool_is_its_graphs_alone(device: EmulatedDevice) -> None:
    x, buffer = ones(4), ones(4)
    storage = buffer.untyped_storage()
    storage.resize_(0)
    with graph(captured := CUDAGraph()):
        storage.resize_(16)
        torch.mul(x, 2, out=buffer)
        y = buffer + 1
        storage.resize_(0)
    storage.resize_(16)
    buffer.fill_(7)  # other memory than that of the replay
    captured.replay()
    assert torch.equal(y, 3 * ones(4))
    assert torch.equal(buffer, 7 * ones(4))
    assert not device.findings


def forked(*, joins: bool = True) -> torch.Tensor:
    side = Stream()
    side.wait_stream(current_stream())
    with stream(side):
        made = ones(4)
    if joins:
        current_stream().wait_stream(side)
    return made


def waits_for_event_from_before() -> Callable[[], Any]:
    event = Event()
    event.record()
    return lambda: current_stream().wait_event(event)


def reads_on_host() -> Callable[[], Any]:
    x = ones(1)
    return lambda: x.item()


def asks_event() -> Callable[[], Any]:
    return lambda: current_stream().record_event().query()


def asks_event_from_before() -> Callable[[], Any]:
    event = Event()
    event.record()
    return event.query


def synchronizes() -> Callable[[], Any]:
    return lambda: current_stream().synchronize()


def copies_to_host() -> Callable[[], Any]:
    x = ones(4)
    return lambda: x.to("cpu")


def waits_for_stream_outside() -> Callable[[], Any]:
    return lambda: current_stream().wait_stream(Stream())


def brings_in_the_default_stream() -> Callable[[], Any]:
    default = current_stream()
    return lambda: default.wait_stream(current_stream())


def runs_backward_into_a_node_of_the_default_stream() -> Callable[[], Any]:
    weight = ones(4).requires_grad_()
    accumulates = weight.view_as(weight)  # holds the node that was made here
    return lambda: (weight * accumulates.detach()).sum().backward()


RULES: dict[Callable[[], Callable[[], Any]], str] = {
    waits_for_event_from_before: "cudaErrorStreamCaptureIsolation",
    waits_for_stream_outside: "cudaErrorStreamCaptureIsolation",
    reads_on_host: "cudaErrorStreamCaptureUnsupported",
    copies_to_host: "cudaErrorStreamCaptureUnsupported",
    asks_event: "cudaErrorStreamCaptureUnsupported",
    asks_event_from_before: "cudaErrorStreamCaptureUnsupported",
    synchronizes: "cudaErrorStreamCaptureUnsupported",
    brings_in_the_default_stream: "cudaErrorStreamCaptureImplicit",
    runs_backward_into_a_node_of_the_default_stream: "cudaErrorStreamCaptureImplicit",
}


@pytest.mark.parametrize("prepare", RULES)
def test_what_cuda_refuses_raises_and_ends_the_capture(
    device: EmulatedDevice, prepare: Callable[[], Callable[[], Any]]
) -> None:
    do, x = prepare(), ones(4)
    captured = CUDAGraph()
    with stream(Stream()):
        captured.capture_begin()
        x.add_(1)
        with pytest.raises(RuntimeError, match=RULES[prepare]):
            do()
        with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureInvalidated"):
            captured.capture_end()
    assert torch.equal(x, ones(4))
    with pytest.raises(RuntimeError, match="not captured"):
        captured.replay()


def allocates() -> Callable[[], Any]:
    return lambda: ones(4)


def allocates_pinned() -> Callable[[], Any]:
    return lambda: torch.empty(4, pin_memory=True)


def waits_for_an_event_from_before() -> Callable[[], Any]:
    event = Event()
    event.record()
    return event.synchronize


def records_an_event() -> Callable[[], Any]:
    return lambda: current_stream().record_event()


UNSAFE = (asks_event_from_before, waits_for_an_event_from_before, allocates, allocates_pinned)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("prepare", [*UNSAFE, records_an_event])
def test_what_another_thread_does_may_end_the_capture(
    device: EmulatedDevice, prepare: Callable[[], Callable[[], Any]], mode: str
) -> None:
    do, captured = prepare(), CUDAGraph()
    is_refused = mode == "global" and prepare in UNSAFE
    with stream(Stream()), ThreadPoolExecutor(1) as pool:
        captured.capture_begin(capture_error_mode=mode)
        ones(4)
        error = pool.submit(do).exception()
        assert ("cudaErrorStreamCaptureUnsafe: a thread" in str(error)) == is_refused
        refused = pytest.raises(RuntimeError, match="cudaErrorStreamCaptureInvalidated")
        with refused if is_refused else nullcontext():
            captured.capture_end()


def test_a_stream_that_took_part_must_join_again(device: EmulatedDevice) -> None:
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureUnjoined"), graph(CUDAGraph()):
        forked(joins=False)
    with graph(captured := CUDAGraph()):
        assert current_stream().is_capturing()
        made = forked()
    assert not torch.emulated.is_current_stream_capturing()
    captured.replay()
    assert torch.equal(made, ones(4))


def test_nodes_of_a_warm_up_on_another_stream_take_part(device: EmulatedDevice) -> None:
    weight, side = ones(4).requires_grad_(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        accumulates = weight.view_as(weight)
        (weight * 2).sum().backward()
    current_stream().wait_stream(side)
    with graph(captured := CUDAGraph()):
        (weight * 3).sum().backward()
    captured.replay()
    assert weight.grad is not None
    assert torch.equal(weight.grad, 5 * ones(4))
    assert not device.findings
    del accumulates


def test_an_event_of_a_capture_tells_nothing_outside(device: EmulatedDevice) -> None:
    with graph(CUDAGraph()):
        event = current_stream().record_event()
    for use in (event.wait, event.query, event.synchronize):
        with pytest.raises(RuntimeError, match="cudaErrorCapturedEvent"):
            use()


def test_the_default_stream_is_not_captured(device: EmulatedDevice) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        CUDAGraph().capture_begin()


def test_a_stream_that_is_not_captured_runs_and_takes_other_memory(device: EmulatedDevice) -> None:
    """So memory that a comm stream takes before it has joined the capture is found when it is
    used."""
    side, x = Stream(), ones(4)
    with graph(captured := CUDAGraph()):
        with stream(side):
            outside = ones(4)
        y = x + outside
        del outside
    with pytest.raises(RuntimeError, match=r"add \(.*memory from outside the graph's pool"):
        captured.replay()
    assert y.isnan().all()
    assert device.findings[-1].kind == "freed"


def kinds(device: EmulatedDevice) -> set[str]:
    return {finding.kind for finding in device.findings}


def test_a_race_in_a_captured_step_is_found_in_its_replay(device: EmulatedDevice) -> None:
    x = ones(4)
    with graph(captured := CUDAGraph()):
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            x.add_(1)
        x.mul_(2)
        current_stream().wait_stream(side)
    device.findings.clear()
    captured.replay()
    assert kinds(device) == {"race"}
    assert re.search("in a graph", str(device.findings[0]))


def test_a_race_of_a_replay_with_other_work_is_found(device: EmulatedDevice) -> None:
    x, side = ones(4), Stream()
    with graph(captured := CUDAGraph()):
        y = x + 1
    side.wait_stream(current_stream())
    with stream(side):
        x.fill_(2)
    captured.replay()
    assert kinds(device) == {"race"}
    device.findings.clear()
    current_stream().wait_stream(side)
    captured.replay()
    captured.replay()
    y.add_(1)
    assert not device.findings
    with stream(side):
        y.add_(1)
    assert kinds(device) == {"race"}


def test_a_graph_runs_after_itself_and_beside_others(device: EmulatedDevice) -> None:
    x = ones(4)
    captured = CUDAGraph(), CUDAGraph()
    for each in captured:
        with graph(each):
            x.add_(1)
    for _ in range(2):
        with stream(Stream()):
            captured[0].replay()
    assert not device.findings
    with stream(Stream()):
        captured[1].replay()
    assert kinds(device) == {"race"}


def test_graphs_that_share_a_pool_run_one_after_the_other(device: EmulatedDevice) -> None:
    x, one, other = ones(4), CUDAGraph(), CUDAGraph()
    with graph(one):
        made = x * 2
    with graph(other, pool=one.pool()):
        also_made = x * 3
    first, second = Stream(), Stream()
    for side in (first, second):
        side.wait_stream(current_stream())
    with stream(first):
        one.replay()
    second.wait_stream(first)
    with stream(second):
        other.replay()
    assert not device.findings
    with stream(first):
        one.replay()
    assert kinds(device) == {"reuse"}
    del made, also_made
