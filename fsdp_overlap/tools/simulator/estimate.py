"""The cost of a plan: measured on all of the model, or estimated from short models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

import torch

from fsdp_overlap.tools.simulator.costs import Costs
from fsdp_overlap.tools.simulator.models import longest_run, model_of
from fsdp_overlap.tools.simulator.simulate import simulate
from fsdp_overlap.tools.simulator.training import Training

# So many blocks, in units and in all, are enough for a step to grow by the same with each further
# unit. tests/tools/simulator/test_search.py holds it.
ENOUGH_UNITS, ENOUGH_BLOCKS = 4, 4
ENOUGH_MICROBATCHES = 2


class BlockCount(NamedTuple):
    """How many equal blocks a model has in a row, and after how many what they are repeats."""

    blocks: int
    period: int = 1


@dataclass(frozen=True)
class StepCost:
    """What a step takes, in seconds and bytes. ``compute``: seconds that compute would take alone;
    ``exposed``: seconds of communication that compute waits for, if it is known."""

    seconds: float
    compute: float
    memory: float
    reserved: float
    exposed: float | None = None


def measure(training: Training, costs: Costs, with_exposed: bool = True) -> StepCost:
    """Simulate all of the model."""
    found = simulate(training.program, training.gpus, costs)
    exposed = found.report.exposed_time * 1e-6 if with_exposed else None
    return StepCost(found.seconds, found.compute, found.memory, found.reserved, exposed)


def count_equal_blocks(model: str) -> BlockCount:
    """Return how many equal blocks the model has in a row. None if it can be made on the emulated
    device alone, or has none."""
    try:
        with torch.device("meta"):
            run = longest_run(model_of(model)())
    except Exception:  # whatever a user's model does on the meta device
        return BlockCount(0)
    return BlockCount(0) if run is None else BlockCount(run.length, run.period)


def estimate(training: Training, costs: Costs, equal: BlockCount) -> StepCost:
    """Extrapolate from models with fewer blocks, and from steps with fewer microbatches.

    Where that would take as long, or the short models do not run, the whole is simulated. What is
    ``reserved`` beyond the tensors' memory is taken from the largest that was simulated.
    """
    short = _short_lengths(training, equal)
    if short is None:
        return measure(training, costs)
    few, more = short
    per_step = [training.microbatches]
    if training.microbatches > ENOUGH_MICROBATCHES + 1:
        per_step = [ENOUGH_MICROBATCHES, ENOUGH_MICROBATCHES + 1]
    times = (equal.blocks - few) / (more - few)

    def with_all_blocks(microbatches: int) -> StepCost:
        plan = replace(training, microbatches=microbatches)
        ends = [measure(replace(plan, blocks=blocks), costs, False) for blocks in short]
        return _beyond(ends[0], ends[1], times)

    try:
        taken = [with_all_blocks(microbatches) for microbatches in per_step]
    except (RuntimeError, ValueError, IndexError, KeyError, AttributeError):
        return measure(training, costs)  # the model may need all of its blocks
    if len(taken) == 1:
        return taken[0]
    return _beyond(taken[0], taken[1], training.microbatches - ENOUGH_MICROBATCHES)


def _short_lengths(training: Training, equal: BlockCount) -> tuple[int, int] | None:
    """Return two lengths of short models, which end as the whole does: with as many blocks in the
    last unit, with the same kinds of layers, and with as many since a checkpointed one."""
    size = training.blocks_per_unit
    repeats = lcm(size, equal.period, training.checkpoints_every or 1)
    # What is gathered ahead at the start of forward, and again of backward, is not repeated.
    units = max(ENOUGH_UNITS, -(-ENOUGH_BLOCKS // size), 2 * training.prefetch + 1)
    few = equal.blocks % repeats + -(-units * size // repeats) * repeats
    more = few + max(repeats, 2)
    return (few, more) if few + more < equal.blocks else None


def _beyond(few: StepCost, more: StepCost, times: float) -> StepCost:
    """Return what is ``times`` as far from ``few`` as ``more`` is."""

    def line(start: float, end: float) -> float:
        return start + times * (end - start)

    memory = line(few.memory, more.memory)
    return StepCost(
        seconds=line(few.seconds, more.seconds),
        compute=line(few.compute, more.compute),
        memory=memory,
        reserved=memory + more.reserved - more.memory,
    )
