"""AdamW on neighbours in memory: one element of a fused kernel's list steps a whole run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import is_
from typing import Any, NamedTuple

import torch

from fsdp_overlap.comm.streams import has_streams
from fsdp_overlap.optim.runs import find_runs, flatten, local_of, mark_of
from fsdp_overlap.optim.states import pack
from fsdp_overlap.tensor.extension import is_subclass
from fsdp_overlap.tensor.operands import note_edits
from fsdp_overlap.torch_internals import fused_adamw_

State = Mapping[torch.Tensor, dict[str, Any]]

# How many elements are widened at once if gradients or moments have another dtype than their
# parameters: enough to fill an accelerator, and no more than a CPU's cache holds.
_ACCELERATOR_CHUNK = 1 << 25
_CPU_CHUNK = 1 << 20


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


class FusedAdamW:
    """Steps the parameters of an optimizer's groups. ``moment_dtype`` is the dtype of the moments.
    The default is the dtype of each parameter."""

    def __init__(self, moment_dtype: torch.dtype | None = None) -> None:
        self._moment_dtype = moment_dtype
        self._steps: dict[object, Steps] = {}
        self._knows_classes = False
        """Whether some parameters are of a class of their own."""

    def load(self, state: State, group: dict[str, Any]) -> None:
        """Takes over the loaded state of ``group``."""
        started = [parameter for parameter in group["params"] if state.get(parameter)]
        self._prepare(state, started, _moments(group))

    def step(
        self,
        state: State,
        index: int,
        group: dict[str, Any],
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Steps the parameters of ``group`` that have a gradient. ``index`` is the position of the
        group in the optimizer. A ``GradScaler`` gives ``grad_scale`` and ``found_inf``.

        Raises:
            RuntimeError: the dtype of a parameter is not floating-point.
        """
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        kinds = {(local.device, local.dtype) for local in map(local_of, parameters)}
        for kind in kinds:
            alike = parameters
            if len(kinds) > 1:
                alike = [p for p in parameters if (p.device, p.dtype) == kind]
            self._step(state, (index, kind), group, alike, grad_scale, found_inf)

    def _step(
        self,
        state: State,
        key: object,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Steps parameters of one device and dtype."""
        moments = _moments(group)
        states = [state[parameter] for parameter in parameters]
        if not all(states):
            self._prepare(state, [p for p in parameters if not state[p]], moments)
        locals_ = [local_of(parameter) for parameter in parameters]
        if self._knows_classes and len(classes := {type(local) for local in locals_}) > 1:
            # An op on tensors of a class of its own may run once for each of their parts.
            for cls in classes:
                alike = [p for p in parameters if type(local_of(p)) is cls]
                self._step(state, (key, cls), group, alike, grad_scale, found_inf)
            return
        device = locals_[0].device
        steps = self._steps.get(key)
        if steps is None or not steps.are([its["step"] for its in states]):
            counts = [its["step"] for its in states]
            steps = self._steps[key] = Steps.of(counts, device, steps)
            for its, view in zip(states, steps.views, strict=True):
                its["step"] = view

        held = [row for row, local in enumerate(locals_) if local.numel()]
        columns = [
            [locals_[row] for row in held],
            [local_of(parameters[row].grad) for row in held],  # type: ignore[arg-type]
            *([local_of(states[row][name]) for row in held] for name in moments),
        ]
        marks = [mark_of(parameters[row], steps.marks[row]) for row in held]
        runs = find_runs(columns, marks)
        flat = [flatten(column, runs) for column in columns]
        counts = [steps.views[held[first]] for first, _ in runs]
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
            _run_kernel(flat, counts, options)
        if found_inf is not None:
            steps.add(-found_inf)
        note_edits(parameters)

    def _prepare(
        self, state: State, parameters: list[torch.Tensor], moments: Sequence[str]
    ) -> None:
        self._knows_classes |= any(is_subclass(local_of(parameter)) for parameter in parameters)
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
