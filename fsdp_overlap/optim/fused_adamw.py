"""AdamW on neighbours in memory: one element of a fused kernel's list steps a whole run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch

from fsdp_overlap.comm.streams import has_streams
from fsdp_overlap.optim.runs import (
    RestingRuns,
    classes_of,
    edits_of,
    gradients_of,
    local_of,
    locals_of,
    marks_of,
    numels_of,
    with_gradient,
)
from fsdp_overlap.optim.states import check_not_captured, pack
from fsdp_overlap.tensor.extension import is_subclass
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, ShardEdits
from fsdp_overlap.tensor.row_tensor import RowTensor, Sharded
from fsdp_overlap.torch_internals import fused_adamw_

State = Mapping[torch.Tensor, dict[str, Any]]

# How many elements are widened at once if gradients or moments have another dtype than their
# parameters: enough to fill an accelerator, and no more than a CPU's cache holds.
_ACCELERATOR_CHUNK = 1 << 25
_CPU_CHUNK = 1 << 20

_kind = attrgetter("device", "dtype")


class Known(NamedTuple):
    """A step count that nobody has written to since ``version``. Counts with equal marks are
    equal."""

    step: torch.Tensor
    version: int
    mark: object


@dataclass
class Steps:
    """The step counts of parameters that are stepped together. Each is a tensor, as in torch's
    state. All are ``views`` of ``flat``.

    Counts with equal ``marks`` are equal. They stay equal because all counts grow together, as long
    as ``version`` shows that nobody else has written to them. ``rest`` are known counts of
    parameters that are not stepped now. So the host reads only counts that it has never seen from
    the device, and otherwise does not wait for it.
    """

    flat: torch.Tensor
    views: Sequence[torch.Tensor]
    marks: list[object]
    rest: list[Known]
    version: int

    @classmethod
    def of(cls, steps: Sequence[torch.Tensor], device: torch.device, before: Steps | None) -> Steps:
        """Copies the counts ``steps``. The marks of some may be known from ``before``."""
        known = {} if before is None else {id(each.step): each for each in before._known()}
        found = [known.pop(id(step), None) for step in steps]
        moved = [step.to(device, torch.float32) for step in steps]
        strange = [step for step, each in zip(moved, found, strict=True) if each is None]
        values = iter(torch.stack(strange).tolist() if strange else ())
        # Marks become small numbers: marks made of older marks would grow with every change.
        numbers: dict[object, int] = {}
        marks = [
            numbers.setdefault(next(values) if each is None else each.mark, len(numbers))
            for each in found
        ]
        rest = [
            each._replace(mark=numbers.setdefault(each.mark, len(numbers)))
            for each in known.values()
        ]
        flat = torch.stack(moved)
        return cls(flat, flat.unbind(), list(marks), rest, flat._version)

    def _known(self) -> Iterator[Known]:
        for each in self.rest:
            if each.step._version == each.version:
                yield each._replace(mark=("rests", each.mark))
        if self.version == self.flat._version:
            for view, mark in zip(self.views, self.marks, strict=True):
                yield Known(view, self.version, ("steps", mark))

    def are(self, steps: Sequence[torch.Tensor]) -> bool:
        """Whether ``steps`` are these very tensors, and nobody else has written to them."""
        return (
            len(steps) == len(self.views)
            and all(map(is_, steps, self.views))
            and self.version == self.flat._version
        )

    def add(self, number: float | torch.Tensor) -> None:
        self.flat.add_(number)
        self.version = self.flat._version


@dataclass(frozen=True)
class Lot:
    """Parameters of one group that the kernel steps together: all have a gradient, on one device
    and of one dtype. ``numels`` is how many elements this rank holds of each. ``edits`` are those
    of the buckets that they belong to. ``is_first``: whether the next forward needs them first."""

    is_first: bool
    key: object
    parameters: list[torch.Tensor]
    numels: list[int]
    edits: list[ShardEdits]
    held: list[torch.Tensor]
    """Those of ``parameters`` of which this rank holds elements, and ``locals`` these elements."""
    locals: list[torch.Tensor]
    runs: RestingRuns = field(default_factory=RestingRuns)

    @classmethod
    def of(cls, is_first: bool, key: object, parameters: list[torch.Tensor]) -> Lot:
        locals_ = locals_of(parameters)
        numels, edits = numels_of(locals_), edits_of(parameters)
        held = list(compress(parameters, numels))
        held_locals = list(compress(locals_, numels))
        return cls(is_first, key, parameters, numels, edits, held, held_locals)


class Lots:
    """The parameters of a group that have a gradient, in lots. ``index`` is the group's. ``first``
    are the edits of the buckets that the next forward needs first."""

    def __init__(
        self, index: int, parameters: list[torch.Tensor], first: Collection[ShardEdits]
    ) -> None:
        self._first = first
        self._parameters = list(parameters)
        self._is_lasting = classes_of(parameters) <= {RaggedDTensor, RowTensor}
        self._locals = locals_ = locals_of(parameters)
        kinds = list(map(_kind, locals_))
        if any(map(is_subclass, locals_)):
            # An op on tensors of a class of its own may run once for each of their parts.
            kinds = list(zip(kinds, map(type, locals_), strict=True))
        is_first = [isinstance(p, Sharded) and p.edits in first for p in parameters]
        kinds = list(zip(is_first, kinds, strict=True))
        self.lots = [
            Lot.of(kind[0], (index, kind), list(compress(parameters, map(kind.__eq__, kinds))))
            for kind in dict.fromkeys(kinds)
        ]

    def are_of(self, parameters: list[torch.Tensor], first: Collection[ShardEdits]) -> bool:
        """Whether they are still right, and of these very parameters. A sharded parameter that was
        moved, or cast, has another local tensor. Others may be moved in place."""
        return (
            self._is_lasting
            and first == self._first
            and len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
            and all(map(is_, locals_of(parameters), self._locals))
        )


class FusedAdamW:
    """Steps the parameters of an optimizer's groups. ``moment_dtype`` is the dtype of the moments.
    The default is the dtype of each parameter."""

    def __init__(self, moment_dtype: torch.dtype | None = None) -> None:
        self._moment_dtype = moment_dtype
        self._lots: dict[int, Lots] = {}
        self._steps: dict[object, Steps] = {}

    def load(self, state: State, group: dict[str, Any]) -> None:
        """Takes over the loaded state of ``group``."""
        started = [parameter for parameter in group["params"] if state.get(parameter)]
        self._prepare(state, started, _moments(group))

    def lots(
        self, index: int, group: dict[str, Any], first: Collection[ShardEdits] = ()
    ) -> list[Lot]:
        """The parameters of ``group`` that have a gradient, in lots for :meth:`step`. ``index`` is
        the position of the group in the optimizer. ``first`` are the edits of the buckets that the
        next forward needs first."""
        known = self._lots.get(index)
        parameters = with_gradient(group["params"])
        if known is None or not known.are_of(parameters, first):
            known = self._lots[index] = Lots(index, parameters, first)
        return known.lots

    def step(
        self,
        state: State,
        lot: Lot,
        group: dict[str, Any],
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Steps the parameters of ``lot``, which is of ``group``. A ``GradScaler`` gives
        ``grad_scale`` and ``found_inf``.

        Raises:
            RuntimeError: the dtype of a parameter is not floating-point.
        """
        moments = _moments(group)
        parameters, numels = lot.parameters, lot.numels
        states = list(map(state.__getitem__, parameters))
        if not all(states):
            self._prepare(state, [p for p in parameters if not state[p]], moments)
        device = local_of(parameters[0]).device
        counts = [its["step"] for its in states]
        steps = self._steps.get(lot.key)
        if steps is None or not steps.are(counts):
            check_not_captured(device)
            steps = self._steps[lot.key] = Steps.of(counts, device, steps)
            for its, view in zip(states, steps.views, strict=True):
                its["step"] = view

        resting = [
            lot.locals,
            *map(locals_of, zip(*map(itemgetter(*moments), compress(states, numels)), strict=True)),
        ]
        marks = marks_of(lot.held, compress(steps.marks, numels))
        gradients = locals_of(gradients_of(lot.held))
        runs, flat = lot.runs.find(resting, gradients, marks)
        views = list(compress(steps.views, numels))
        of_runs = [views[first] for first, _ in runs]
        steps.add(1)
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
            lr = lr.to(device)
        options = {
            "amsgrad": group["amsgrad"],
            "lr": lr,
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "maximize": group["maximize"],
            "grad_scale": grad_scale,
            "found_inf": found_inf,
        }
        if runs:  # this rank may hold nothing of these parameters
            _run_kernel(flat, of_runs, options)
        if found_inf is not None:
            steps.add(-found_inf)
        for edits in lot.edits:
            edits.note_values()

    def _prepare(
        self, state: State, parameters: list[torch.Tensor], moments: Sequence[str]
    ) -> None:
        pack(state, parameters, moments, self._moment_dtype)
        for parameter in parameters:
            zero = torch.zeros((), dtype=torch.float32, device=local_of(parameter).device)
            state[parameter].setdefault("step", zero)


def _run_kernel(
    columns: list[list[torch.Tensor]], counts: list[torch.Tensor], options: dict[str, Any]
) -> None:
    """Runs the kernel. ``columns`` are parameters, gradients and moments. Each column has a flat
    tensor for each run."""
    dtypes = {column[0].dtype for column in columns} | {gradient.dtype for gradient in columns[1]}
    if len(dtypes) == 1:
        empty: list[list[torch.Tensor]] = [] if options["amsgrad"] else [[]]
        fused_adamw_(*columns, *empty, counts, **options)  # type: ignore[call-overload]
        return
    # The kernel knows one dtype, so a part at a time is widened, stepped and rounded again.
    for *row, count in zip(*columns, counts, strict=True):
        wide = reduce(torch.promote_types, (tensor.dtype for tensor in row))
        for parts in zip(*map(_chunks, row), strict=True):
            widened = [part.to(wide) for part in parts]
            _run_kernel([[part] for part in widened], [count], options)
            for part, stepped in zip(parts, widened, strict=True):
                if stepped is not part:
                    part.copy_(stepped)


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if tensor.dim() != 1:
        return (tensor,)
    return tensor.split(_ACCELERATOR_CHUNK if has_streams(tensor.device) else _CPU_CHUNK)


def _moments(group: dict[str, Any]) -> tuple[str, ...]:
    moments = ("exp_avg", "exp_avg_sq")
    return (*moments, "max_exp_avg_sq") if group["amsgrad"] else moments
