"""Seconds that one operation takes on a device, from its name and from shapes and dtypes.

An operation takes as long as its arithmetic at the rate of large matrix products, or as long as its
bytes at the rate of large copies, whichever is more, and a little for being a kernel at all.
Tensors may be fake, or on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

from fsdp_overlap.tools.emulator.dispatch import tensors_in
from fsdp_overlap.tools.simulator.hardware import Device
from fsdp_overlap.tools.simulator.tables import HardwareError

# Tables of a device's products, by dtype. For all others it is that of float32.
PRODUCTS_OF = {
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "bfloat16",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
}

# Dtypes in which small products are less efficient.
SMALL = ("bfloat16", "float8")

# Operations that launch no kernel, beside those whose schema says that they return a view.
FREE = {
    "aten::_unsafe_view",
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "fsdp::record_grad_output_stream",
}

# The argument that is read only where the others, or the output, say: its bytes do not count.
PICKED_FROM = {
    "aten::embedding": 0,
    "aten::gather": 0,
    "aten::index": 0,
    "aten::index_select": 0,
    "aten::nll_loss_forward": 0,
    "aten::nll_loss_backward": 1,
}

# Operations that write their first argument without reading it.
OVERWRITES = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_"}
OVERWRITES |= {"aten::_foreach_zero_", "aten::normal_", "aten::uniform_"}

# Operations that read, write and keep only the rows that an index names.
SCATTERS = {"aten::index_add_", "aten::index_put_", "aten::_index_put_impl_", "aten::scatter_add_"}

# Attention of GPUs and of a CPU. torch counts them from 2.14 on if keys have fewer heads.
ATTENTION = {
    f"aten::_scaled_dot_product_{which}"
    for which in ("efficient_attention", "flash_attention", "flash_attention_for_cpu")
}

# Products of experts, which torch does not count.
GROUPED_PRODUCTS = {"aten::_grouped_mm", "aten::_scaled_grouped_mm"}


def seconds_of(
    device: Device,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    outputs: Any,
) -> float:
    """Return the seconds on the device of `func(*args, **kwargs)`, an `OpOverload`, which returned
    `outputs`.

    Attention that is causal does half of the arithmetic. Raises HardwareError where the device has
    no rate for products of the dtype.
    """
    kwargs = kwargs or {}
    name = func._schema.name
    if name in FREE or func.is_view or name.startswith("prim::"):
        return 0.0
    moved = bytes_moved(func, args, kwargs, outputs)
    seconds = moved / (device.memory_bandwidth * device.memory_efficiency)
    if flops := flops_of(func, args, kwargs, outputs):
        seconds = max(seconds, flops / rate_of(device, name, args, flops))
    return seconds + device.kernel_seconds


def rate_of(device: Device, name: str, args: Sequence[Any], flops: float) -> float:
    """Return FLOP/s that an operation of so many reaches whose arithmetic is matrix products."""
    dtype = tensors_in(args)[0].dtype
    key = PRODUCTS_OF.get(dtype, "float32")
    if key == "float32" and torch.get_float32_matmul_precision() != "highest":
        key = "tfloat32"
    products = device.products.get(key)
    if products is None:
        raise HardwareError(
            f"{device.name} has no rate for products of {dtype}, as {name} is; write a table "
            f"[products.{key}], or use one of {', '.join(device.products)}"
        )
    if "attention" not in name:
        share = device.small_products.at(flops) if key in SMALL else 1.0
        return products.peak * products.efficiency * share
    attention = device.attentions[device.attention]
    return products.peak * (attention.backward if "backward" in name else attention.forward)


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> float:
    """Return floating-point operations of matrix products, convolutions and attention; 0 of all
    others."""
    name = func._schema.name
    if name in ATTENTION:
        flops = _flops_of_attention(*args[:3])
    elif name.removesuffix("_backward") in ATTENTION:
        # Five products for two: the scores once more, and the gradients of all four operands.
        flops = 2.5 * _flops_of_attention(*args[1:4])
    elif name in GROUPED_PRODUCTS:
        left, right = args[:2]
        # Two matrices are cut along the dimension they are summed over, into one of each group.
        groups = outputs.shape[0] if left.dim() == right.dim() == 2 else 1
        flops = 2 * outputs.numel() * left.shape[-1] // groups
    else:
        formula = flop_counter.flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=outputs) if formula else 0
    return flops / 2 if flops and _argument(func, args, kwargs, "is_causal") else flops


def _flops_of_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """Return the scores, and their product with the values. All have shape ``[batch, heads, tokens,
    width]``."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    return 2 * scores * (query.shape[-1] + value.shape[-1])


def bytes_moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """Return the bytes that an operation reads from the device's memory and writes to it."""
    name = func._schema.name
    if name in SCATTERS:
        # self, then a dimension or not, then indices and values: rows are read and written.
        others = sum(map(size_of, tensors_in(args[1:])))
        return others + 2 * max(map(size_of, tensors_in(args[1:])), default=0)
    skipped = PICKED_FROM.get(name, -1)
    read = [value for at, value in enumerate(args) if at != skipped]
    if name in OVERWRITES:
        read = read[1:]
    if name == "fsdp::all_gather_copy_in":
        return 2 * sum(map(size_of, tensors_in(args[0])))  # into a part of the second
    only_written = {argument.name for argument in func._schema.arguments if argument.is_out}
    read += [value for key, value in kwargs.items() if key not in only_written]
    moved = sum(map(size_of, tensors_in(read)))
    if skipped == 0:
        moved += sum(map(size_of, tensors_in(outputs)))  # what was picked
    return moved + sum(map(size_of, _written(func, args, kwargs, outputs)))


def _written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any
) -> Iterator[torch.Tensor]:
    """Yield outputs, and arguments that are edited; each once. Fused optimizers say that they edit
    gradients, and do so only with a gradient scaler."""
    edited = [
        kwargs.get(argument.name, args[at] if at < len(args) else None)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name != "grads"
    ]
    seen: set[int] = set()
    for tensor in tensors_in([outputs, edited]):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[at] if at < len(args) else argument.default_value)
    return None


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in memory: expanded dimensions repeat the same ones."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or not size else 1
    return numel * tensor.element_size()
