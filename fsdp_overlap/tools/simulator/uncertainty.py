"""Prediction error, from published runs."""

from __future__ import annotations

from typing import NamedTuple


class Uncertainty(NamedTuple):
    """Steps that were measured, as shares of the predicted ones."""

    least: float
    median: float
    most: float


# Of 20 published rows (docs/scale.md) that devices are not fitted to, 28 November 2026.
KNOWN = Uncertainty(0.91, 1.13, 1.60)


def describe_uncertainty(seconds: float) -> str:
    """Return what a step may take that was predicted to take ``seconds``, and why."""
    low, high = (f"{1e3 * seconds * share:.0f}" for share in (KNOWN.least, KNOWN.most))
    return (
        f"{low} to {high} ms: published steps took {KNOWN.least:.2f} to {KNOWN.most:.2f} times "
        f"what was predicted, {KNOWN.median:.2f} in the middle"
    )
