"""Fits a reduced gradient as a sum of what ranks and backwards contributed to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, sqrt
from operator import add

import torch

from fsdp_overlap.recording.recording import Recording
from fsdp_overlap.recording.sketch import PROJECTIONS, Sketch
from fsdp_overlap.tools.comparison.sizes import NOISE, eps_of, is_rounding


@dataclass(frozen=True)
class Fit:
    """A sum of sketches times ``factor``, and the norm of what is left, relative to ``scale``."""

    factor: float
    error: float
    scale: float


class Reduction:
    """What a gradient should be: the sum of what all ranks and backwards contributed."""

    def __init__(self, run: Recording, step: int, name: str) -> None:
        self._parts: dict[tuple[int, int], Sketch] = {}
        self.eps = 0.0
        for rank, steps in enumerate(run.ranks):
            for key, record in steps[step].tensors.items():
                if key.kind == "local gradient" and key.name == name:
                    self._parts[rank, key.call] = record.sketch
                    self.eps = max(self.eps, eps_of(record.dtype))
        self._scale = sum(part.norm for part in self._parts.values()) / len(run.ranks)
        self._ranks = len(run.ranks)

    def fit(self, gradient: Sketch) -> Fit | None:
        """Return how well the sum of all contributions fits, ``None`` without any."""
        if not self._parts:
            return None
        [factor], error = solved([self._sum()], gradient)
        scale = max(gradient.norm, abs(factor) * self._scale, NOISE)
        return Fit(factor, error / scale, scale)

    def explain(self, gradient: Sketch, name: str, usual: float) -> tuple[str, str]:
        """Return why the sum of all contributions does not fit: the cause, and what is wrong. That
        sum times ``usual`` is what it should be."""
        total = self._sum()
        groups = {
            f"rank {rank}": [part for part in self._parts if part[0] == rank]
            for rank in range(self._ranks)
        } | {
            f"backward {call + 1}": [part for part in self._parts if part[1] == call]
            for call in sorted({call for _, call in self._parts})
        }
        norm = max(gradient.norm, NOISE)
        least, what, times = inf, "", 1.0
        for group, parts in groups.items():
            if parts and len(parts) < len(self._parts):
                part = reduce(add, [self._parts[each] for each in parts])
                [factor, extra], error = solved([total, part], gradient)
                # Of two groups either may be the wrong one: that which leaves the other as usual.
                if error < 1e-3 * norm and abs(factor - usual) < least:
                    with_it = factor + extra
                    least, what = abs(factor - usual), group
                    times = with_it / factor if abs(factor) > 0.02 * abs(with_it) else inf
        if what and abs(times) < 0.02:
            return "missing contribution", f"{name} lacks that of {what}"
        if what and times == inf:
            return "missing contribution", f"{name} has that of {what} alone"
        if what and abs(times - 1) > 0.02:
            return "doubled contribution", f"{name} has that of {what} {times:.3g} times"
        _, error = solved([total], gradient)
        if is_rounding(error / norm):
            return "dtype", f"{name} sums as in bfloat16"
        return "reduction", f"in {name} it is not the mean of the ranks' gradients"

    def _sum(self) -> Sketch:
        return reduce(add, self._parts.values())


def solved(basis: Sequence[Sketch], target: Sketch) -> tuple[list[float], float]:
    """Return the factors with which sums of ``basis`` come closest to ``target``, and an estimate
    of the norm of what is left."""
    matrix = torch.tensor([each.projections for each in basis], dtype=torch.float64).T
    goal = torch.tensor(target.projections, dtype=torch.float64)
    if not bool(matrix.isfinite().all() and goal.isfinite().all()):
        return [0.0] * len(basis), inf
    factors = torch.linalg.lstsq(matrix, goal[:, None], driver="gelsd").solution[:, 0]
    left = (matrix @ factors - goal).square().sum()
    return factors.tolist(), sqrt(float(left) / max(1, PROJECTIONS - len(basis)))
