"""The emulated device is as strict as CUDA: for each promise that CUDA does not make, a program
that relies on it is found, and a right one is not. `docs/emulated_device.md` has the table."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_overlap.tools.emulator import (
    EmulatedDevice,
    Stream,
    allocator,
    current_stream,
    fake_ranks,
    running,
    stream,
)
from fsdp_overlap.tools.emulator.allocator import MemPool
from fsdp_overlap.tools.emulator.memory import ByteRange
from fsdp_overlap.tools.emulator.nccl_like import BACKEND, NcclLikeGroup, unseen
from fsdp_overlap.tools.emulator.threads import DeviceThread
from support.emulated import HERE, Seconds, kinds
from support.ranks import run_ranks


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with running(EmulatedDevice()) as device:
        yield device


# Copies between the host and the device


def synchronize_an_event() -> None:
    current_stream().record_event().synchronize()


def synchronize_the_stream() -> None:
    current_stream().synchronize()


def synchronize_the_device() -> None:
    torch.accelerator.synchronize()


def read_a_later_value() -> None:
    torch.zeros(1, device=HERE).item()


WAITS = (synchronize_an_event, synchronize_the_stream, synchronize_the_device, read_a_later_value)


def by_to(source: torch.Tensor) -> torch.Tensor:
    return source.to("cpu", non_blocking=True)


def by_to_of_another_dtype(source: torch.Tensor) -> torch.Tensor:
    return source.to(torch.device("cpu"), torch.float64, non_blocking=True)


def by_to_like(source: torch.Tensor) -> torch.Tensor:
    return source.to(torch.zeros(1), non_blocking=True)


def by_copy(source: torch.Tensor) -> torch.Tensor:
    return torch.empty(8, pin_memory=True).copy_(source, non_blocking=True)


def by_foreach_copy(source: torch.Tensor) -> torch.Tensor:
    target = torch.empty(8, pin_memory=True)
    torch._foreach_copy_([target], [source], non_blocking=True)
    return target


def into_a_slice(source: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(16, pin_memory=True)
    whole[4:12].copy_(source, non_blocking=True)
    return whole


def into_pageable_memory(source: torch.Tensor) -> torch.Tensor:
    return torch.empty(8).copy_(source, non_blocking=True)


def into_every_second_element(source: torch.Tensor) -> torch.Tensor:
    return torch.empty(16, pin_memory=True)[::2].copy_(source, non_blocking=True)


TO_HOST: dict[Callable[[torch.Tensor], torch.Tensor], bool] = {
    by_to: False,
    by_to_of_another_dtype: False,
    by_to_like: False,
    by_copy: False,
    by_foreach_copy: False,
    into_a_slice: False,
    # CUDA says of pageable memory that the host "might" wait.
    into_pageable_memory: True,
    into_every_second_element: True,
}
"""By the copy that does not promise to wait: whether it may wait."""


def add(copy: torch.Tensor) -> None:
    copy + 1


def to_numbers(copy: torch.Tensor) -> None:
    copy.tolist()


def to_one_number(copy: torch.Tensor) -> None:
    copy[4].item()


def to_numpy(copy: torch.Tensor) -> None:
    copy.numpy()


def overwrite(copy: torch.Tensor) -> None:
    copy.zero_()


@pytest.mark.parametrize("use", [add, to_numbers, to_one_number, to_numpy, overwrite])
@pytest.mark.parametrize("copy", TO_HOST)
def test_what_is_copied_to_the_host_is_not_there_yet(
    device: EmulatedDevice,
    copy: Callable[[torch.Tensor], torch.Tensor],
    use: Callable[[torch.Tensor], None],
) -> None:
    arriving = copy(torch.ones(8, device=HERE))
    assert bool(device.syncs) == TO_HOST[copy]
    use(arriving)
    assert set(kinds(device)) == {"race"}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("copy", TO_HOST)
def test_it_is_there_after_a_wait(
    device: EmulatedDevice,
    copy: Callable[[torch.Tensor], torch.Tensor],
    wait: Callable[[], None],
) -> None:
    arriving = copy(torch.ones(8, device=HERE))
    wait()
    assert arriving.sum().item() >= 8
    arriving.zero_()
    assert not device.findings


def test_an_event_from_before_a_copy_tells_nothing_of_it(device: EmulatedDevice) -> None:
    source = torch.ones(8, device=HERE)
    event = current_stream().record_event()
    copy = source.to("cpu", non_blocking=True)
    event.synchronize()
    copy.sum()
    assert kinds(device) == ["race"]


def test_pinned_blocks_are_powers_of_two_unless_registered(device: EmulatedDevice) -> None:
    """torch's allocator keeps them for what comes next. Registered memory is as large as it is."""
    kept = torch.empty(1025, dtype=torch.uint8, pin_memory=True)
    assert device.pinned == 2048
    del kept
    assert torch.empty(2000, dtype=torch.uint8, pin_memory=True).is_pinned()
    assert device.pinned == 2048
    own = torch.ones(1025, dtype=torch.uint8)
    runtime = torch.get_device_module("emulated").cudart()
    assert not own.is_pinned()
    assert runtime.cudaHostRegister(own.data_ptr(), own.nbytes, 0) == 0
    assert runtime.cudaHostRegister(own.data_ptr(), own.nbytes, 0) != 0
    assert own[5:].is_pinned()
    assert device.pinned == 2048 + 1025
    on_device = own.to(HERE, non_blocking=True)
    assert device.copied_to_device == 1025
    assert not device.syncs
    on_device.cpu()
    assert device.copied_to_host == 1025
    assert runtime.cudaHostUnregister(own.data_ptr()) == 0
    assert runtime.cudaHostUnregister(own.data_ptr()) != 0
    assert device.pinned == 2048


def test_to_pins_what_it_does_not_wait_for_and_nothing_else(device: EmulatedDevice) -> None:
    source = torch.ones(8, device=HERE)
    assert source.to("cpu", non_blocking=True).is_pinned()
    assert not device.syncs
    assert not source.to("cpu").is_pinned()
    assert not source.cpu().is_pinned()
    assert not torch.ones(8).to("cpu", torch.float64, non_blocking=True).is_pinned()
    assert len(device.syncs) == 2
    assert not device.findings


def move(pinned: torch.Tensor) -> torch.Tensor:
    return pinned.to(HERE, non_blocking=True)


def fill(pinned: torch.Tensor) -> torch.Tensor:
    return torch.empty(8, device=HERE).copy_(pinned, non_blocking=True)


@pytest.mark.parametrize("copy", [move, fill])
def test_the_host_writes_what_the_device_still_reads(
    device: EmulatedDevice, copy: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    pinned = torch.ones(8).pin_memory()
    copy(pinned)
    assert pinned.sum() == 8  # two reads do not disturb each other
    assert not device.findings
    pinned.zero_()
    assert kinds(device) == ["race"]
    assert not device.syncs


@pytest.mark.parametrize("wait", WAITS)
def test_the_host_writes_it_after_a_wait(device: EmulatedDevice, wait: Callable[[], None]) -> None:
    pinned = torch.ones(8).pin_memory()
    move(pinned)
    wait()
    pinned.zero_()
    assert not device.findings


@pytest.mark.parametrize("is_pinned", [False, True])
def test_pageable_memory_is_staged_and_that_orders_nothing_else(
    device: EmulatedDevice, is_pinned: bool
) -> None:
    other = torch.ones(8, device=HERE).to("cpu", non_blocking=True)
    pageable = torch.ones(16)
    if is_pinned:  # torch makes it contiguous first
        pageable = pageable.pin_memory()
    source = pageable[::2]
    moved = source.to(HERE, non_blocking=True)
    pageable.zero_()
    assert not device.findings
    assert moved.sum().item() == 8
    moved = source.to(HERE, non_blocking=True)
    later = moved.to("cpu", non_blocking=True)
    source.to(HERE, non_blocking=True)  # the host might wait, and might not
    later.sum()
    other.sum()
    assert kinds(device) == ["race"]


def test_a_number_on_the_host_is_read_when_the_operation_is_enqueued(
    device: EmulatedDevice,
) -> None:
    number = torch.tensor(2.0)
    torch.ones(8, device=HERE) * number
    number.zero_()
    assert not device.findings
    arriving = torch.ones((), device=HERE).to("cpu", non_blocking=True)
    torch.ones(8, device=HERE) * arriving
    assert kinds(device) == ["race"]


# Threads


def test_hooks_of_backward_and_what_comes_last_run_on_the_thread_of_the_device(
    device: EmulatedDevice,
) -> None:
    here, of_thread = threading.current_thread(), threading.local()
    of_thread.value = 1
    side, seen = Stream(), []

    def note(*_: object) -> None:
        seen.append((threading.current_thread(), current_stream(), hasattr(of_thread, "value")))

    def in_backward(gradient: torch.Tensor) -> torch.Tensor:
        note()
        Variable._execution_engine.queue_callback(note)
        with torch.enable_grad():  # a backward within
            again = gradient.detach().requires_grad_()
            product = again * 2
            product.register_hook(note)
            product.sum().backward()
        return gradient

    weight = torch.ones(4, device=HERE, requires_grad=True)
    weight.register_post_accumulate_grad_hook(note)
    side.wait_stream(current_stream())
    with stream(side):
        product = weight * 2
        product.register_hook(in_backward)
    caller = current_stream()
    caller.wait_stream(side)
    for _ in range(2):
        product.sum().backward(retain_graph=True)
    assert torch.equal(weight.grad, torch.full((4,), 4.0, device=HERE))
    threads, streams, values = zip(*seen, strict=True)
    assert len(set(threads)) == 1
    assert here not in threads
    assert not any(values)
    # The hook, the one of the backward within, that of the weight's gradient, the callback.
    assert streams == (side, side, side, caller) * 2
    assert current_stream() == caller
    assert not device.findings


class OnTheSide(torch.autograd.Function):
    """Its backward computes on another stream."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, side: Any, joins: bool) -> torch.Tensor:
        ctx.side, ctx.joins = side, joins
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        here = current_stream()
        ctx.side.wait_stream(here)
        with stream(ctx.side):
            made = gradients[0] * 2
        if ctx.joins:
            here.wait_stream(ctx.side)
        return made, None, None


@pytest.mark.parametrize("joins", [True, False])
def test_the_next_node_waits_for_the_stream_of_a_node_and_not_for_others(
    device: EmulatedDevice, joins: bool
) -> None:
    x = torch.ones(4, device=HERE, requires_grad=True)
    OnTheSide.apply(x * 3, side := Stream(), joins).sum().backward()
    del side
    assert ("race" in kinds(device)) is not joins


def test_gradients_of_several_streams_are_summed_in_order(device: EmulatedDevice) -> None:
    x = torch.ones(4, device=HERE, requires_grad=True)
    shared, sides = x * 1, (Stream(), Stream(), Stream())
    parts = []
    for side in sides:
        side.wait_stream(current_stream())
        with stream(side):
            parts.append(shared * 2)
    for side in sides:
        current_stream().wait_stream(side)
    torch.stack(parts).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 6.0, device=HERE))
    assert not device.findings


def test_memory_is_kept_back_for_other_streams_alone(device: EmulatedDevice) -> None:
    for is_own in (True, False):
        tensor = torch.ones(1 << 20, device=HERE)
        side = current_stream() if is_own else Stream()
        side.wait_stream(current_stream())
        with stream(side):
            tensor.add_(1)
        tensor.record_stream(side)
        address = device.address_of(tensor)
        del tensor
        again = torch.ones(1 << 20, device=HERE)
        assert (device.address_of(again) == address) is is_own


def test_a_backward_of_the_host_runs_on_the_thread_that_calls_it(device: EmulatedDevice) -> None:
    seen = []
    weight = torch.ones(4, requires_grad=True)
    weight.register_hook(lambda _: seen.append(threading.current_thread()))
    (weight * 2).sum().backward()
    assert seen == [threading.current_thread()]


def test_an_error_in_a_hook_comes_to_the_caller(device: EmulatedDevice) -> None:
    def fail(_: torch.Tensor) -> None:
        raise KeyError("in a hook")

    weight = torch.ones(4, device=HERE, requires_grad=True)
    weight.register_hook(fail)
    with pytest.raises(KeyError, match="in a hook"):
        (weight * 2).sum().backward()
    (torch.ones(4, device=HERE, requires_grad=True) * 2).sum().backward()


class Modes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_and_autocast_are_carried_to_it(device: EmulatedDevice) -> None:
    seen = []
    weight = torch.ones(4, device=HERE, requires_grad=True)
    weight.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
    product = (weight * 2).exp().sum()
    with Modes() as modes, torch.autocast("cpu"):
        product.backward()
    assert "mul" in modes.seen
    assert seen == [True]


def in_a_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


class Loader(threading.Thread):
    def __init__(self, load: Callable[[], object]) -> None:
        super().__init__()
        self.load = load

    def run(self) -> None:
        self.load()


def in_a_class_of_its_own(run: Callable[[], object]) -> None:
    thread = Loader(run)
    thread.start()
    thread.join()


def in_a_new_pool(run: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


OLD_POOL = ThreadPoolExecutor(1)


def in_an_older_pool(run: Callable[[], object]) -> None:
    OLD_POOL.submit(run).result()


def in_a_timer(run: Callable[[], object]) -> None:
    timer = threading.Timer(0, run)
    timer.start()
    timer.join()


THREADS = (in_a_thread, in_a_class_of_its_own, in_a_new_pool, in_an_older_pool, in_a_timer)


@pytest.mark.parametrize("within", THREADS)
@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_of_the_program_has_the_default_stream(
    device: EmulatedDevice, within: Callable[..., None], waits: bool
) -> None:
    OLD_POOL.submit(threading.current_thread).result()  # its thread is there
    side, seen = Stream(), []
    with stream(side):
        tensor = torch.ones(8, device=HERE)
        event = current_stream().record_event()

        def read() -> None:
            if waits:
                event.wait()
            seen.append((current_stream(), tensor.device, tensor.cpu().tolist()))

        within(read)
        assert current_stream() == side
    assert seen == [(torch.get_device_module(HERE).default_stream(), torch.device(HERE), [1.0] * 8)]
    assert kinds(device) == ([] if waits else ["race"])


def test_what_runs_in_a_thread_names_its_line(device: EmulatedDevice) -> None:
    tensor = torch.ones(8, device=HERE)
    with stream(Stream()):
        in_a_new_pool(lambda: tensor.add_(1))
        tensor.add_(1)
    file = "tests/tools/emulator/test_emulated_strictness.py"
    assert f"add_ on the default stream, which writes it ({file}" in str(device.findings[0])


def test_threads_that_are_started_out_of_sight_are_not_seen(device: EmulatedDevice) -> None:
    with unseen():
        for within in THREADS:
            within(lambda: torch.ones(8))
    assert device.operations == 0
    in_a_thread(lambda: torch.ones(8))
    assert device.operations == 1


def test_many_threads_at_once(device: EmulatedDevice) -> None:
    def train(number: int) -> float:
        side = Stream()
        with stream(side):
            weight = torch.full((8,), float(number), device=HERE, requires_grad=True)
            for _ in range(20):
                (weight * weight).sum().backward()
            assert weight.grad is not None
            return float(weight.grad[0])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(train, range(16))) == [40.0 * number for number in range(16)]
    assert not device.findings
    assert device.allocator.allocated == 0


def test_a_thread_that_goes_on_afterwards_is_not_seen() -> None:
    go, seen = threading.Event(), []

    def late() -> None:
        go.wait()
        seen.append(torch.ones(8).device.type)

    thread = threading.Thread(target=late)
    with running(EmulatedDevice()) as device:
        thread.start()
    go.set()
    thread.join()
    assert seen == ["cpu"]
    assert device.operations == 0


def make_a_tensor() -> None:
    torch.zeros(8, device="emulated")


def make_a_stream() -> None:
    Stream()


def enter_a_stream() -> None:
    with stream(Stream(HERE_1)):
        pass


def wait_for_the_device() -> None:
    torch.accelerator.synchronize()


def ask_an_event() -> None:
    EVENTS[-1].query()


def wait_for_an_event() -> None:
    EVENTS[-1].synchronize()


EVENTS: list[Any] = []
"""The event of another thread, which :func:`ask_an_event` asks."""


def set_the_device() -> None:
    torch.get_device_module("emulated").set_device(0)


HERE_1 = "emulated:1"


USES = (
    make_a_tensor,
    make_a_stream,
    enter_a_stream,
    wait_for_the_device,
    ask_an_event,
    wait_for_an_event,
    set_the_device,
)


@pytest.mark.parametrize("use", USES)
def test_the_current_device_of_a_thread_is_the_first_one(use: Callable[[], None]) -> None:
    module = torch.get_device_module("emulated")

    def use_with_a_guard() -> None:
        with module.device(1):
            use()

    def set_and_use() -> None:
        module.set_device(1)
        use()

    right = [use_with_a_guard, set_and_use] if use is not set_the_device else []
    with running(EmulatedDevice(index=1)) as device:
        assert torch.zeros(1, device="emulated").device == torch.device(HERE_1)
        assert module.current_device() == 1
        EVENTS.append(current_stream().record_event())
        for program in right:
            in_a_thread(program)
        assert not device.findings
        assert device.contexts == {1}
        seen = []
        in_a_thread(lambda: seen.append(module.current_device()))
        assert seen == [0]
        in_a_thread(use)
        assert set(kinds(device)) == {"context"}
        assert device.contexts == {0, 1}


# Streams


def test_there_are_32_streams_of_a_priority(device: EmulatedDevice) -> None:
    for priority in (0, -1, -2, -3):
        streams = [Stream(priority=priority) for _ in range(66)]
        assert len(set(streams)) == 32
        assert streams[:32] == streams[32:64]
        assert streams[64:] == streams[:2]
    assert Stream(priority=-5).queue is device._pools[3][66 % 32]  # lower than the lowest
    assert len({Stream(priority=priority) for priority in (0, -1, -2, -3)}) == 4
    assert current_stream() not in [Stream() for _ in range(32)]
    with pytest.raises(RuntimeError, match="0 or less, not 1"):
        Stream(priority=1)


@pytest.mark.parametrize(("others", "milliseconds"), [(30, 2000), (31, 4000)])
def test_work_on_streams_that_are_one_runs_one_after_the_other(
    others: int, milliseconds: float
) -> None:
    """As when a program makes a stream in every step."""
    with running(EmulatedDevice(timing=Seconds({"add_": 2.0}))) as device:
        tensors = [torch.zeros(4, device=HERE) for _ in range(2)]
        start = current_stream().record_event()
        first, *_, last = [Stream() for _ in range(others + 2)]
        ends = []
        for side, tensor in zip((first, last), tensors, strict=True):
            side.wait_event(start)
            with stream(side):
                tensor.add_(1)
                ends.append(side.record_event())
        assert max(start.elapsed_time(end) for end in ends) == milliseconds
    assert not device.findings


@pytest.mark.parametrize("waits", [True, False])
def test_the_default_stream_is_a_stream_like_others(device: EmulatedDevice, waits: bool) -> None:
    side, default = Stream(), current_stream()
    with stream(side):
        tensor = torch.zeros(8, device=HERE)
    if waits:
        default.wait_stream(side)
    tensor.add_(1)
    if waits:
        side.wait_stream(default)
    with stream(side):
        tensor.add_(1)
    assert kinds(device) == ([] if waits else ["race", "race"])


# Process groups


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


def all_reduce(values: torch.Tensor, **options: Any) -> Any:
    return dist.all_reduce(values, **options)


def broadcast(values: torch.Tensor, **options: Any) -> Any:
    return dist.broadcast(values, 0, **options)


def all_gather(values: torch.Tensor, **options: Any) -> Any:
    return dist.all_gather_into_tensor(values, torch.ones(4, device=HERE), **options)


def all_gather_lists(values: torch.Tensor, **options: Any) -> Any:
    return dist.all_gather([values[:3], values[3:]], torch.ones(3, device=HERE), **options)


def reduce_scatter(values: torch.Tensor, **options: Any) -> Any:
    return dist.reduce_scatter_tensor(values, torch.ones(16, device=HERE), **options)


def all_to_all(values: torch.Tensor, **options: Any) -> Any:
    return dist.all_to_all_single(values, torch.ones(8, device=HERE), **options)


COLLECTIVES = (all_reduce, broadcast, all_gather, all_gather_lists, reduce_scatter, all_to_all)


def do_not_wait(work: dist.Work) -> None:
    pass


def wait_elsewhere(work: dist.Work) -> None:
    with stream(Stream()):
        work.wait()


def wait_here(work: dist.Work) -> None:
    work.wait()


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("wait", [do_not_wait, wait_elsewhere, wait_here])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_an_asynchronous_collective_is_waited_for_by_the_current_stream_and_not_the_host(
    device: EmulatedDevice,
    collective: Callable[..., dist.Work],
    wait: Callable[[dist.Work], None],
) -> None:
    values = torch.ones(8, device=HERE)
    work = collective(values, async_op=True)
    wait(work)
    assert not device.syncs
    values.add_(1)
    assert set(kinds(device)) == (set() if wait is wait_here else {"race"})


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_synchronous_one_runs_on_the_current_stream(
    device: EmulatedDevice, collective: Callable[..., object]
) -> None:
    values = torch.ones(8, device=HERE)
    collective(values)
    values.add_(1)
    assert not device.findings
    assert not device.syncs
    with stream(Stream()):
        collective(values)
    assert set(kinds(device)) == {"race"}


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("is_written", [True, False])
def test_an_asynchronous_one_runs_after_what_was_enqueued_and_beside_what_follows(
    device: EmulatedDevice, is_written: bool
) -> None:
    values, others = torch.ones(8, device=HERE), torch.ones(8, device=HERE)
    work = dist.all_reduce(values, async_op=True)
    others.add_(1)
    if is_written:
        values.sum()
    work.wait()
    assert kinds(device) == (["race"] if is_written else [])


@pytest.mark.usefixtures("ranks")
def test_its_tensors_are_kept_until_it_is_waited_for(device: EmulatedDevice) -> None:
    nbytes = device.allocator.allocated
    values = torch.ones(1 << 20, device=HERE)
    work = dist.all_reduce(values, async_op=True)
    del values
    torch.ones(1 << 20, device=HERE)
    assert device.allocator.allocated - nbytes == 4 << 20
    work.wait()
    assert device.allocator.allocated == nbytes
    torch.ones(1 << 20, device=HERE)
    assert not device.findings
    # Which stream waits is the program's affair: this is not the one that the memory belongs to.
    values = torch.ones(1 << 20, device=HERE)
    work = dist.all_reduce(values, async_op=True)
    del values
    wait_elsewhere(work)
    torch.ones(1 << 20, device=HERE)
    assert kinds(device) == ["reuse"]


def test_the_output_of_a_functional_one_is_kept_and_no_later_tensor_is_taken_for_it() -> None:
    # Of torch's own group, whose work keeps nothing.
    with fake_ranks(4, "cpu:fake,emulated:fake"), running(EmulatedDevice()) as device:
        funcol.all_reduce(torch.ones(1 << 20, device=HERE), "sum", dist.group.WORLD)
        for _ in range(2):  # in its memory and at its address, if it is gone
            funcol.wait_tensor(torch.ones(1 << 20, device=HERE))
        assert not device.findings
        torch.accelerator.synchronize()
        funcol.all_reduce(torch.ones(128, device=HERE), "sum", dist.group.WORLD).wait()
        assert device.allocator.allocated < 1 << 20


@pytest.mark.usefixtures("ranks")
def test_tensors_of_one_that_nobody_waits_for_are_kept_until_it_is_done(
    device: EmulatedDevice,
) -> None:
    dist.all_reduce(torch.ones(1 << 20, device=HERE), async_op=True)
    dist.all_reduce(torch.ones(1 << 20, device=HERE), async_op=True)
    assert device.allocator.allocated == 8 << 20
    torch.accelerator.synchronize()
    dist.all_reduce(torch.ones(128, device=HERE), async_op=True)  # asks what is done
    assert device.allocator.allocated == 512
    assert not device.findings


@pytest.mark.usefixtures("ranks")
def test_the_host_reads_no_result_before_a_stream_has_waited(device: EmulatedDevice) -> None:
    values = torch.ones(8, device=HERE)
    dist.all_reduce(values, async_op=True)
    values.sum().item()
    assert kinds(device) == ["race"]


@pytest.mark.usefixtures("ranks")
def test_the_host_waits_for_a_barrier(device: EmulatedDevice) -> None:
    copy = torch.ones(8, device=HERE).to("cpu", non_blocking=True)
    dist.barrier()
    copy.sum()
    assert [sync.operation for sync in device.syncs] == ["barrier"]
    assert not device.findings


def on_real_ranks() -> None:
    """Each of two ranks: what NCCL makes of lists, of calls in a group, and of messages."""
    rank = dist.get_rank()
    for sizes, calls in (
        ((2, 2), ["all_gather"]),
        ((1, 3), ["broadcast from 0", "broadcast from 1"]),
    ):
        with running(EmulatedDevice()) as device:
            parts = [torch.zeros(size, device=HERE) for size in sizes]
            own = torch.full((sizes[rank],), float(rank), device=HERE)
            work = dist.all_gather(parts, own, async_op=True)
            work.wait()
            assert [part.tolist() for part in parts] == [[0.0] * sizes[0], [1.0] * sizes[1]]
            assert not device.findings
            assert [issued.kind for issued in device.issued] == calls
    with running(EmulatedDevice()) as device:
        mine = torch.zeros(3 - 2 * rank, device=HERE)
        dist.reduce_scatter(mine, [torch.ones(3, device=HERE), torch.ones(1, device=HERE)])
        assert mine.tolist() == [2.0] * (3 - 2 * rank)
        assert [issued.kind for issued in device.issued] == ["reduce to 0", "reduce to 1"]
        assert not device.findings
    for waits in (True, False):
        with running(EmulatedDevice()) as device:
            values = [torch.full((4,), rank + 1.0, device=HERE) for _ in range(2)]
            with dist._coalescing_manager(device=HERE, async_ops=True) as coalesced:
                for each in values:
                    dist.all_reduce(each)
            if waits:
                coalesced.wait()
                assert [each.tolist() for each in values] == [[3.0] * 4] * 2
            else:
                values[1].sum()
                coalesced.wait()
            assert kinds(device) == ([] if waits else ["race"])
        with running(EmulatedDevice()) as device:
            sent, received = torch.full((4,), float(rank), device=HERE), torch.zeros(4, device=HERE)
            other = 1 - rank
            messages = [
                dist.P2POp(dist.isend, sent, other),
                dist.P2POp(dist.irecv, received, other),
            ]
            works = dist.batch_isend_irecv(messages)
            if not waits:
                received.sum()
            for work in works:
                work.wait()
            assert received.tolist() == [float(other)] * 4
            assert kinds(device) == ([] if waits else ["race"])


def coalesced_calls() -> None:
    """The work of one call orders nothing. A watchdog does not see synchronous ones hang."""
    rank = dist.get_rank()
    group: Any = dist.group.WORLD
    for is_async, waits_for, found in (
        (True, "all", []),
        (True, "one", ["race"]),
        (False, "none", []),
    ):
        NcclLikeGroup.unwatched = 0
        with running(EmulatedDevice()) as device:
            values = [torch.full((4,), rank + 1.0, device=HERE) for _ in range(2)]
            group._start_coalescing(torch.device(HERE))
            works = []
            for root, each in enumerate(values):
                options = dist.BroadcastOptions()
                options.rootRank, options.asyncOp = root, is_async
                works.append(group.broadcast([each], options))
            whole = group._end_coalescing(torch.device(HERE))
            assert (whole is None) == (not is_async)
            if waits_for == "all":
                whole.wait()
            elif waits_for == "one":
                works[1 - rank].wait()
                values[1 - rank].sum()
                whole.wait()
            assert [each.tolist() for each in values] == [[1.0] * 4, [2.0] * 4]
            assert kinds(device) == found
        assert NcclLikeGroup.unwatched == (not is_async)


def lists_differ() -> None:
    rank = dist.get_rank()
    sizes = (2, 3) if rank else (2, 2)
    with pytest.raises(RuntimeError, match="do something else than"):
        dist.all_gather([torch.zeros(size) for size in sizes], torch.zeros(sizes[rank]))


def memory_before_a_collective() -> None:
    group: Any = dist.new_group([0, 1])
    pool = MemPool(NcclLikeGroup.mem_allocator)
    with running(EmulatedDevice()):
        with pytest.raises(RuntimeError, match="has not been initialized before mem pool"):
            group.register_mem_pool(pool)
        dist.all_reduce(torch.ones(1, device=HERE), group=group)
        group.register_mem_pool(pool)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "claim", [on_real_ranks, coalesced_calls, lists_differ, memory_before_a_collective]
)
def test_a_group_of_real_ranks_is_as_nccls(claim: Callable[[], None]) -> None:
    run_ranks(claim, 2, backend=BACKEND)


# Memory


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_another_stream_used_comes_back_when_that_is_found_done(
    device: EmulatedDevice, waits: bool
) -> None:
    """The host runs ahead of the device. Where it waits once a step, one block is enough."""
    side = Stream()
    for _ in range(3):
        buffer = torch.ones(16 << 20, dtype=torch.uint8, device=HERE)
        side.wait_stream(current_stream())
        with stream(side):
            buffer.zero_()
        buffer.record_stream(side)
        del buffer
        assert device.allocator.allocated == 0
        if waits:
            side.synchronize()
    assert device.allocator.reserved == (1 if waits else 3) * (16 << 20)
    torch.get_device_module(HERE).empty_cache()  # which finds out
    assert device.allocator.reserved == 0
    assert not device.findings


def test_streams_that_were_not_recorded_are_not_waited_for(device: EmulatedDevice) -> None:
    recorded, other = Stream(), Stream()
    tensor = torch.ones(1 << 20, device=HERE)
    for side in (recorded, other):
        side.wait_stream(current_stream())
        with stream(side):
            tensor.sum()
    tensor.record_stream(recorded)
    del tensor
    torch.ones(1 << 20, device=HERE)  # may get it, if the recorded stream is done by now
    assert kinds(device) == ["reuse"]


def test_memory_of_a_pool_goes_back_with_it(device: EmulatedDevice) -> None:
    module = torch.get_device_module(HERE)
    pool = MemPool()
    with module.use_mem_pool(pool):
        kept, gone = (torch.ones(3 << 20, device=HERE) for _ in range(2))
    addresses = range(pool.segments[0].start, pool.segments[-1].stop)
    assert device.address_of(kept) in addresses
    assert device.allocator.reserved == 24 << 20
    del gone
    other = torch.ones(3 << 20, device=HERE)  # which does not get it
    assert device.address_of(other) not in addresses
    module.empty_cache()  # nor does the device
    assert device.allocator.reserved == 36 << 20
    with module.use_mem_pool(pool):
        again = torch.ones(3 << 20, device=HERE)
    assert device.address_of(again) in addresses
    del again, pool
    assert device.allocator.reserved == 24 << 20
    del kept
    assert device.allocator.reserved == 12 << 20
    assert not device.findings


def test_memory_of_a_pool_is_used_again_too_early(device: EmulatedDevice) -> None:
    pool, side = MemPool(), Stream()
    with torch.get_device_module(HERE).use_mem_pool(pool):
        tensor = torch.ones(1 << 20, device=HERE)
        side.wait_stream(current_stream())
        with stream(side):
            tensor.sum()
        del tensor
        torch.ones(1 << 20, device=HERE)
    assert kinds(device) == ["reuse"]


def test_a_pool_is_of_the_thread_that_uses_it(device: EmulatedDevice) -> None:
    """Backward, which runs on another one, takes its memory elsewhere."""
    pool, seen = MemPool(), []

    def note(gradient: torch.Tensor) -> None:
        seen.append(device.address_of(gradient))

    weight = torch.ones(1 << 20, device=HERE, requires_grad=True)
    with torch.get_device_module(HERE).use_mem_pool(pool):
        product = weight * 2
        product.register_hook(note)
        (product * 3).sum().backward()
        assert any(device.address_of(product) in segment for segment in pool.segments)
    assert not any(seen[0] in segment for segment in pool.segments)


def sizes_that_grow(count: int) -> None:
    """Each is larger than what the one before left."""
    for size in range(count):
        torch.ones((11 + 2 * size) << 20, dtype=torch.uint8, device=HERE)


def test_expandable_segments_grow_and_others_do_not() -> None:
    reserved = []
    for expandable in (False, True):
        with running(EmulatedDevice(expandable_segments=expandable)) as device:
            sizes_that_grow(5)
            reserved.append(device.allocator.reserved)
            assert device.allocator.allocated == 0
            small = torch.ones(1, device=HERE)
            first = torch.ones(11 << 20, dtype=torch.uint8, device=HERE)
            second = torch.ones(5 << 20, dtype=torch.uint8, device=HERE)
            assert device.address_of(second) != device.address_of(first)
            del first
            torch.get_device_module(HERE).empty_cache()
            del second, small
            torch.get_device_module(HERE).empty_cache()
            assert device.allocator.reserved == 0
            assert not device.findings
    # 12 + 14 + 16 + 18 + 20 MiB, or two pages of 20 MiB.
    assert reserved == [80 << 20, 20 << 20]


def test_memory_of_an_expandable_segment_is_used_again_too_early() -> None:
    with running(EmulatedDevice(expandable_segments=True)) as device:
        side, tensor = Stream(), torch.ones(1 << 20, device=HERE)
        side.wait_stream(current_stream())
        with stream(side):
            tensor.sum()
        del tensor
        torch.ones(30 << 20, dtype=torch.uint8, device=HERE)  # its pages, and more
        assert kinds(device) == ["reuse"]


def test_the_thread_of_the_device_keeps_nothing_once_the_caller_goes_on() -> None:
    thread = DeviceThread("a thread", lambda: None)
    goes_on = threading.Event()

    def stall(future: Future[Any], result: Any) -> None:
        set_result(future, result)
        goes_on.wait(60)

    set_result = Future.set_result
    given = torch.ones(2)
    kept = weakref.ref(given)
    with patch.object(Future, "set_result", stall):
        made = thread.run(partial(torch.neg, given))
        del given
        assert kept() is None
        kept = weakref.ref(made)
        del made
        assert kept() is None
        goes_on.set()
        thread.end()


def test_garbage_that_is_collected_while_memory_is_looked_for_is_freed_later(
    device: EmulatedDevice,
) -> None:
    first, second = (torch.ones(1 << 10, device=HERE) for _ in range(2))
    del second
    garbage = [first]
    garbage.append(garbage)
    del first, garbage

    def merge_after_a_collection(*args: Any) -> None:
        gc.collect()
        merge(*args)

    merge = allocator._merge
    with patch.object(allocator, "_merge", merge_after_a_collection):
        third = torch.ones(1 << 10, device=HERE)
    del third
    torch.ones(1, device=HERE)
    assert device.allocator.allocated == 0
    assert not device.findings


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        (lambda x: x[:, :4], lambda x: x[:, 4:], False),
        (lambda x: x[:, :5], lambda x: x[:, 4:], True),
        (lambda x: x[:, 4:], lambda x: x[1:, :5], True),
        (lambda x: x[:, 6:], lambda x: x[1, :3], False),
        (lambda x: x[:, 6:], lambda x: x[1, 3:7], True),
        (lambda x: x[:, 6:], lambda x: x[1:3], True),
        (lambda x: x[::2], lambda x: x[1::2], False),
        (lambda x: x[::2], lambda x: x[1::3], True),
        (lambda x: x.T[:4], lambda x: x.T[4:], False),
        (lambda x: x[:, ::2], lambda x: x[:, 1::2], False),
        (lambda x: x, lambda x: x[:, 4:], True),
    ],
)
def test_parts_that_lie_between_each_other_share_no_bytes(
    device: EmulatedDevice,
    one: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[torch.Tensor], torch.Tensor],
    is_shared: bool,
) -> None:
    for first, second in ((one, other), (other, one)):
        x, side = torch.zeros(8, 8, device=HERE), Stream()
        side.wait_stream(current_stream())
        first(x).add_(1)
        with stream(side):
            second(x).add_(1)
        current_stream().wait_stream(side)
    assert kinds(device) == (["race"] if is_shared else [])


def test_a_part_with_gaps_does_not_hide_what_lies_in_them(device: EmulatedDevice) -> None:
    x, side = torch.zeros(8, 8, device=HERE), Stream()
    side.wait_stream(current_stream())
    x[:, 1::2].add_(1)
    x[:, ::2].add_(1)  # around it
    with stream(side):
        x[:, 1::2].add_(1)
    assert kinds(device) == ["race"]


def bytes_of(tensor: torch.Tensor) -> set[int]:
    indices = product(*map(range, tensor.shape))
    first = [
        tensor.storage_offset() + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in indices
    ]
    size = tensor.element_size()
    return {size * at + byte for at in first for byte in range(size)}


def test_spans_hide_no_byte_that_is_shared() -> None:
    draw = random.Random(0)
    buffer = torch.empty(600, dtype=torch.int16)
    views = [
        buffer.as_strided(
            [draw.randint(0, 4) for _ in range(dims)],
            [draw.choice((0, 1, 2, 3, 4, 6, 12, 24)) for _ in range(dims)],
            draw.randint(0, 40),
        )
        for dims in range(4)
        for _ in range(60)
    ]
    apart = 0
    for one, other in product([(ByteRange.of(view), bytes_of(view)) for view in views], repeat=2):
        (here, mine), (there, others) = one, other
        assert here.overlaps(there) or not mine & others
        assert others <= mine or not here.covers(there) or not others
        within = here.start < there.stop and there.start < here.stop
        apart += within and not here.overlaps(there)
    assert apart > 100


def test_a_wait_for_the_whole_device_is_one(device: EmulatedDevice) -> None:
    streams = [Stream() for _ in range(3)]
    x = torch.zeros(8, device=HERE)
    for side in streams:
        with stream(side):
            x.sum()  # races: allow
    torch.get_device_module(HERE).synchronize()
    assert [sync.operation for sync in device.syncs] == ["synchronize"]
    x.add_(1)
    assert not device.findings


def test_emptying_the_cache_orders_nothing(device: EmulatedDevice) -> None:
    side, x = Stream(), torch.zeros(8, device=HERE)
    torch.get_device_module(HERE).empty_cache()
    with stream(side):
        x.add_(1)
    assert [sync.operation for sync in device.syncs] == ["empty_cache"]
    assert kinds(device) == ["race"]
