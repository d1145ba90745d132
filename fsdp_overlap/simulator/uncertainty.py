"""What a prediction is worth: how far those of published runs were off."""

from __future__ import annotations

from typing import NamedTuple


class Uncertainty(NamedTuple):
    """Steps that were measured, as shares of the predicted ones."""

    least: float
    median: float
    most: float


# Of the tables in docs/scale.md, 26 November 2026: of 43 rows the column "step as is", and of those
# 32 that were not fitted to themselves "fitted".
AS_IS = Uncertainty(0.97, 1.39, 1.61)
FITTED = Uncertainty(0.80, 1.09, 1.38)


def describe_uncertainty(seconds: float, is_fitted: bool) -> str:
    """Return what a step may take that was predicted to take ``seconds``, and why.

    Args:
        is_fitted: whether products take as long as they did in a run on the same devices.
    """
    known = FITTED if is_fitted else AS_IS
    low, high = (f"{1e3 * seconds * share:.0f}" for share in (known.least, known.most))
    said = (
        f"{low} to {high} ms: published steps took {known.least:.2f} to {known.most:.2f} times "
        f"what was predicted, {known.median:.2f} in the middle"
    )
    if is_fitted:
        return said
    return f"{said}; fit --matmul-stretch to a run on such devices (docs/scale.md)"
