"""Finds where two recorded runs part, in the order of execution, and says why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, prod, sqrt
from typing import Any

from fsdp_overlap.recording.recording import SHARDED_KINDS, Key, Recording, TensorRecord
from fsdp_overlap.tools.comparison.reductions import Reduction, solved
from fsdp_overlap.tools.comparison.sizes import (
    NOISE,
    coarsest_eps,
    difference_of,
    distance_of,
    eps_of,
    is_equal,
    is_rounding,
    relative_distance,
    rms_of,
    with_estimated_norm,
)

_ROUNDINGS = 16.0
"""How many units of the last place sums in another order may differ by, relative to the norm."""
_GROWTH = 100.0
"""How much larger a difference in outputs may be than that in the weights that they are of."""


@dataclass(frozen=True)
class Difference:
    """One tensor that differs between two runs.

    Attributes:
        step: the training step, from 0.
        kind: what it is of, as a :class:`~fsdp_overlap.recording.recorder.Recorder` calls it.
        name: the module or parameter.
        ranks: where it differs, empty for what ranks have together.
        size: an estimate of the norm of the difference, relative to what it is a part of.
        cause: ``"order of sums"`` if that explains it, or else what does not fit.
        text: a sentence.
    """

    step: int
    kind: str
    name: str
    ranks: tuple[int, ...]
    size: float
    cause: str
    text: str

    @property
    def is_explained(self) -> bool:
        return self.cause == ORDER


ORDER = "order of sums"


@dataclass(frozen=True)
class Comparison:
    """What two recordings have in common, and where they part.

    Attributes:
        names: of the two.
        steps: how many steps both have.
        compared: how many tensors were compared.
        equal: how many of them are equal to the bit.
        losses: the mean losses of each step, of both.
        first: the first difference, if there is one.
        unexplained: the first that sums in another order do not explain.
        later: how many others come after it.
    """

    names: tuple[str, str]
    steps: int
    compared: int
    equal: int
    losses: list[tuple[list[float], list[float]]]
    first: Difference | None
    unexplained: Difference | None
    later: int
    left_out: tuple[str, ...] = ()
    """Tensors that one of the two could not record."""
    more_steps: tuple[str, int] | None = None
    """Which of the two has more steps, and how many more."""
    largest: dict[str, float] = field(default_factory=dict)
    """The largest difference of each kind."""

    @property
    def is_equal(self) -> bool:
        """Whether all that was compared is equal to the bit."""
        return self.first is None

    @property
    def text(self) -> str:
        """A paragraph."""
        what = f"{self.compared:,} tensors of {_count(self.steps, 'step')}"
        left_out = ""
        if self.left_out:
            count = _count(len(self.left_out), "tensor")
            left_out = f"\nNot compared: {count} without plain values, as {self.left_out[0]}."
        if self.more_steps:
            name, steps = self.more_steps
            left_out += f"\nNot compared: {_count(steps, 'later step')}, which only {name} has."
        if self.first is None:
            return f"Equal to the bit: {what}.{left_out}"
        if self.unexplained is None:
            return (
                f"Equal up to the order of sums: of {what} {self.equal:,} are equal to the bit. "
                f"First: {self.first.text}{left_out}"
            )
        lines = f"Different: {self.unexplained.text}"
        if self.first is not self.unexplained:
            lines += f"\nBefore it, as the order of sums explains: {self.first.text}"
        if self.later:
            lines += f"\n{_count(self.later, 'more tensor')} differ after it."
        return lines + left_out

    def to_json(self) -> dict[str, Any]:
        """Return all of it for a JSON file."""
        return asdict(self) | {"text": self.text, "is_equal": self.is_equal}


def compare(a: Recording, b: Recording, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two recordings in the order of execution of the first.

    Of other numbers of ranks only what ranks have together is compared: losses, gradients that
    optimizers step with, and weights.
    """
    steps = min(a.steps, b.steps)
    walk = _Walk(a, b, names)
    found = [difference for step in range(steps) for difference in walk.step(step)]
    unexplained = next((each for each in found if not each.is_explained), None)
    largest: dict[str, float] = defaultdict(float)
    for each in found:
        largest[each.kind] = max(largest[each.kind], each.size)
    return Comparison(
        names,
        steps,
        walk.compared,
        walk.equal,
        [(a.losses(step), b.losses(step)) for step in range(steps)],
        found[0] if found else None,
        unexplained,
        len(found) - found.index(unexplained) - 1 if unexplained else 0,
        _left_out(a, b, steps),
        _more_steps(a, b, names),
        dict(largest),
    )


def _left_out(a: Recording, b: Recording, steps: int) -> tuple[str, ...]:
    of_steps = (rank[step] for run in (a, b) for rank in run.ranks for step in range(steps))
    return tuple(dict.fromkeys(name for each in of_steps for name in each.left_out))


def _more_steps(a: Recording, b: Recording, names: tuple[str, str]) -> tuple[str, int] | None:
    more = b.steps - a.steps
    return (names[more > 0], abs(more)) if more else None


class _Walk:
    """The state of a comparison as it goes through the steps."""

    def __init__(self, a: Recording, b: Recording, names: tuple[str, str]) -> None:
        self._a, self._b, self._names = a, b, names
        self._alike = len(a.ranks) == len(b.ranks)
        self.compared = self.equal = 0
        self._rest: dict[str, tuple[TensorRecord, TensorRecord]] = {}
        """The weights of both runs, as they are at rest."""
        self._before: dict[str, tuple[TensorRecord, TensorRecord]] = {}
        """The same, before the last step."""
        self._of_weights = 0.0
        """The difference of all weights at rest, relative to all."""
        self._far = 0.0
        """The same, as its norm."""
        self._is_weighed = True
        """Whether both are of the weights that are known by now."""
        self._of_gradients: dict[str, float] = defaultdict(float)
        """The largest difference of the gradients of each parameter, in all steps."""
        self._typical = (0.0, 0.0)
        """The root mean squares of local gradients and of those that optimizers step with."""
        self._inputs_differ = self._random_differs = False
        self._coarsest = 0.0
        """The largest epsilon of what modules use and return, which what follows inherits."""
        self._largest = 0.0
        """The largest difference of inputs and outputs in this step, relative to them."""

    def step(self, step: int) -> Iterator[Difference]:
        """Yield what differs in ``step``."""
        of_a, of_b = ([rank[step] for rank in run.ranks] for run in (self._a, self._b))
        self._random_differs = self._alike and any(
            x.random != y.random for x, y in zip(of_a, of_b, strict=True)
        )
        self._inputs_differ, self._largest = False, 0.0
        self._typical = rms_of(of_a, "local gradient"), rms_of(of_a, "gradient")
        if not self._alike:  # these are not compared
            self._coarsest = coarsest_eps([*of_a, *of_b])
        keys = list(dict.fromkeys(key for rank in of_a for key in rank.tensors))
        absent = set(keys) ^ {key for rank in of_b for key in rank.tensors}
        told_absent = losses_done = False
        for key in [*keys, *(key for key in absent if key not in keys)]:
            if key.kind not in SHARDED_KINDS and not self._alike:
                continue
            if not losses_done and key.kind in ("local gradient", "gradient"):
                losses_done = True
                yield from self._losses(step)
            if key in absent:
                if not told_absent:
                    told_absent = True
                    yield self._absent(step, key, key in keys)
                continue
            if key.kind in SHARDED_KINDS:
                yield from self._together(step, key)
            else:
                yield from self._on_ranks(step, key)
        yield from self._loss_values(step)
        self._weigh()

    # ---- What ranks have of their own ----

    def _on_ranks(self, step: int, key: Key) -> Iterator[Difference]:
        unlike: list[tuple[int, TensorRecord, TensorRecord]] = []
        for rank, (x, y) in enumerate(zip(self._a.ranks, self._b.ranks, strict=True)):
            one, other = x[step].tensors.get(key), y[step].tensors.get(key)
            if one is None and other is None:
                continue
            if one is None or other is None:
                yield self._absent(step, key, one is not None, rank)
                return
            self.compared += 1
            if key.kind != "input" and one.dtype == other.dtype:
                self._coarsest = max(self._coarsest, eps_of(one.dtype))
            if is_equal(one, other):
                self.equal += 1
            else:
                unlike.append((rank, one, other))
        if not unlike:
            return
        sizes = [relative_distance(one, other) for _, one, other in unlike]
        worst = max(range(len(unlike)), key=lambda index: sizes[index])
        _, one, other = unlike[worst]
        ranks = tuple(rank for rank, *_ in unlike)
        judge = {
            "input": self._judge_input,
            "parameter": self._judge_parameter,
            "output": self._judge_output,
            "local gradient": self._judge_local_gradient,
            "buffer": self._judge_buffer,
        }[key.kind]
        if isfinite(sizes[worst]):
            cause, why = judge(one, other, sizes[worst])
            if key.kind in ("input", "output"):
                self._largest = max(self._largest, sizes[worst])
        else:
            cause, why = self._not_finite(one, other)
        if key.kind == "local gradient":  # all that is known where a closure computes them
            self._of_gradients[key.name] = max(self._of_gradients[key.name], sizes[worst])
        yield self._told(step, key, ranks, sizes[worst], cause, why)

    def _not_finite(self, one: TensorRecord, other: TensorRecord) -> tuple[str, str]:
        """Judge two tensors whose difference is not finite."""
        if one.shape != other.shape:
            (a, b), (of_a, of_b) = self._names, (one.shape, other.shape)
            return "shape", f"of shape {of_a} in {a}, {of_b} in {b}"
        if not isfinite(one.sketch.squares) and not isfinite(other.sketch.squares):
            return ORDER, "infinity or nan in both"
        return "not finite", "infinity or nan in one of the two"

    def _judge_input(self, one: TensorRecord, other: TensorRecord, size: float) -> tuple[str, str]:
        if eps_of(one.dtype) and size <= _GROWTH * self._largest:  # of a loss, or of another model
            return ORDER, "outputs before it differ as much"
        self._inputs_differ = True
        return "other data", (
            "the program drew other data, or resumed from what the first run saved: seed what it "
            "shuffles by, or have {run} in the path of its outputs"
        )

    def _judge_parameter(
        self, one: TensorRecord, other: TensorRecord, size: float
    ) -> tuple[str, str]:
        if (why := self._other_dtype(one, other)) is not None:
            return "dtype", why
        at_rest = self._rest.get(one.key.name)
        if at_rest is None:
            return self._by_weights(size)
        if size <= 4 * relative_distance(*at_rest) + 4 * eps_of(one.dtype):
            return ORDER, "the weights differ as much"
        faults: list[tuple[int, float]] = []
        for index, used in enumerate((one, other)):
            rest = at_rest[index]
            allowed = eps_of(used.dtype) * 2 + _ROUNDINGS * eps_of(rest.dtype)
            if (off := distance_of(used, rest)) > allowed * max(rest.sketch.norm, NOISE):
                faults.append((index, off))
        if not faults:
            return "stale weight", "and the weights that it was gathered from do not"
        index, off = max(faults, key=lambda fault: fault[1])
        if len(faults) == 2 and size * max(one.sketch.norm, NOISE) < off / 4:
            if size <= _GROWTH * relative_distance(*at_rest) + 4 * eps_of(one.dtype):
                return ORDER, "the program edits it in both"
            return self._by_weights(size)
        used = (one, other)[index]
        text = f"in {self._names[index]} it is not the weight that the optimizer left"
        if (before := self._before.get(one.key.name)) is not None:
            old = before[index]
            if distance_of(used, old) < off / 4:
                return "stale weight", f"{text}, but that before the last step"
        return "wrong weight", text

    def _judge_output(self, one: TensorRecord, other: TensorRecord, size: float) -> tuple[str, str]:
        if (why := self._other_dtype(one, other)) is not None:
            return "dtype", why
        if self._inputs_differ:
            return ORDER, "its inputs differ"
        allowed = _GROWTH * max(self._of_weights, self._coarsest)
        if (self._random_differs or "Dropout" in one.of_class) and size > allowed:
            return "random numbers", "the states of random number generators differ"
        own = [
            relative_distance(*both)
            for name, both in self._rest.items()
            if name.rpartition(".")[0] == one.key.name
        ]
        if size <= 4 * max(own, default=0.0):
            return ORDER, "its weights differ as much"
        return self._by_weights(size)

    def _judge_local_gradient(
        self, one: TensorRecord, other: TensorRecord, size: float
    ) -> tuple[str, str]:
        if (why := self._other_dtype(one, other)) is not None:
            return "dtype", why
        if self._is_noise(one, other, self._typical[0]):
            return ORDER, "both are as small as rounding errors of the others"
        if (scale := self._multiple(one, other)) is not None:
            return "scaled", scale
        return self._by_weights(size)

    def _judge_buffer(self, one: TensorRecord, other: TensorRecord, size: float) -> tuple[str, str]:
        if (why := self._other_dtype(one, other)) is not None:
            return "dtype", why
        if not eps_of(one.dtype):
            return "compute", "integers differ by no rounding"
        return self._by_what_precedes(size)

    def _by_what_precedes(self, size: float) -> tuple[str, str]:
        """Judge a difference by those of what the ranks have of their own in the same step."""
        if self._inputs_differ:
            return ORDER, "its inputs differ"
        if size <= _GROWTH * self._largest:
            return ORDER, "what precedes it differs as much"
        return self._by_weights(size)

    def _by_weights(self, size: float) -> tuple[str, str]:
        """Judge a difference by that of the weights."""
        if size <= max(_ROUNDINGS * self._coarsest, _GROWTH * self._of_weights):
            how = (
                f"the weights differ by {self._of_weights:.1e}" if self._of_weights else "rounding"
            )
            return ORDER, how
        if is_rounding(size):
            return "dtype", "as large as rounding to bfloat16"
        if not self._of_weights:
            return "compute", "with equal inputs and weights"
        return "compute", f"and the weights by {self._of_weights:.1e} only"

    # ---- What ranks have together ----

    def _together(self, step: int, key: Key) -> Iterator[Difference]:
        one, other = self._a.full(step, key), self._b.full(step, key)
        if one is None or other is None:
            return
        if self._alike:
            for rank, (x, y) in enumerate(zip(self._a.ranks, self._b.ranks, strict=True)):
                if (key in x[step].tensors) != (key in y[step].tensors):
                    yield self._absent(step, key, key in x[step].tensors, rank)
                    return
        unlike = [run.unlike_replicas(step, key) for run in (self._a, self._b)]
        if unlike[0] != unlike[1]:
            index = int(len(unlike[1]) > len(unlike[0]))
            text = f"in {self._names[index]} they have other bits than the first"
            yield self._told(step, key, tuple(unlike[index]), inf, "replicas differ", text)
        elif unlike[0] and self._alike:  # in both: the program keeps them apart
            own = [
                [rank[step].tensors[key] for rank in run.ranks if key in rank[step].tensors]
                for run in (self._a, self._b)
            ]
            both = list(zip(*own, strict=True))
            one, other = max(both, key=lambda each: (not is_equal(*each), distance_of(*each)))
        if key.kind in ("initial weight", "weight"):
            if key.name in self._rest:
                self._before[key.name] = self._rest[key.name]
            self._rest[key.name] = one, other
            self._is_weighed = False
        self.compared += 1
        if is_equal(one, other):
            self.equal += 1
            return
        if one.shape != other.shape:
            text = f"of shape {one.shape} in {self._names[0]}, {other.shape} in {self._names[1]}"
            yield self._told(step, key, (), inf, "shape", text)
            return
        if key.kind == "gradient":
            size, cause, why = self._judge_gradient(step, one, other)
            self._of_gradients[key.name] = max(self._of_gradients[key.name], size)
        elif key.kind == "weight":
            size, cause, why = self._judge_weight(one, other)
        elif key.kind == "evaluated weight":
            size = relative_distance(one, other)
            if not self._is_weighed:
                self._weigh()
            if distance_of(one, other) <= _GROWTH * self._far:
                cause, why = ORDER, "the weights differ as much"
            else:
                cause, why = self._by_what_precedes(size)
        elif (size := relative_distance(one, other)) <= _GROWTH * self._of_weights:
            cause, why = ORDER, "the weights before it differ as much"  # of a copy of another model
        else:
            cause = "first weights"
            why = "the program drew or loaded others: seed it, or have {run} in the path of outputs"
        yield self._told(step, key, (), size, cause, why)

    def _judge_gradient(
        self, step: int, one: TensorRecord, other: TensorRecord
    ) -> tuple[float, str, str]:
        own = [Reduction(run, step, one.key.name) for run in (self._a, self._b)]
        fits = [
            fit
            for each, record in zip(own, (one, other), strict=True)
            if self._alike and (fit := each.fit(record.sketch)) is not None
        ]
        # In units of the gradient, which may have been clipped, or scaled back.
        scale = max(*(fit.scale for fit in fits), *(each.sketch.norm for each in (one, other)))
        size = distance_of(one, other) / max(scale, NOISE)
        if (why := self._other_dtype(one, other)) is not None:
            return size, "dtype", why
        if not isfinite(size):
            return inf, *self._not_finite(one, other)
        eps = eps_of(one.dtype)
        rounding = max(_ROUNDINGS * eps, *(2 * each.eps for each in own))
        if len(fits) == 2:
            for index, record in ((1, other), (0, one)):
                if fits[index].error > max(rounding, 8 * fits[1 - index].error):
                    usual = fits[1 - index].factor
                    cause, why = own[index].explain(record.sketch, self._names[index], usual)
                    return size, cause, why
            ratio = fits[1].factor / fits[0].factor if fits[0].factor else 1.0
            error = fits[0].error + fits[1].error
            if abs(ratio - 1) > max(rounding, 8 * error, _GROWTH * self._of_weights):
                return size, "scaled", self._times(ratio)
        elif (multiple := self._multiple(one, other)) is not None:
            return size, "scaled", multiple
        if self._is_noise(one, other, self._typical[1]):
            return size, ORDER, "both are as small as rounding errors of the others"
        errors = max((fit.error for fit in fits), default=0.0)
        eps = max(eps, self._coarsest)
        if size <= max(_ROUNDINGS * eps, _GROWTH * self._of_weights, 4 * errors):
            return size, ORDER, "a sum over ranks"
        if len(fits) < 2:
            return size, "reduction", "more than sums in another order give"
        return size, ORDER, "the ranks' gradients differ as much"

    def _judge_weight(self, one: TensorRecord, other: TensorRecord) -> tuple[float, str, str]:
        size = relative_distance(one, other)
        if (why := self._other_dtype(one, other)) is not None:
            return size, "dtype", why
        if not isfinite(size):
            return inf, *self._not_finite(one, other)
        name, eps = one.key.name, eps_of(one.dtype)
        if size <= _ROUNDINGS * eps:
            return size, ORDER, "rounding"
        before = self._before.get(name)
        if before is None:
            return size, "weights", "which were not recorded before"
        steps = [
            difference_of(record.sketch, old.sketch)
            for record, old in zip((one, other), before, strict=True)
        ]
        norm = max(each.norm for each in map(with_estimated_norm, steps))
        of_step = steps[0].distance(steps[1]) / max(norm, NOISE)
        of_gradient = self._of_gradients[name]
        rounding = _ROUNDINGS * eps * one.sketch.norm / max(norm, NOISE)
        # Where gradients are as small as their differences, Adam's steps have the other sign.
        if of_step <= max(_GROWTH * of_gradient, 30 * sqrt(of_gradient), rounding):
            return size, ORDER, "its gradients differ"
        far = steps[0].distance(steps[1])
        [times, decay], rest = solved([steps[0], before[0].sketch], steps[1])
        if rest < 0.05 * far and abs(times - 1) * norm > 0.05 * far:
            return size, "optimizer step", self._times(times)
        if rest < 0.05 * far:
            return size, "optimizer step", f"the weight decay differs by {abs(decay):.1e} a step"
        if is_rounding(size):
            return size, "dtype", "as large as rounding to bfloat16"
        return (
            size,
            "optimizer step",
            f"its step differs by {of_step:.1e}, its gradients by {of_gradient:.1e}",
        )

    # ---- Words ----

    def _losses(self, step: int) -> Iterator[Difference]:
        for rank, (x, y) in enumerate(zip(self._a.ranks, self._b.ranks, strict=False)):
            if not self._alike:
                return
            one, other = x[step].losses, y[step].losses
            if len(one) != len(other):
                key = Key("loss", "", 0, 0)
                text = f"{len(one)} backwards in {self._names[0]}, {len(other)} in {self._names[1]}"
                yield self._told(step, key, (rank,), inf, "backwards", text)
                return

    def _loss_values(self, step: int) -> Iterator[Difference]:
        of_ranks = zip(self._a.ranks, self._b.ranks, strict=False) if self._alike else ()
        for rank, (x, y) in enumerate(of_ranks):
            for call, (one, other) in enumerate(zip(x[step].losses, y[step].losses, strict=False)):
                if one != other and (one == one or other == other):
                    size = abs(one - other) / max(abs(one), abs(other))
                    cause, why = self._by_what_precedes(size if isfinite(size) else inf)
                    key = Key("loss", "", 0, call)
                    yield self._told(step, key, (rank,), size, cause, why)

    def _absent(self, step: int, key: Key, is_in_a: bool, rank: int | None = None) -> Difference:
        has = self._names[0 if is_in_a else 1]
        ranks = () if rank is None else (rank,)
        return self._told(step, key, ranks, inf, "absent", f"only {has} has it")

    def _other_dtype(self, one: TensorRecord, other: TensorRecord) -> str | None:
        if one.dtype == other.dtype:
            return None
        return f"{one.dtype} in {self._names[0]}, {other.dtype} in {self._names[1]}"

    def _multiple(self, one: TensorRecord, other: TensorRecord) -> str | None:
        """Return what to say if one is a multiple of the other."""
        if prod(one.shape) < 4:
            return None  # as any two of one element are
        if not other.sketch.squares:
            return f"it is zero in {self._names[1]}"
        [factor], error = solved([one.sketch], other.sketch)
        eps = max(eps_of(one.dtype), eps_of(other.dtype))
        off = abs(factor - 1)
        least = max(1e-3, 4 * _ROUNDINGS * eps, _GROWTH * self._of_weights)
        is_fit = off > least and error <= 0.05 * off * max(other.sketch.norm, NOISE)
        return self._times(factor) if is_fit else None

    def _times(self, factor: float) -> str:
        return f"it is {factor:.4g} times as large in {self._names[1]}"

    def _is_noise(self, one: TensorRecord, other: TensorRecord, typical: float) -> bool:
        """Return whether a gradient differs by no more than rounding errors of typical ones."""
        eps = max(eps_of(one.dtype), eps_of(other.dtype), self._coarsest)
        scale = typical * sqrt(max(1, prod(one.shape)))
        return distance_of(one, other) <= _ROUNDINGS * eps * scale

    def _told(
        self, step: int, key: Key, ranks: tuple[int, ...], size: float, cause: str, why: str
    ) -> Difference:
        where = key.name or "the model"
        if key.call:
            where += f", call {key.call + 1}"
        place = ""
        if ranks and len(ranks) < max(len(self._a.ranks), len(self._b.ranks)):
            place = f" on rank {', '.join(map(str, ranks))}"
        by = f" differs by {size:.1e}" if isfinite(size) and size else " differs"
        text = f"step {step}, {_KINDS[key.kind]} {where}{place}{by}: {cause}; {why}."
        return Difference(step, key.kind, key.name, ranks, size, cause, text)

    def _weigh(self) -> None:
        """Find how much all weights at rest differ."""
        self._is_weighed = True
        squares = sum(
            distance_of(*both) ** 2 for both in self._rest.values() if not is_equal(*both)
        )
        total = sum(one.sketch.squares for one, _ in self._rest.values())
        self._far, self._of_weights = sqrt(squares), sqrt(squares / total) if total else 0.0


_KINDS = {
    "input": "input of",
    "parameter": "parameter as used",
    "output": "output of",
    "loss": "loss of",
    "local gradient": "rank's own gradient of",
    "gradient": "gradient of",
    "weight": "weight",
    "evaluated weight": "evaluated weight",
    "buffer": "buffer",
    "initial weight": "first weight",
}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
