"""What autograd itself does on the emulated device: it makes zeros for gradients that it did not
get, and calls hooks for tensors that it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fsdp_overlap.tools.emulator import (
    EmulatedDevice,
    Event,
    Stream,
    current_stream,
    running,
    stream,
)
from support.emulated import HERE, kinds


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_zeros_for_missing_gradients_lie_where_the_others_do(values: bool, index: int) -> None:
    with running(EmulatedDevice(values=values)) as device:
        tensor = torch.ones(4, 6, device=HERE, requires_grad=True)
        part = tensor.chunk(3, dim=1)[index]
        part.sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.device == torch.device(HERE)
        expected = torch.zeros(4, 6)
        expected[:, 2 * index : 2 * index + 2] = 1
        if values:
            assert torch.equal(tensor.grad.cpu(), expected)
    assert not device.findings


def test_those_of_a_node_on_the_host_lie_on_the_host() -> None:
    with running(EmulatedDevice()) as device:
        tensor = torch.ones(4, device=HERE, requires_grad=True)
        on_host = tensor.cpu()
        on_host.retain_grad()
        on_host.chunk(2)[0].sum().backward()
        assert on_host.grad is not None
        assert on_host.grad.device.type == "cpu"
        assert on_host.grad.tolist() == [1, 1, 0, 0]
    assert not device.findings


@pytest.mark.parametrize("values", [True, False])
def test_those_of_a_node_on_the_device_lie_there_if_the_loss_is_on_the_host(values: bool) -> None:
    with running(EmulatedDevice(values=values)) as device:
        tensor = torch.ones(4, device=HERE, requires_grad=True)
        tensor.chunk(2)[0].sum().cpu().backward()
        assert tensor.grad is not None
        assert tensor.grad.device == torch.device(HERE)
        if values:
            assert tensor.grad.tolist() == [1, 1, 0, 0]
    assert not device.findings


def test_gradients_go_back_where_a_tensor_was_moved_from() -> None:
    with running(EmulatedDevice()) as device:
        on_host, on_device = nn.Linear(4, 4), nn.Linear(4, 4).to(HERE)
        output = on_device(on_host(torch.ones(2, 4)).to(HERE)).square()
        output.mean().cpu().backward()
        assert on_device.weight.grad is not None
        assert on_device.weight.grad.device == torch.device(HERE)
        assert on_host.weight.grad is not None
        assert on_host.weight.grad.device.type == "cpu"
        waits = [sync.operation for sync in device.syncs]
        assert waits[-2:] == ["_to_copy", "_to_copy"]  # as torch: backward blocks
    assert not device.findings


def test_what_a_hook_makes_on_the_host_lies_there() -> None:
    made = []

    def hook(gradient: torch.Tensor) -> None:
        made.append(torch.zeros(2))

    with running(EmulatedDevice()):
        tensor = torch.ones(4, device=HERE, requires_grad=True)
        doubled = tensor * 2
        doubled.register_hook(hook)
        doubled.sum().backward()
        assert made[0].device.type == "cpu"


class Offload:
    """Keeps saved tensors on the host, by copies on a stream of their own."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        self.side = Stream()

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        assert tensor.device == torch.device(HERE)
        self.side.wait_stream(current_stream())
        with stream(self.side):
            copy = tensor.to("cpu", non_blocking=True)
        tensor.record_stream(self.side)  # type: ignore[arg-type]
        return copy, self.side.record_event()

    def unpack(self, packed: tuple[torch.Tensor, Event]) -> Any:
        copy, done = packed
        assert copy.device.type == "cpu"
        if self.waits:
            current_stream().wait_event(done)
        return copy.to(HERE, non_blocking=True)


@pytest.mark.parametrize("waits", [True, False])
def test_what_hooks_do_to_saved_tensors_is_seen(waits: bool) -> None:
    with running(EmulatedDevice()) as device:
        offload = Offload(waits)
        tensor = torch.ones(4, device=HERE, requires_grad=True)
        with saved_tensors_hooks(offload.pack, offload.unpack):
            output = (tensor * tensor).exp()
        output.sum().backward()
    assert set(kinds(device)) == (set() if waits else {"race"})


def test_torchs_own_offloading_has_no_race() -> None:
    with running(EmulatedDevice()) as device:
        tensor = torch.ones(4, device=HERE, requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            output = (tensor * tensor).exp()
        output.sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.device == torch.device(HERE)
    assert not device.findings
