"""Products of matrices that are symmetric, by a Triton kernel, which computes half of the tiles.

Imported only where Triton is there and the product is large enough that it pays.
"""

# Triton reads annotations as code: "tl.constexpr" is all that it takes.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import warnings
from functools import cache

import torch
import triton
import triton.language as tl

TILE = 128
"""The rows and columns of the product that a program of the kernel computes."""
_BYTES = 128
"""What a program reads at once of each row and column."""


@triton.jit
def symmetric_product_kernel(
    left,
    right,
    added,
    product,
    rows,
    left_batch,
    left_row,
    left_column,
    right_batch,
    right_row,
    right_column,
    added_batch,
    added_row,
    added_column,
    alpha,
    beta,
    ADDS: tl.constexpr,
    INNER: tl.constexpr,
    WIDENS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute a tile on or above the diagonal, and write it there and mirrored below.

    The names with ``_batch``, ``_row`` and ``_column`` are strides. ``product`` is contiguous.
    ``INNER``: columns of ``left``. ``WIDENS``: multiply numbers of 16 bits in float32.
    """
    tiles = tl.cdiv(rows, TILE)
    of_matrix = tiles * (tiles + 1) // 2
    matrix = (tl.program_id(0) // of_matrix).to(tl.int64)
    number = tl.program_id(0) % of_matrix
    # The triangle is folded to a rectangle. Each of its rows has two rows of tiles: one of the
    # lower half, from right to left, and then one of the upper half, from the diagonal on.
    is_even = 1 - tiles % 2
    row = number // (tiles + is_even)
    place = number % (tiles + is_even)
    is_upper = place >= row + is_even
    down = tl.where(is_upper, row, tiles - row - is_even)
    across = tl.where(is_upper, place - is_even, tiles - 1 - place)

    own_rows = down * TILE + tl.arange(0, TILE)
    own_columns = across * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    # What is read twice at the edges is not written.
    left += matrix * left_batch + (own_rows % rows)[:, None] * left_row
    left += depth[None, :] * left_column
    right += matrix * right_batch + (own_columns % rows)[None, :] * right_column
    right += depth[:, None] * right_row
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, INNER, DEPTH):
        if INNER % DEPTH == 0:
            of_left, of_right = tl.load(left), tl.load(right)
        else:
            is_there = depth < INNER - start
            of_left = tl.load(left, mask=is_there[None, :], other=0.0)
            of_right = tl.load(right, mask=is_there[:, None], other=0.0)
        if WIDENS:
            of_left, of_right = of_left.to(tl.float32), of_right.to(tl.float32)
        total = tl.dot(of_left, of_right, total, input_precision="ieee")
        left += DEPTH * left_column
        right += DEPTH * right_row

    total *= alpha
    mask = (own_rows < rows)[:, None] & (own_columns < rows)[None, :]
    if ADDS:
        added += matrix * added_batch + own_rows[:, None] * added_row
        added += own_columns[None, :] * added_column
        total += beta * tl.load(added, mask=mask, other=0.0).to(tl.float32)
    result = total.to(product.dtype.element_ty)
    mirrored = tl.trans(result)
    product += matrix * rows * rows
    if down == across:
        # Factors that commute but for rounding give products that are symmetric but for rounding.
        result = tl.where(own_rows[:, None] <= own_columns[None, :], result, mirrored)
    else:
        below = product + own_columns[:, None] * rows + own_rows[None, :]
        tl.store(below, mirrored, mask=tl.trans(mask))
    tl.store(product + own_rows[:, None] * rows + own_columns[None, :], result, mask=mask)


_IS_INTERPRETED = not isinstance(symmetric_product_kernel, triton.JITFunction)
"""Triton's interpreter multiplies no bfloat16."""


def symmetric_product(
    left: torch.Tensor,
    right: torch.Tensor,
    added: torch.Tensor | None = None,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Return ``alpha * left @ right + beta * added`` of each matrix of a batch, which must be
    symmetric but for rounding, and is made symmetric to the bit.

    It is summed in float32, and rounded once. Matrices have fewer than 2**31 elements.
    """
    count, rows, inner = left.shape
    product = left.new_empty(count, rows, rows)
    depth = _BYTES // left.itemsize
    summand = left if added is None else added
    tiles = triton.cdiv(rows, TILE)
    symmetric_product_kernel[(count * tiles * (tiles + 1) // 2,)](
        *(left, right, summand, product, rows),
        *(*left.stride(), *right.stride(), *summand.stride()),
        *(alpha, beta),
        ADDS=added is not None,
        INNER=inner,
        WIDENS=_IS_INTERPRETED,
        TILE=TILE,
        DEPTH=depth,
        # On Hopper two programs fit on a multiprocessor: one multiplies while the other writes.
        num_warps=4 if left.itemsize == 2 else 8,
        num_stages=3,
    )
    return product


@cache
def works_on(device: torch.device) -> bool:
    """Return whether the kernel runs on ``device``, and computes there what it should. Else warn
    once: for example, Triton needs a compiler of C."""
    factor = torch.arange(2 * (TILE + 1) * 3, device="cpu").remainder_(5).sub_(2)
    factor = factor.view(2, TILE + 1, 3).bfloat16()  # whose products are exact
    expected = torch.baddbmm(factor @ factor.mT, factor, factor.mT, beta=2.0, alpha=-1.0)
    there = factor.to(device)
    try:
        gram = symmetric_product(there, there.mT)
        found = symmetric_product(there, there.mT, gram, beta=2.0, alpha=-1.0).cpu()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    else:
        if torch.equal(found, expected):
            return True
        why = "it computes other numbers than torch does"
    warnings.warn(
        f"Triton's kernel for symmetric products does not work on {device}, so Muon multiplies by "
        f"torch's, which compute twice as many numbers: {why}",
        stacklevel=2,
    )
    return False
