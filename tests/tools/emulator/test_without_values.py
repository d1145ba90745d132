"""The emulated device without values does what it does with them, for models of any size."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_overlap import PerTensor
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.optim import AdamW, Muon
from fsdp_overlap.tools.emulator import EmulatedDevice, active, fake_ranks, running
from fsdp_overlap.tools.torch_internals import disabled_torch_function
from support.emulated import Program
from support.zoo import ZOO

HERE = "emulated"
MODELS = (
    "nested units",
    "tied parameters",
    "frozen and partly frozen units",
    "views edited in place",
    "a layer that runs several times",
    "checkpointed, reentrant",
    "checkpointed inside",
    "dynamic order",
)
PROGRAMS: dict[str, dict[str, Any]] = {name: {"name": name} for name in MODELS}
PROGRAMS |= {
    "rows": {"layout": PerTensor()},
    "ragged": {"layout": TensorAtomic()},
    "copies": {"dims": (2, 2)},
    "Muon": {"optimizer": Muon},
    "torch's AdamW": {"optimizer": torch.optim.AdamW},
}


def train(build: Callable[[], nn.Module], steps: int = 3, **options: Any) -> int:
    """How many operations all steps but the first take. The device is to be made on."""

    def here() -> nn.Module:
        with torch.device(HERE):
            return build()

    program = Program(build=here, **options)
    program.train(1)
    before = active().operations
    program.train(steps - 1)
    return active().operations - before


def seen(name: str, values: bool) -> dict[str, object]:
    options = PROGRAMS[name]
    build, _ = ZOO[options.get("name", "layers")]
    with fake_ranks(4), running(EmulatedDevice(values=values)) as device:
        operations = train(build, **options)
    return {
        "collectives": [(issued.kind, issued.ranks) for issued in device.issued],
        "operations": operations,
        "memory": (device.allocator.peak_allocated, device.allocator.reserved),
        "findings": list(map(str, device.findings)),
        "waits of the host": len(device.syncs),
    }


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_do_the_same_with_values_and_without(name: str) -> None:
    assert seen(name, values=False) == seen(name, values=True)


def test_what_the_host_reads_is_zero_but_for_whole_numbers_of_its_own() -> None:
    with running(EmulatedDevice(values=False)) as device:
        assert torch.ones(2, device=HERE).tolist() == [0.0, 0.0]
        assert torch.full((), 7.0, device=HERE).cpu().item() == 0.0
        assert torch.tensor([1.5], device=HERE).tolist() == [0.0]
        assert torch.tensor([1, 2], device=HERE).add(1).tolist() == [2, 3]
        assert torch.ones(2).to(HERE).mul(3).tolist() == [3.0, 3.0]
        mixed = torch.ones(2, device=HERE) + torch.tensor([1, 2], device=HERE)
        assert mixed.device.type == HERE
        assert mixed.tolist() == [0.0, 0.0]
    assert len(device.syncs) >= 6


class Copying(torch.Tensor):
    """What its operations do runs below autograd, which takes nothing of it apart."""

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].inside.t().contiguous()


def test_a_copy_that_a_class_makes_of_a_view_is_on_the_device() -> None:
    make: Any = torch.Tensor
    with running(EmulatedDevice(values=False)) as device:
        copying = make._make_wrapper_subclass(Copying, (2, 3))
        copying.inside = torch.empty(2, 3, device=HERE)
        before = device.operations
        assert device.is_here(torch.neg(copying))
        assert device.operations == before + 1


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": torch.Tensor.item,
    "float": float,
    "int": int,
    "format": "{:.1f}".format,
    "tolist": torch.Tensor.tolist,
    "cpu": torch.Tensor.cpu,
    "to": lambda tensor: tensor.to("cpu", torch.float64),
}


@pytest.mark.parametrize("name", READS)
def test_the_host_reads_zero_and_waits_as_for_a_value(name: str) -> None:
    waits = []
    for values in (False, True):
        with running(EmulatedDevice(values=values)) as device:
            zero = torch.zeros((), device=HERE)
            before = device.operations
            found = READS[name](zero)
            waits.append((found, device.operations - before, len(device.syncs)))
    assert waits[0] == waits[1]


def test_a_branch_on_what_has_no_value_is_an_error() -> None:
    with running(EmulatedDevice(values=False)):
        with pytest.raises(RuntimeError, match=r"depends on a value \(.*test_without_values"):
            assert torch.zeros((), device=HERE)
        assert torch.tensor(1, device=HERE)


def test_attention_keeps_no_matrix() -> None:
    with running(EmulatedDevice(values=False)) as device:
        query, key = (torch.empty(1, heads, 4096, 64, device=HERE) for heads in (8, 2))
        query.requires_grad_()
        before = device.allocator.peak_allocated
        output = nn.functional.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=True
        )
        output.sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape
        assert device.allocator.peak_allocated - before < 8 * query.nbytes


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 48])
def test_attention_with_a_mask_keeps_its_bias_alone(dtype: torch.dtype, width: int) -> None:
    """As GPUs' memory-efficient kernel wants it: in the dtype of queries, once for all heads."""
    tokens, heads = 4096, 8
    with running(EmulatedDevice(values=False)) as device:
        query = torch.empty(1, heads, tokens, 64, device=HERE, dtype=torch.bfloat16)
        value = query.new_empty(1, heads, tokens, width).requires_grad_()
        mask = torch.empty(1, 1, tokens, tokens, device=HERE, dtype=dtype)
        before = device.allocator.peak_allocated
        output = nn.functional.scaled_dot_product_attention(
            query=query, key=query, value=value, attn_mask=mask
        )
        assert output.shape == value.shape
        output.sum().backward()
        assert value.grad is not None
        taken = device.allocator.peak_allocated - before
        bias = 2 * tokens**2 if dtype is torch.bool else 0
        assert bias <= taken < bias + 8 * query.nbytes


ATTENDED: dict[str, tuple[list[int], list[int], list[int], dict[str, Any]]] = {
    "no batch": ([8, 32, 16], [8, 32, 16], [8, 32, 16], {}),
    "no batch, a mask": ([8, 32, 16], [8, 32, 16], [8, 32, 16], {"mask": torch.bool}),
    "wide values": ([2, 4, 32, 16], [2, 4, 32, 16], [2, 4, 32, 24], {}),
    "wide values, a mask": ([2, 4, 32, 16], [2, 4, 32, 16], [2, 4, 32, 24], {"mask": torch.bool}),
    "keys of groups": ([2, 4, 32, 16], [2, 2, 32, 16], [2, 2, 32, 16], {"enable_gqa": True}),
    "keys of groups, a mask": (
        [2, 4, 32, 16],
        [2, 2, 32, 16],
        [2, 2, 32, 16],
        {"enable_gqa": True, "mask": torch.bool},
    ),
    "other keys": ([2, 4, 32, 16], [2, 4, 20, 16], [2, 4, 20, 16], {"mask": torch.float32}),
    "fewer heads": ([2, 4, 32, 16], [2, 2, 32, 16], [2, 2, 32, 16], {}),
    "fewer heads, a mask": ([2, 4, 32, 16], [2, 2, 32, 16], [2, 2, 32, 16], {"mask": torch.bool}),
    "a mask of numbers": ([2, 4, 32, 16], [2, 4, 32, 16], [2, 4, 32, 16], {"mask": torch.int32}),
}


@pytest.mark.parametrize("name", ATTENDED)
def test_attention_gives_what_it_gives_on_the_host(name: str) -> None:
    *sizes, options = ATTENDED[name]

    def attend(where: str) -> list[torch.Size] | type[Exception]:
        tensors = [torch.zeros(size, device=where, requires_grad=True) for size in sizes]
        given = dict(options)
        if dtype := given.pop("mask", None):
            lengths = sizes[0][-2], sizes[1][-2]
            given["attn_mask"] = torch.zeros(lengths, device=where, dtype=dtype)
        try:
            output = nn.functional.scaled_dot_product_attention(*tensors, **given)
            output.sum().backward()
        except RuntimeError as error:
            return type(error)
        return [output.shape, *(tensor.grad.shape for tensor in tensors if tensor.grad is not None)]

    with running(EmulatedDevice(values=False)):
        found = attend(HERE)
    assert found == attend("cpu")


DROPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "function": nn.functional.dropout,
    "module": nn.Dropout(0.1),
    "C++": lambda x: torch.dropout(x, 0.1, True),
    "by names": lambda x: torch.dropout(input=x, p=0.1, train=True),
}


@pytest.mark.parametrize("name", DROPS)
def test_dropout_keeps_a_byte_an_element(name: str) -> None:
    with running(EmulatedDevice(values=False)) as device:
        x = torch.empty(1 << 20, device=HERE, requires_grad=True)
        before, operations = device.allocator.allocated, device.operations
        output = DROPS[name](x)
        assert device.operations == operations + 1
        assert device.allocator.allocated - before == output.nbytes + x.numel()
        output.sum().backward()
        assert x.grad is not None


def test_dropout_that_drops_nothing_does_nothing() -> None:
    with running(EmulatedDevice(values=False)) as device:
        x = torch.empty(4, device=HERE)
        before = device.operations
        assert nn.Dropout(0.1).eval()(x) is x
        assert device.operations == before


def test_a_model_of_a_trillion_bytes_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fake_ranks(1024), running(EmulatedDevice(values=False)) as device:
        train(partial(_wide, 100_000), steps=1, name="root only", optimizer=AdamW)
        assert device.allocator.peak_allocated > 1e11
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def _wide(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(50, width), *(nn.Linear(width, width) for _ in range(12)), nn.Linear(width, 50)
    )
