"""The emulated device: what it knows of order, memory and the host."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_overlap.comm.comm_streams import has_streams, streams_of
from fsdp_overlap.tools.emulator import (
    EmulatedDevice,
    Event,
    IssuedCollective,
    Stream,
    compare_issued,
    current_stream,
    fake_ranks,
    running,
    stream,
    torch_module,
)
from fsdp_overlap.tools.torch_internals import register_device
from support.emulated import HERE, Seconds, kinds

MIB = 1024 * 1024
functional = torch.ops._c10d_functional


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with running(EmulatedDevice()) as device:
        yield device


def test_it_is_a_device_like_any_other_with_streams(device: EmulatedDevice) -> None:
    tensor = torch.zeros(3, device="emulated")
    assert tensor.device == torch.device(HERE)
    assert not tensor.is_cpu
    assert (tensor + 1).device == torch.device(HERE)
    assert tensor.view(3, 1).device == torch.device(HERE)
    assert torch.empty_like(tensor).device == torch.device(HERE)
    assert torch.zeros(3).device.type == "cpu"
    assert tensor.cpu().device.type == "cpu"
    assert tensor.cpu().to(HERE).device == torch.device(HERE)
    assert torch.nn.Linear(2, 2).to(HERE).weight.device == torch.device(HERE)
    assert torch.accelerator.current_stream() == current_stream()  # type: ignore[comparison-overlap]
    assert has_streams(torch.device(HERE))
    assert streams_of(torch.device(HERE)).current_stream() == current_stream()


def test_two_streams_that_nothing_orders_race(device: EmulatedDevice) -> None:
    tensor, side = torch.zeros(8, device=HERE), Stream()
    with stream(side):
        tensor.add_(1)
    [finding] = device.findings
    assert finding.kind == "race"
    made = test_two_streams_that_nothing_orders_race.__code__.co_firstlineno + 1
    stream_2 = f"stream 2 (test_emulated_device.py:{made})"
    assert f"add_ on {stream_2} writes memory (tests/" in finding.text
    assert "nothing orders it after zeros on the default stream, which writes it" in finding.text


def wait_for_stream(side: Stream) -> None:
    side.wait_stream(current_stream())


def wait_for_event(side: Stream) -> None:
    side.wait_event(current_stream().record_event())


def wait_on_the_host(side: Stream) -> None:
    current_stream().synchronize()


def wait_by_a_third(side: Stream) -> None:
    third = Stream()
    third.wait_stream(current_stream())
    side.wait_stream(third)


@pytest.mark.parametrize(
    "order", [wait_for_stream, wait_for_event, wait_on_the_host, wait_by_a_third]
)
def test_what_orders_them_does(device: EmulatedDevice, order: Callable[[Stream], None]) -> None:
    tensor, side = torch.zeros(8, device=HERE), Stream()
    order(side)
    with stream(side):
        tensor.add_(1)
    assert not device.findings


def test_an_event_stands_for_what_was_enqueued_before_it(device: EmulatedDevice) -> None:
    event, side = Event(), Stream()
    event.record()
    tensor = torch.zeros(8, device=HERE)
    side.wait_event(event)
    with stream(side):
        tensor.add_(1)
    assert kinds(device) == ["race"]


def test_reads_beside_each_other_are_none_but_a_write_beside_a_read_is(
    device: EmulatedDevice,
) -> None:
    tensor, side = torch.zeros(8, device=HERE), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        tensor.sum()
    tensor.sum()
    assert not device.findings
    tensor.zero_()
    assert kinds(device) == ["race"]


def test_halves_of_one_storage_are_apart(device: EmulatedDevice) -> None:
    tensor, side = torch.zeros(8, device=HERE), Stream()
    side.wait_stream(current_stream())
    tensor[:4].add_(1)
    with stream(side):
        tensor[4:].add_(1)
    assert not device.findings
    with stream(side):
        tensor[3:].add_(1)
    assert kinds(device) == ["race"]


def test_memory_is_used_again_too_early(device: EmulatedDevice) -> None:
    side = Stream()
    tensor = torch.zeros(8, device=HERE)
    side.wait_stream(current_stream())
    with stream(side):
        tensor.sum()
    del tensor
    torch.ones(4, device=HERE)  # of another size, for which the block would do as well
    [finding] = device.findings
    assert finding.kind == "reuse"
    assert "reads memory that was freed since and taken again" in finding.text


def test_memory_is_used_again_once_its_stream_has_waited(device: EmulatedDevice) -> None:
    side = Stream()
    tensor = torch.zeros(8, device=HERE)
    side.wait_stream(current_stream())
    with stream(side):
        tensor.sum()
    del tensor
    current_stream().wait_stream(side)
    torch.ones(8, device=HERE)
    tensor = torch.zeros(8, device=HERE)
    tensor.record_stream(side)  # type: ignore[arg-type]
    side.wait_stream(current_stream())
    with stream(side):
        tensor.sum()  # which the allocator asks about when the memory is freed
    del tensor
    torch.ones(8, device=HERE)
    assert not device.findings


def test_a_recorded_stream_is_waited_for_by_the_allocator_alone(device: EmulatedDevice) -> None:
    side = Stream()
    tensor = torch.zeros(8, device=HERE)
    side.wait_stream(current_stream())
    with stream(side):
        tensor.sum()
    tensor.record_stream(side)  # type: ignore[arg-type]
    tensor.zero_()
    assert kinds(device) == ["race"]


def test_resized_storages_give_their_memory_back(device: EmulatedDevice) -> None:
    tensor = torch.zeros(8, device=HERE)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert device.allocator.allocated == 0
    with pytest.raises(RuntimeError, match="sum uses memory that is freed"):
        tensor.sum()
    assert kinds(device) == ["freed"]
    storage.resize_(32)
    assert device.allocator.allocated == 512
    tensor.zero_()


def test_the_allocator_rounds_splits_and_joins_as_torchs() -> None:
    with running(EmulatedDevice()) as device:
        allocator = device.allocator
        one = torch.empty(3, dtype=torch.uint8, device=HERE)
        assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
        two = torch.empty(MIB, dtype=torch.uint8, device=HERE)
        assert (allocator.allocated, allocator.reserved) == (MIB + 512, 2 * MIB)
        three = torch.empty(MIB, dtype=torch.uint8, device=HERE)
        assert allocator.reserved == 4 * MIB
        large = torch.empty(3 * MIB, dtype=torch.uint8, device=HERE)
        assert allocator.reserved == 24 * MIB
        own = torch.empty(15 * MIB, dtype=torch.uint8, device=HERE)
        # It fits into what the one before left.
        assert allocator.reserved == 24 * MIB
        more = torch.empty(15 * MIB, dtype=torch.uint8, device=HERE)
        assert allocator.reserved == 40 * MIB
        with stream(Stream()):
            torch.empty(3, device=HERE)
        assert allocator.reserved == 42 * MIB  # each stream has its own
        most = allocator.peak_allocated
        del one, two, three, large, own, more
        assert allocator.allocated == 0
        assert allocator.peak_allocated == most
        torch.empty(20 * MIB, dtype=torch.uint8, device=HERE)
        assert allocator.reserved == 42 * MIB  # the neighbours are one block again
        kept = torch.empty(3, dtype=torch.uint8, device=HERE)
        torch.get_device_module(HERE).empty_cache()
        assert allocator.reserved == 2 * MIB
        torch.get_device_module(HERE).reset_peak_memory_stats()
        assert (allocator.peak_allocated, allocator.peak_reserved) == (512, 2 * MIB)
        more = torch.empty(15 * MIB, dtype=torch.uint8, device=HERE)
        assert allocator.peak_reserved == 18 * MIB
        assert device.address_of(more) >= 42 * MIB
        del kept, more


def read_item(tensor: torch.Tensor) -> None:
    tensor.sum().item()


def read_list(tensor: torch.Tensor) -> None:
    tensor.tolist()


def ask(tensor: torch.Tensor) -> None:
    assert not tensor.any()


def copy_to_the_host(tensor: torch.Tensor) -> None:
    tensor.cpu()


def copy_from_pageable_memory(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.zeros(8), non_blocking=True)


def make_of_numbers(tensor: torch.Tensor) -> None:
    torch.tensor([1.0, 2.0], device=HERE)


def wait_for_all(tensor: torch.Tensor) -> None:
    torch.get_device_module(HERE).synchronize()


@pytest.mark.parametrize(
    "program",
    [
        read_item,
        read_list,
        ask,
        copy_to_the_host,
        copy_from_pageable_memory,
        make_of_numbers,
        wait_for_all,
    ],
)
def test_where_the_host_waits_is_known(
    device: EmulatedDevice, program: Callable[[torch.Tensor], None]
) -> None:
    tensor = torch.zeros(8, device=HERE)
    assert not device.syncs
    program(tensor)
    assert len(device.syncs) == 1
    assert f"in {program.__name__}" in str(device.syncs[0])


def test_copies_of_pinned_memory_make_nobody_wait(device: EmulatedDevice) -> None:
    pinned = torch.zeros(8).pin_memory()
    assert pinned.is_pinned()
    tensor = pinned.to(HERE, non_blocking=True)
    pinned.copy_(tensor, non_blocking=True)
    copied = current_stream().record_event()
    assert not device.syncs
    assert not copied.query()
    assert not device.findings
    pinned.sum()  # before it has arrived
    assert kinds(device) == ["race"]
    device.findings.clear()
    copied.synchronize()
    assert copied.query()
    pinned.sum()
    assert not device.findings


def test_tensors_on_both_sides_are_refused(device: EmulatedDevice) -> None:
    tensor = torch.zeros(8, device=HERE)
    assert (tensor + torch.tensor(1.0)).device == torch.device(HERE)  # a number
    with pytest.raises(RuntimeError, match="add got tensors on the host and on the emulated"):
        tensor + torch.zeros(8)
    with pytest.raises(TypeError, match="use cpu"):
        tensor.numpy()


def test_nodes_of_the_graph_run_where_forward_ran(device: EmulatedDevice) -> None:
    side, seen = Stream(), []
    weight = torch.ones(4, device=HERE, requires_grad=True)
    first = weight * 2
    side.wait_stream(current_stream())
    with stream(side):
        second = first.exp()
        second.register_hook(lambda _: seen.append(current_stream()))
    first.register_hook(lambda _: seen.append(current_stream()))
    caller = current_stream()
    caller.wait_stream(side)
    second.sum().backward()
    assert seen == [side, caller]
    assert current_stream() == caller
    assert not device.findings


def test_operations_and_collectives_have_durations() -> None:
    with running(EmulatedDevice(timing=Seconds({"add_": 2.0}))) as device:
        tensors = [torch.zeros(4, device=HERE) for _ in range(2)]
        side, start = Stream(), Event()
        start.record()
        side.wait_stream(current_stream())
        tensors[0].add_(1)
        with stream(side):
            tensors[1].add_(1)
            tensors[1].add_(1)
        here, there = current_stream().record_event(), side.record_event()
        assert start.elapsed_time(here) == 2000
        assert start.elapsed_time(there) == 4000  # beside the other
        current_stream().wait_event(there)
        tensors[0].add_(1)
        end = current_stream().record_event()
        assert start.elapsed_time(end) == 6000
        assert not there.query()
        there.synchronize()
        assert there.query()
        assert not end.query()
    assert not device.findings


def test_a_slow_host_holds_up_the_device_and_a_fast_one_runs_ahead() -> None:
    for on_host, end in ((0.5, 11.0), (5.0, 32.0)):
        with running(EmulatedDevice(timing=Seconds({"add_": 2.0}, on_host))) as device:
            tensor = torch.zeros(4, device=HERE)
            for _ in range(5):
                tensor.add_(1)
            assert device.host.ends == 6 * on_host
            done = current_stream().record_event()
            assert not done.query()
            assert device.current.ends == end
            done.synchronize()
            assert device.host.ends == device.current.ends


def test_communicators_in_different_orders_are_found() -> None:
    gather, reduce = (
        IssuedCollective("comm streams of gathers", "all_gather"),
        IssuedCollective("reductions", "all_reduce"),
    )
    assert compare_issued([[gather, reduce], [gather, reduce]]) is None
    finding = compare_issued([[gather, reduce], [reduce, gather]])
    assert finding is not None
    assert "rank 0 with all_gather on comm streams of gathers (0 before it); rank 1" in finding.text
    shorter = compare_issued([[gather, reduce], [gather]])
    assert shorter is not None
    assert "rank 1 with nothing (1 before it)" in shorter.text


def test_three_communicators_of_which_each_two_ranks_share_one_are_found() -> None:
    one, two, three = (IssuedCollective(str(a), "all_gather", (a, (a + 1) % 3)) for a in range(3))
    assert compare_issued([[one, three], [one, two], [two, three]]) is None
    finding = compare_issued([[one, three], [two, one], [three, two]])
    assert finding is not None
    assert "ranks wait for each other" in finding.text


def test_an_allocation_may_fail() -> None:
    def refuse(nbytes: int) -> None:
        raise torch.OutOfMemoryError(f"no {nbytes} bytes")

    device = EmulatedDevice()
    with running(device):
        torch.zeros(8, device=HERE)
        device.allocating = refuse
        with pytest.raises(torch.OutOfMemoryError, match="no 32 bytes"):
            torch.zeros(8, device=HERE)
        torch.zeros(8)
    assert device.allocator.allocated == 0


IMPORTS = "import torch, fsdp_overlap.tools.emulator, fsdp_overlap.tools.simulator, gpu_parts"


@pytest.mark.slow
def test_torch_has_the_device_only_where_it_runs() -> None:
    """Else torch would take it for the accelerator, and not order CUDA's streams in backward."""
    check = "assert str(torch.accelerator.current_accelerator()) in ('None', 'cuda')"
    folders = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", f"{IMPORTS}; {check}"],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr


def test_a_process_that_uses_cuda_has_no_emulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"'emulated'.*in a process of its own"):
        register_device("emulated", torch_module)


def test_a_collective_may_fail_before_it_is_enqueued() -> None:
    def refuse(kind: str) -> None:
        raise RuntimeError(f"no {kind}")

    device = EmulatedDevice(issuing=refuse)
    with fake_ranks(4), running(device), pytest.raises(RuntimeError, match="no all_reduce"):
        dist.all_reduce(torch.zeros(8, device=HERE))
    assert device.issued == []


def test_no_device_is_there_outside() -> None:
    with running(EmulatedDevice()):
        pass
    module = torch.get_device_module("emulated")
    assert not module.is_available()
    with pytest.raises(RuntimeError, match="no emulated device runs"):
        module.current_stream()


def test_what_is_copied_deeply_lies_where_it_did(device: EmulatedDevice) -> None:
    for place in map(torch.device, (HERE, "cpu")):
        whole = torch.zeros(3, device=place)
        copied, part = copy.deepcopy([whole, whole[1:]])
        assert copied.device == part.device == place
        assert copied[1:].data_ptr() == part.data_ptr()
        weight = torch.ones(3, device=place, requires_grad=True)
        (weight * 2).sum().backward()
        gradient = copy.deepcopy(weight).grad
        assert gradient is not None
        assert gradient.device == place
        two = copy.deepcopy(TwoTensor(whole, whole + 1))
        assert two.a.device == two.b.device == place
    assert not device.syncs


def test_so_do_tensors_that_lie_over_a_mesh_and_their_gradients() -> None:
    with running(EmulatedDevice()) as device, fake_ranks(2):
        mesh = dist.init_device_mesh("emulated", (2,))
        tensor = DTensor.from_local(torch.ones(3, device=HERE), mesh, [Shard(0)]).requires_grad_()
        tensor.grad = DTensor.from_local(torch.ones(3, device=HERE), mesh, [Shard(0)])
        copied = copy.deepcopy(tensor)
        assert copied.to_local().device == torch.device(HERE)
        assert isinstance(copied.grad, DTensor)
        assert copied.grad.to_local().device == torch.device(HERE)
        copied.grad.add_(1)
        assert tensor.grad.to_local().tolist() == [1, 1, 1]
    assert kinds(device) == []


def test_in_inference_mode_it_sees_the_same(device: EmulatedDevice) -> None:
    with torch.inference_mode():
        tokens = torch.arange(3).to(HERE)
        assert tokens.device == torch.device(HERE)
        assert torch.nn.functional.linear(torch.ones(2, 2, device=HERE), tokens[:2] * 1.0).numel()
        assert torch.ones(2, device=HERE).cpu().device.type == "cpu"
    assert [sync.operation for sync in device.syncs] == ["_to_copy", "_to_copy"]


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_a_functional_collective_is_to_be_waited_for(values: bool, waits: bool) -> None:
    with running(EmulatedDevice(values=values)) as device, fake_ranks(2):
        source = torch.ones(4, device=HERE)
        gathered = functional.all_gather_into_tensor(source, 2, dist.group.WORLD.group_name)
        assert gathered.shape == (8,)
        if waits:
            functional.wait_tensor(gathered)
        gathered.add_(1)
    assert [(issued.kind, issued.ranks) for issued in device.issued] == [("all_gather", (0, 1))]
    assert kinds(device) == ([] if waits else ["race"])


def test_what_a_functional_collective_reads_is_kept_until_it_is_waited_for() -> None:
    with running(EmulatedDevice()) as device, fake_ranks(2):
        source = torch.ones(MIB, device=HERE)
        reduced = functional.reduce_scatter_tensor(source, "sum", 2, dist.group.WORLD.group_name)
        del source
        torch.ones(MIB, device=HERE)  # would take its memory
        functional.wait_tensor(reduced)
    assert kinds(device) == []


def test_functional_collectives_that_are_not_emulated_are_an_error() -> None:
    with running(EmulatedDevice()), fake_ranks(2):
        source = torch.ones(4, device=HERE)
        with pytest.raises(NotImplementedError, match="broadcast on the emulated device"):
            functional.broadcast(source, 0, dist.group.WORLD.group_name)


def test_memory_that_another_stream_has_used_is_kept_back_until_that_is_done() -> None:
    with running(EmulatedDevice(timing=Seconds({"add_": 2.0}))) as device:
        side = Stream()
        tensor = torch.zeros(MIB, device=HERE)
        address = device.address_of(tensor)
        side.wait_stream(current_stream())
        with stream(side):
            tensor.add_(1)
        tensor.record_stream(side)
        del tensor
        assert device.allocator.allocated == 0
        early = torch.empty(MIB, device=HERE)
        assert device.address_of(early) != address
        side.synchronize()
        late = torch.empty(MIB, device=HERE)
        assert device.address_of(late) == address
    assert kinds(device) == []
