"""Triton kernels that encode and decode blocks of codes, to the bit as ``quantization`` on a CPU.

A program takes a tile of ``SEGMENTS`` times ``COLUMNS`` elements of a run. A run consists of
blocks, and a segment is one row of one block, which is contiguous. ``tiles`` says which run a
program works on, and a row of ``runs``, of :data:`FIELDS` numbers, where that lies.

Conversions of float8 and bfloat16 are in integers: GPUs before compute capability 8.9 have none of
float8, and Triton's interpreter rounds otherwise. Tensors of these dtypes come as integers.
Products must not be fused with sums: launch with ``enable_fp_fusion=False``. Where values and codes
of runs begin, and the columns of blocks, are multiples of ``ALIGN``, so that threads load many
elements at once.
"""

# Triton reads annotations as code: "tl.constexpr" is all that it takes.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

FIELDS = 10
"""The numbers of a run: where its values, codes and scales begin; its first block in the launch;
rows of a block, blocks in a row, columns of a block; its segments; tiles next to each other in a
segment; and its first tile."""

_FIELDS = tl.constexpr(FIELDS)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_TINY = tl.constexpr(0x00800000)  # the smallest normal float32
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def measure_blocks(
    values,
    most,
    tiles,
    runs,
    VALUES: tl.constexpr,
    ALIGN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Raise ``most`` to the largest magnitude of each block, as the bits of a float32. As integers
    these have the order of the numbers, with infinity and then NaN after all others."""
    run = runs + tl.load(tiles + tl.program_id(0)) * _FIELDS
    segment, _, offset, mask, block = _place(run, ALIGN, SEGMENTS, COLUMNS)
    numbers = _load(values + tl.multiple_of(tl.load(run), ALIGN) + offset, mask, VALUES)
    bits = numbers.to(tl.float32).to(tl.int32, bitcast=True) & _MAGNITUDE
    is_there = segment < tl.load(run + 7)
    tl.atomic_max(most + tl.load(run + 3) + block, tl.max(bits, 1), mask=is_there)


@triton.jit
def encode_blocks(
    values,
    codes,
    scales,
    most,
    tiles,
    runs,
    VALUES: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fill ``codes`` and ``scales`` from ``values``. If blocks are ``WHOLE`` in a tile, their
    magnitudes are taken there, else from ``most``."""
    run = runs + tl.load(tiles + tl.program_id(0)) * _FIELDS
    segment, first_column, offset, mask, block = _place(run, ALIGN, SEGMENTS, COLUMNS)
    numbers = _load(values + tl.multiple_of(tl.load(run), ALIGN) + offset, mask, VALUES)
    if SCALES != "":
        numbers = numbers.to(tl.float32)
        is_there = segment < tl.load(run + 7)
        if WHOLE:
            largest = tl.max(numbers.to(tl.int32, bitcast=True) & _MAGNITUDE, 1)
        else:
            largest = tl.load(most + tl.load(run + 3) + block, mask=is_there, other=0)
        exact = tl.math.div_rn(largest.to(tl.float32, bitcast=True), LARGEST)
        bits = tl.maximum(exact.to(tl.int32, bitcast=True), _TINY)
        if SCALES == "float8_e8m0fnu":  # the next power of two
            bits = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)) << 23
        elif SCALES == "bfloat16":
            bits = _rounded(bits) << 16
        bits = tl.where(largest < _INFINITY, bits, _NAN)
        numbers = tl.math.div_rn(numbers, bits.to(tl.float32, bitcast=True)[:, None])
        # The first tile of a block has its scale.
        rows, in_row = tl.load(run + 4), tl.load(run + 5)
        is_first = is_there & ((segment // in_row) % rows + first_column == 0)
        targets = scales + tl.load(run + 2) + block
        if SCALES == "float8_e8m0fnu":
            tl.store(targets, (bits >> 23).to(tl.uint8), mask=is_first)
        elif SCALES == "bfloat16":
            tl.store(targets, (bits >> 16).to(tl.int16), mask=is_first)
        else:
            tl.store(targets, bits.to(tl.float32, bitcast=True), mask=is_first)
    _store(codes + tl.multiple_of(tl.load(run + 1), ALIGN) + offset, numbers, mask, CODES)


@triton.jit(do_not_specialize=["rank", "code_stride", "scale_stride"])
def decode_blocks(
    codes,
    scales,
    own,
    values,
    tiles,
    runs,
    rank,
    code_stride,
    scale_stride,
    VALUES: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    RANKS: tl.constexpr,
    ALIGN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fill ``values`` with what codes and scales stand for. With ``RANKS``, with the sum of what
    these have sent, in their order, of which ``rank`` counts as ``own``."""
    run = runs + tl.load(tiles + tl.program_id(0)) * _FIELDS
    segment, _, offset, mask, block = _place(run, ALIGN, SEGMENTS, COLUMNS)
    is_there = segment < tl.load(run + 7)
    codes += tl.multiple_of(tl.load(run + 1), ALIGN)
    scales += tl.load(run + 2)
    value = tl.multiple_of(tl.load(run), ALIGN)
    if RANKS:
        mine = _load(own + value + offset, mask, VALUES)
        numbers = tl.zeros_like(mine)
        for sender in range(RANKS):
            sent = _decode(codes + offset, scales + block, mask, is_there, VALUES, CODES, SCALES)
            numbers += tl.where(sender == rank, mine, sent)
            codes += code_stride
            scales += scale_stride
    else:
        numbers = _decode(codes + offset, scales + block, mask, is_there, VALUES, CODES, SCALES)
    _store(values + value + offset, numbers, mask, VALUES)


@triton.jit
def _place(run, ALIGN: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the segments and the first column of a tile, where its elements lie in the run, which
    of them there are, and the block of each segment."""
    rows, in_row = tl.load(run + 4), tl.load(run + 5)
    width = tl.multiple_of(tl.load(run + 6), ALIGN)
    across = tl.load(run + 8)
    tile = tl.program_id(0) - tl.load(run + 9)
    segment = (tile // across) * SEGMENTS + tl.arange(0, SEGMENTS)
    first_column = (tile % across) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    mask = (segment < tl.load(run + 7))[:, None] & (column < width)[None, :]
    block = segment // (rows * in_row) * in_row + segment % in_row
    return segment, first_column, segment[:, None] * width + column[None, :], mask, block


@triton.jit
def _decode(
    codes,
    scales,
    mask,
    is_there,
    VALUES: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Return numbers in float32, or float64 if values are."""
    numbers = _load(codes, mask, CODES)
    if VALUES == "float64":
        numbers = numbers.to(tl.float64)
    if SCALES != "":
        if SCALES == "float8_e8m0fnu":
            exponent = tl.load(scales, mask=is_there, other=0).to(tl.int32)
            bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
            scale = tl.where(exponent == 255, _NAN, bits).to(tl.float32, bitcast=True)
        else:
            scale = _load(scales, is_there, SCALES)
        numbers = numbers * scale[:, None]
    return numbers


@triton.jit
def _load(pointers, mask, KIND: tl.constexpr):
    """Return numbers of the dtype ``KIND`` in float32, or float64 if that is theirs."""
    loaded = tl.load(pointers, mask=mask, other=0)
    if KIND == "bfloat16":
        numbers = (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "float8_e5m2":  # the upper half of a float16
        numbers = (loaded.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "float8_e4m3fn":
        code = loaded.to(tl.int32)
        magnitude = code & 0x7F
        bits = (magnitude << 20) + (120 << 23)
        denormal = magnitude.to(tl.float32) * 0.001953125
        bits = tl.where(magnitude < 8, denormal.to(tl.int32, bitcast=True), bits)
        bits = tl.where(magnitude == 0x7F, _NAN, bits)
        numbers = (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    elif KIND == "float64":
        numbers = loaded
    else:
        numbers = loaded.to(tl.float32)
    return numbers


@triton.jit
def _store(pointers, numbers, mask, KIND: tl.constexpr):
    """Write numbers in the dtype ``KIND``, rounded to the nearest and ties to even."""
    if KIND == "float64":
        tl.store(pointers, numbers.to(tl.float64), mask=mask)
    else:
        narrow = numbers.to(tl.float32)
        if KIND == "bfloat16":
            bits = _rounded(narrow.to(tl.int32, bitcast=True))
            tl.store(pointers, tl.where(narrow == narrow, bits, 0x7FC0).to(tl.int16), mask=mask)
        elif KIND == "float8_e4m3fn":
            tl.store(pointers, _to_float8(narrow, 3, 7, 0x43F00000, 0x7F), mask=mask)
        elif KIND == "float8_e5m2":
            tl.store(pointers, _to_float8(narrow, 2, 15, 0x47800000, 0x7C), mask=mask)
        elif KIND == "int8":
            # The sum has no places for fractions, so it is rounded.
            integers = (narrow + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
            tl.store(pointers, tl.where(narrow == narrow, integers, 0).to(tl.int8), mask=mask)
        elif KIND == "float16":
            tl.store(pointers, narrow.to(tl.float16), mask=mask)
        else:
            tl.store(pointers, narrow, mask=mask)


@triton.jit
def _rounded(bits):
    """Return the upper half of the bits of a float32, rounded."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _to_float8(
    numbers,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    OVERFLOWS: tl.constexpr,
    OVERFLOW: tl.constexpr,
):
    """Return the codes of numbers. From the bits ``OVERFLOWS`` on they are ``OVERFLOW``."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    NORMAL: tl.constexpr = (128 - BIAS) << 23
    # Next to this number the places of a float32 end where those of a denormal code do.
    ALIGNED: tl.constexpr = (128 - BIAS + SHIFT) << 23
    ALIGNED_NUMBER: tl.constexpr = 2.0 ** (1 - BIAS + SHIFT)
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    sums = magnitude.to(tl.float32, bitcast=True) + ALIGNED_NUMBER
    denormal = sums.to(tl.int32, bitcast=True) - ALIGNED
    half = (1 << (SHIFT - 1)) - 1 + ((magnitude >> SHIFT) & 1)
    normal = (magnitude - ((127 - BIAS) << 23) + half) >> SHIFT
    code = tl.where(magnitude < NORMAL, denormal, normal)
    code = tl.where(magnitude >= OVERFLOWS, OVERFLOW, code)
    code = tl.where(magnitude > _INFINITY, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
