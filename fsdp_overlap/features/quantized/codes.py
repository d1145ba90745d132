"""Numbers in 8 bits: blocks of codes that share a scale.

A block's scale is its largest magnitude over the largest that the codes have, so no code overflows.
A value is its code times the scale. If a block holds a NaN or an infinity, its scale is NaN, and so
are all of its values.
"""

from __future__ import annotations

import math

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""The dtypes of codes, and the largest magnitude of each."""

POWERS_OF_TWO = torch.float8_e8m0fnu
"""The dtype of scales that are powers of two, which multiply without rounding."""

# See at_once().
_CHUNK, _CPU_CHUNK = 64 * 1024 * 1024, 128 * 1024

# Zero plus this is zero where the processor was told to flush denormals.
_denormal = torch.tensor(2.0**-140, device="cpu")

_EXPONENT = {torch.float32: 23, torch.bfloat16: 7}  # where the exponent begins, in bits
_INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def scale_dtype_for(compute_dtype: torch.dtype) -> torch.dtype:
    """Return what scales are kept in where compute has ``compute_dtype``, so that one
    multiplication in that dtype decodes: the product is rounded once."""
    return compute_dtype if compute_dtype in _EXPONENT else torch.float32


def at_once(like: torch.Tensor) -> int:
    """Return how many elements to work on at once: on a CPU what fits a core's cache, else
    so many that a unit takes few launches."""
    return _CPU_CHUNK if like.is_cpu else _CHUNK


def encode(blocks: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``codes`` and ``scales`` from ``blocks``.

    ``blocks`` and ``codes`` have shape ``[rows of blocks, rows, blocks, columns]``, ``scales``
    ``[rows of blocks, blocks]``. All three may have one more dimension before these.
    """
    if blocks.ndim > 4 and blocks[0].numel() > at_once(blocks):
        for each in zip(blocks, codes, scales, strict=True):
            encode(*each)
        return
    step = max(1, at_once(blocks) * len(blocks) // max(1, blocks.numel()))
    for first in range(0, len(blocks), step):
        chunk = slice(first, first + step)
        _encode(blocks[chunk], codes[chunk], scales[chunk])


def _encode(blocks: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    values = blocks.to(torch.float32)
    most = values.abs().amax((-3, -1))
    # A block of zeros, or of the smallest numbers, has a scale that one can divide by.
    exact = most.div_(LARGEST[codes.dtype]).clamp_(min=torch.finfo(torch.float32).tiny)
    if scales.dtype == POWERS_OF_TWO:
        exact = _next_power_of_two(exact)
    scales.copy_(torch.where(exact.isfinite(), exact, math.nan))
    values = values / scales.to(torch.float32)[..., :, None, :, None]
    if codes.dtype == torch.int8:
        values.round_()
    codes.copy_(values)


def _next_power_of_two(numbers: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two that is at least each number, or none for what is not
    finite."""
    mantissa, exponent = torch.frexp(numbers)  # the mantissa is in [0.5, 1)
    power = torch.ldexp(torch.ones_like(numbers), exponent - (mantissa == 0.5).int())
    return torch.where(numbers.isfinite(), power, math.nan)


def decode_into(values: torch.Tensor, codes: torch.Tensor) -> None:
    """Fill ``values`` with the numbers that ``codes`` stand for, without their scales."""
    # torch's conversions on a CPU take 84 and 19 ms for 8 Mi elements, and these 4.
    if codes.dtype == torch.float8_e5m2 and values.is_cpu:  # the upper half of a float16
        upper = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(8)
        values.copy_(upper.view(torch.float16))
        return
    exponent = _EXPONENT.get(values.dtype)
    is_slow = codes.dtype == torch.float8_e4m3fn and values.is_cpu
    if exponent is None or not is_slow or not _denormal.add(0).item():
        values.copy_(codes)
        return
    # The bits are put where the wider format has its own, and the difference of the exponents'
    # biases is multiplied by.
    shift = exponent - 3
    bits = values.view(_INTEGER[values.dtype])
    bits.copy_(codes.view(torch.int8)).bitwise_left_shift_(shift)
    sign = torch.iinfo(bits.dtype).min
    bits.bitwise_and_(sign | (0x7F << shift))
    values.mul_(2.0**120)


def multiply(values: torch.Tensor, scales: torch.Tensor) -> None:
    """Multiply ``values`` in place by their blocks' scales. Shapes end as those of
    :func:`encode`."""
    if scales.dtype != values.dtype:
        scales = scales.to(scale_dtype_for(values.dtype))
    values.mul_(scales[..., :, None, :, None])
