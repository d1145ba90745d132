"""Newton-Schulz iterations, which make each matrix of a batch orthogonal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch

Polynomial = tuple[float, float, float]
"""``(a, b, c)`` of ``a x + b x^3 + c x^5``, which a step applies to every singular value."""

# These are optimal: they raise the singular value 1e-3 to 1 in the fewest steps.
_POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

COEFFICIENTS: dict[str, tuple[Polynomial, ...]] = {
    # Keller Jordan, kellerjordan.github.io/posts/muon: the steepest polynomial at zero that keeps
    # singular values near 1, between about 0.7 and 1.2. Every step uses it.
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # Amsel et al., "The Polar Express", arXiv 2505.16932: the best polynomial for each step. They
    # make singular values converge to 1. The last one repeats. The others have the paper's margin
    # for rounding.
    "polar_express": (
        *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
}

# Integers of the same size, and the bits of the exponent in them.
_EXPONENTS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}

# Smaller batches than these do not fill a GPU with tiles of their symmetric products.
_KERNEL_ROWS = 512
_KERNEL_ELEMENTS = 1 << 22

# The largest error of a singular value's square that a segment of steps may end with. It is less
# than the error that Newton-Schulz itself leaves.
_LARGEST_ERROR = 0.02


def polynomials(
    coefficients: str | Sequence[float] | Sequence[Polynomial], steps: int
) -> list[Polynomial]:
    """Return the polynomial of each step. ``coefficients`` is the name of a preset, one polynomial
    for all steps, or one for each step, of which the last repeats.

    Raises:
        ValueError: ``coefficients`` is none of these, or ``steps`` is not positive.
    """
    if steps < 1:
        raise ValueError(f"ns_steps={steps}: use 1 or more")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            names = " or ".join(map(repr, COEFFICIENTS))
            raise ValueError(f"ns_coefficients={coefficients!r}: use {names}, or numbers")
        by_step: Sequence[Polynomial] = COEFFICIENTS[coefficients]
    else:
        rows: list[Any] = list(coefficients)
        if all(isinstance(row, (int, float)) for row in rows):
            rows = [rows]
        if any(len(row) != 3 for row in rows):
            raise ValueError(f"ns_coefficients={coefficients!r}: each step takes 3 numbers a, b, c")
        by_step = [tuple(map(float, row)) for row in rows]  # type: ignore[misc]
    return [by_step[min(step, len(by_step) - 1)] for step in range(steps)]


def orthogonalize(
    matrices: torch.Tensor, steps: Sequence[Polynomial], eps: float = 0.0
) -> torch.Tensor:
    """Return ``U V^T`` for each matrix ``U S V^T``, as nearly as ``steps`` come to it.

    ``matrices`` has shape ``[count, m, n]`` and is overwritten. Products have its dtype. The cost
    is lowest if ``m <= n``. Before the first step, each matrix is divided by its norm, or by
    ``eps`` if that is larger. Zeros stay zeros.
    """
    x = _divide_by_norm(matrices, eps)
    _, m, n = x.shape
    # Each further step of a segment takes three products of m x m matrices, in place of two with x.
    most = _LARGEST_ERROR / _rounding(x) if n > 1.5 * m else 1.0
    for segment in _segments(steps, most):
        x = _advance(x, segment)
    return x


def _divide_by_norm(matrices: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each matrix by its norm, or by ``eps`` if that is larger, and return them."""
    # Squares of elements below 1e-19 or above 1e19 leave float32's range. A power of two near the
    # largest element brings all into range, and rounds nothing.
    least, most = matrices.amin((1, 2), keepdim=True), matrices.amax((1, 2), keepdim=True)
    scale = _power_of_two(torch.maximum(least.neg_(), most))  # vector_norm is slow on the CPU
    norm = torch.linalg.matrix_norm(matrices.div_(scale), keepdim=True)
    # The least norm now is that of the least subnormal number, unless all elements are zero.
    norm.clamp_(min=torch.finfo(norm.dtype).eps)
    return matrices.div_(torch.maximum(norm, eps / scale) if eps else norm)


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two, at least the least normal number, that is not above each
    element of ``x``, which is overwritten and not negative. That of inf and nan is inf."""
    integers, exponent = _EXPONENTS[x.dtype]  # torch.frexp takes no bfloat16 on CUDA
    x.view(integers).bitwise_and_(exponent)
    return x.clamp_(min=torch.finfo(x.dtype).tiny)


def _rounding(x: torch.Tensor) -> float:
    """Return the relative error with which a product rounds its factors."""
    backend = torch.backends.cuda if x.is_cuda else torch.backends.mkldnn
    is_coarse = x.dtype == torch.float32 and backend.matmul.fp32_precision in ("tf32", "bf16")
    return torch.finfo(torch.bfloat16 if is_coarse else x.dtype).eps / 2


def _segments(steps: Sequence[Polynomial], most: float) -> Iterator[Sequence[Polynomial]]:
    """Divide ``steps`` into segments. All steps of a segment work on one Gram matrix.

    Rounding errors of the Gram matrix matter for singular values whose squares are as small as the
    errors. Each step multiplies the errors by ``a**2``. A segment ends before they have grown by
    more than a factor of ``most``, but has at least one step.
    """
    first, growth = 0, 1.0
    for index, (a, _, _) in enumerate(steps):
        growth *= a * a
        if index > first and growth > most:
            yield steps[first:index]
            first, growth = index, a * a
    yield steps[first:]


class SymmetricProduct(Protocol):
    """Returns ``alpha * left @ right + beta * added`` of a batch, which is symmetric."""

    def __call__(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        added: torch.Tensor | None = None,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
    ) -> torch.Tensor: ...


def _advance(x: torch.Tensor, steps: Sequence[Polynomial]) -> torch.Tensor:
    """Return ``x`` after ``steps``, each of which multiplies it by a polynomial of its Gram
    matrix."""
    symmetric = _symmetric_product_for(x)
    gram = symmetric(x, x.mT)
    factor = x
    for index, (a, b, c) in enumerate(steps):
        change = symmetric(gram, gram, gram, beta=b, alpha=c)
        is_last = index == len(steps) - 1
        if index:  # polynomials of one matrix, whose products are symmetric
            factor = symmetric(change, factor, factor, beta=a)
        elif is_last:
            factor = torch.baddbmm(factor, change, factor, beta=a)
        else:
            factor = change.clone()
            factor.diagonal(dim1=1, dim2=2).add_(a)
        if not is_last:
            half = symmetric(change, gram, gram, beta=a)
            gram = symmetric(half, change, half, beta=a)
    return factor if len(steps) == 1 else torch.bmm(factor, x)


def _symmetric_product_for(x: torch.Tensor) -> SymmetricProduct:
    """Return what is fastest for matrices with as many rows as those of ``x``."""
    count, rows, columns = x.shape
    if (
        x.device.type == "cuda"
        and torch.version.hip is None
        and x.itemsize == 2
        and rows >= _KERNEL_ROWS
        and count * rows * rows >= _KERNEL_ELEMENTS
        and rows * columns < 2**31
        and _has_triton()
    ):
        from fsdp_overlap.optim import symmetric_products

        if symmetric_products.works_on(x.device):
            return symmetric_products.symmetric_product
    return _whole_product


def _whole_product(
    left: torch.Tensor,
    right: torch.Tensor,
    added: torch.Tensor | None = None,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    if added is None:
        return torch.bmm(left, right)
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
