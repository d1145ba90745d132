"""How much slower the slowest of many devices is. A step goes at its pace, since ranks wait for
each other in every collective."""

from __future__ import annotations

from statistics import NormalDist

_BOUND, _STEPS = 9.0, 3600  # beyond 9 standard deviations lie less than 1e-18 of all devices


def expected_maximum(count: int) -> float:
    """The mean of the largest of ``count`` draws from the standard normal distribution."""
    # The mean of x is the integral of 1 - F(x) above zero less that of F(x) below, where
    # F = cdf ** count is the distribution of the largest.
    width = _BOUND / _STEPS
    cdf = NormalDist().cdf
    mean = 0.0
    for k in range(_STEPS):
        x = (k + 0.5) * width
        mean += (1.0 - cdf(x) ** count - cdf(-x) ** count) * width
    return mean
