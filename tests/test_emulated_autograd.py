"""What autograd itself does on the emulated device: it makes zeros for gradients that it did not
get."""

from __future__ import annotations

import pytest
import torch

from fsdp_overlap.emulator import EmulatedDevice, running
from support.emulated import HERE


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
