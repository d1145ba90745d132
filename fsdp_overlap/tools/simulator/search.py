"""Search for the plan of a training step that takes the least time in the memory there is."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_overlap.tools.simulator.choices import (
    LAYOUTS,
    changes,
    leanest,
    like,
    needs_no_less,
    with_defaults,
    works,
)
from fsdp_overlap.tools.simulator.costs import Costs
from fsdp_overlap.tools.simulator.estimate import StepCost, count_equal_blocks, estimate, measure
from fsdp_overlap.tools.simulator.training import Training

SHOWN = 3
CHECKS = 12
"""How many plans are simulated in full at most, to find those that are shown."""
GAIN = 0.001
"""By what share of a step a plan has to be faster to be better than one that takes less memory."""
DOES_NOT_FIT = "more memory than there is"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class TrainingPlan:
    """A way to do the step, and what it takes."""

    training: Training
    taken: StepCost

    @property
    def seconds(self) -> float:
        return self.taken.seconds


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Args:
        plans: the best plans that fit, the fastest first, of equally fast ones (within
            :data:`GAIN`) that of the least memory. All of the model was simulated for each.
        defaults: the step with the library's defaults. Its microbatches and checkpointing are as
            given or, if that does not fit (``given_fits``), as in the best plan. ``None`` if that
            does not fit either.
        least: of the plans that were tried, the one that takes the least memory.
        tried: how many plans were looked at.
        skipped: why others were not, and how many.
    """

    plans: Sequence[TrainingPlan]
    defaults: TrainingPlan | None
    given_fits: bool
    least: TrainingPlan | None
    tried: int
    skipped: Counter[str]

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the defaults the best plan is."""
        if not self.plans or self.defaults is None:
            return None
        return self.defaults.seconds / self.plans[0].seconds


def search(
    training: Training,
    costs: Costs,
    memory: float | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the fastest ways to train on as many tokens a step.

    It may change how sequences are cut into microbatches, checkpointing, how many blocks a unit
    has, prefetch, what is kept between forward and backward and between steps, when gradients are
    reduced, and the layout. The model, the mesh, dtypes and the optimizer stay.

    Plans are estimated from short models (:func:`estimate`), and the best of them simulated in
    full. What needs no less memory than what did not fit is not tried, nor is what could not be
    faster if all of its communication were free.

    Args:
        memory: bytes that a rank may take. By default what the device has.
        processes: how many plans are simulated at once. With 1, in this process; with more, in new
            ones, which import the program's main module as Python's ``multiprocessing`` does.
        progress: is told what goes on, a line at a time.

    Raises:
        ValueError: there is no such model, or nothing that was tried can run.
    """
    limit = costs.device.memory_size if memory is None else memory
    with closing(Workers(processes)) as workers:
        return _Search(training, costs, limit, workers, progress or (lambda line: None)).run()


class Workers:
    """Runs simulations, in processes if there are several."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def run(self, calls: Sequence[tuple[Any, ...]]) -> list[StepCost | str]:
        """Return what each call, a function with its arguments, returns, or the error that it
        raises."""
        if self._processes == 1 or not calls:
            return [_attempt(*call) for call in calls]
        if self._pool is None:
            # A fork would have locks of threads that it does not have.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, context, torch.set_num_threads, (1,))
        futures = [self._pool.submit(_attempt, *call) for call in calls]
        return [self._result(future) for future in futures]

    def _result(self, future: Future[StepCost | str]) -> StepCost | str:
        try:
            return future.result()
        except BrokenProcessPool:  # all that was under way is lost with the process
            self.close()
            return "its process was killed"

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _attempt(function: Callable[..., StepCost], *arguments: Any) -> StepCost | str:
    try:
        return function(*arguments)
    except Exception as error:  # whatever a program does that cannot run
        return f"{type(error).__name__}: {error}".splitlines()[0]


class _Search:
    def __init__(
        self, training: Training, costs: Costs, limit: float, workers: Workers, progress: Progress
    ) -> None:
        self.training, self.costs, self.limit = training, costs, limit
        self.workers, self.progress = workers, progress
        self.equal = count_equal_blocks(training.model)
        if training.blocks:
            self.equal = self.equal._replace(blocks=training.blocks)
        self.estimates: dict[Training, StepCost] = {}
        self.full: dict[Training, StepCost] = {}
        """Those of which all of the model was simulated."""
        self.failed: set[Training] = set()
        self.too_large: list[Training] = []
        self.skipped: Counter[str] = Counter()
        self.gaps: dict[tuple[int, str], float] = {}
        """What is reserved beyond tensors, by batch and checkpointing, where that is known."""

    def run(self) -> SearchResult:
        works = self.find_works()
        for work in sorted(works, key=lambda work: self.estimates[work].compute):
            if self.estimates[work].compute * (1 + GAIN) >= self.best_seconds():
                self.skipped["slower even if communication took no time"] += 1
                continue
            self.climb(work)
        given = with_defaults(self.training)
        plans = self.check(given)
        given_fits = any(plan.training == given for plan in plans)
        defaults = None
        if plans:
            like_best = with_defaults(plans[0].training)
            defaults = self.simulated(given if given_fits else like_best)
        least = min(self.estimates, key=lambda plan: self.estimates[plan].reserved, default=None)
        return SearchResult(
            plans=plans[:SHOWN],
            defaults=defaults,
            given_fits=given_fits,
            least=None if least is None else TrainingPlan(least, self.estimates[least]),
            tried=len(self.estimates) + len(self.failed),
            skipped=self.skipped,
        )

    # Estimates

    def find_works(self) -> list[Training]:
        """Return how the sequences may be cut and checkpointed, each as the plan of the least
        memory, if that fits."""
        rows = works(self.training)
        found = []
        for column in range(len(rows[0])):  # as many at once as there are kinds of checkpointing
            found += self.try_all([leanest(row[column]) for row in rows])
        return found

    def climb(self, work: Training) -> None:
        """Change one choice after the other for the better, until none is."""
        starts = [work, with_defaults(work)]
        if fitting := [plan for plan in self.estimates if self.fits(plan)]:
            best = min(fitting, key=lambda plan: self.estimates[plan].seconds)
            starts.append(like(best, work))
        plan = self.best_first(self.try_all(starts))[0]
        seen: set[Training] = set()
        while plan not in seen:
            seen.add(plan)
            count = len(list(self.changes(plan)))
            for choice in range(count):
                others = list(self.changes(plan))[choice]
                plan = self.best_first([plan, *self.try_all(others)])[0]

    def changes(self, plan: Training) -> Iterable[list[Training]]:
        return changes(plan, self.costs.fabric.ranks_a_node, self.equal.blocks)

    def try_all(self, plans: Iterable[Training]) -> list[Training]:
        """Estimate those plans that may fit, and return those that do."""
        plans = list(dict.fromkeys(plans))
        new = [plan for plan in plans if plan not in self.estimates and not self.is_hopeless(plan)]
        for plan, cost in self.costs_of(new, estimate, self.equal):
            self.estimates[plan] = cost
            if cost.memory > self.limit:
                self.too_large.append(plan)
                self.skipped[DOES_NOT_FIT] += 1
        self.tell()
        return [plan for plan in plans if plan in self.estimates and self.fits(plan)]

    def costs_of(
        self, plans: list[Training], function: Callable[..., StepCost], *arguments: Any
    ) -> Iterator[tuple[Training, StepCost]]:
        """Return what those plans take that can run."""
        calls = [(function, plan, self.costs, *arguments) for plan in plans]
        for plan, cost in zip(plans, self.workers.run(calls), strict=True):
            if isinstance(cost, str):
                self.skipped[cost] += 1
                self.failed.add(plan)
                self.estimates.pop(plan, None)
            else:
                yield plan, cost

    def is_hopeless(self, plan: Training) -> bool:
        if plan in self.failed:
            return True
        if any(needs_no_less(plan, other) for other in self.too_large):
            self.skipped[DOES_NOT_FIT] += 1
            self.failed.add(plan)
            return True
        return False

    def fits(self, plan: Training) -> bool:
        """Return whether it is likely to fit, as far as short models tell."""
        taken = self.estimates[plan]
        gap = self.gaps.get(_work(plan), taken.reserved - taken.memory)
        return taken.memory + gap <= self.limit

    def best_first(self, plans: Iterable[Training]) -> list[Training]:
        """Return ``plans`` by their time, and those that take as long as the fastest by memory."""
        plans = list(plans)
        least = min((self.estimates[plan].seconds for plan in plans), default=0.0)

        def rank(plan: Training) -> tuple[float, float]:
            taken = self.estimates[plan]
            return max(taken.seconds, least * (1 + GAIN)), taken.memory

        return sorted(plans, key=rank)

    def best_seconds(self) -> float:
        fitting = (taken.seconds for plan, taken in self.estimates.items() if self.fits(plan))
        return min(fitting, default=float("inf"))

    # What is shown

    def check(self, defaults: Training) -> list[TrainingPlan]:
        """Simulate the best plans in full until enough are known to fit, and the defaults."""
        self.simulate_all([defaults])
        while len(self.fitting()) < SHOWN and len(self.full) < CHECKS:
            wave = self.best_first(
                plan for plan in self.estimates if plan not in self.full and self.may_fit(plan)
            )[:2]
            if not wave:
                break
            self.simulate_all(wave)
        if plans := self.fitting():
            best = plans[0].training
            self.simulate_all([replace(best, layout=layout) for layout in LAYOUTS])
        return self.fitting()

    def simulated(self, plan: Training) -> TrainingPlan | None:
        """Simulate a plan in full. ``None`` if it does not fit."""
        self.simulate_all([plan])
        return next((each for each in self.fitting() if each.training == plan), None)

    def fitting(self) -> list[TrainingPlan]:
        """Return what was simulated in full and fits, the best first."""
        fitting = (plan for plan, taken in self.full.items() if taken.reserved <= self.limit)
        return [TrainingPlan(plan, self.full[plan]) for plan in self.best_first(fitting)]

    def simulate_all(self, plans: Iterable[Training]) -> None:
        new = [plan for plan in plans if plan not in self.full]
        self.progress(f"simulating {len(new)} of the best in full")
        for plan, taken in self.costs_of(new, measure):
            self.full[plan] = self.estimates[plan] = taken
            gap = taken.reserved - taken.memory
            if taken.reserved > self.limit:
                self.gaps[_work(plan)] = max(gap, self.gaps.get(_work(plan), 0.0))
                self.skipped[DOES_NOT_FIT] += 1

    def may_fit(self, plan: Training) -> bool:
        """Return whether it is worth a simulation to know that it fits."""
        return self.estimates[plan].memory + self.gaps.get(_work(plan), 0.0) <= self.limit

    def tell(self) -> None:
        best = self.best_seconds()
        known = "" if best == float("inf") else f", best {1e3 * best:.0f} ms"
        left = sum(self.skipped.values())
        self.progress(f"{len(self.estimates)} plans tried, {left} skipped{known}")


def _work(plan: Training) -> tuple[int, str]:
    return plan.micro_batch_size, plan.checkpointing
