"""torch's AdamW, stepping on the flat ranges behind sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from fsdp_overlap.optim.runs import find_runs, flatten, local_of
from fsdp_overlap.tensor.operands import local_operand, note_edits
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor


@dataclass
class Steps:
    """The step counts of some parameters: a tensor each, as in torch's state, in one memory.

    ``counts`` are as last read. They go stale together, so they still tell which are equal, as long
    as ``version`` shows that nobody else wrote; so a GPU is hardly ever asked.
    """

    flat: torch.Tensor
    views: Sequence[torch.Tensor]
    counts: list[float]
    version: int

    @classmethod
    def of(cls, steps: Sequence[torch.Tensor], device: torch.device) -> Steps:
        counts = [float(step) for step in steps]
        flat = torch.tensor(counts, dtype=torch.float32, device=device)
        return cls(flat, flat.unbind(), counts, flat._version)

    def are(self, steps: Sequence[torch.Tensor]) -> bool:
        """Whether ``steps`` are these, written by nobody else."""
        return (
            len(steps) == len(self.views)
            and all(map(is_, steps, self.views))
            and self.version == self.flat._version
        )

    def add(self, number: float | torch.Tensor) -> None:
        self.flat.add_(number)
        self.version = self.flat._version


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` with fewer kernels: parameters that are neighbours in
    memory, as those of one unit and one parameter group are, are stepped as one.

    Same results and same state dict, so checkpoints move between the two, both ways. Parameters
    that are not sharded are stepped too.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True
        )
        self._steps: dict[object, Steps] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._steps = {}
        for group in self.param_groups:
            group["fused"] = True  # also where the state comes from an AdamW that was not
            started = [parameter for parameter in group["params"] if self.state.get(parameter)]
            self._pack(started, _moments(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the parameters that have a gradient.

        Raises:
            RuntimeError: a parameter is not of floating point, or a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            kinds = {(local.device, local.dtype) for local in map(local_of, parameters)}
            for kind in kinds:
                alike = parameters
                if len(kinds) > 1:
                    alike = [p for p in parameters if (p.device, p.dtype) == kind]
                self._step((index, kind), group, alike)
        return loss

    def _step(self, key: object, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Steps parameters of one device and dtype."""
        moments = _moments(group)
        states = [self.state[parameter] for parameter in parameters]
        if not all(states):
            self._pack([p for p in parameters if not self.state[p]], moments)
        locals_ = [local_of(parameter) for parameter in parameters]
        device = locals_[0].device
        steps = self._steps.get(key)
        if steps is None or not steps.are([state["step"] for state in states]):
            steps = self._steps[key] = Steps.of([state["step"] for state in states], device)
            for state, view in zip(states, steps.views, strict=True):
                state["step"] = view

        held = [row for row, local in enumerate(locals_) if local.numel()]
        columns = [
            [locals_[row] for row in held],
            [local_of(parameters[row].grad) for row in held],  # type: ignore[arg-type]
            *([local_of(states[row][name]) for row in held] for name in moments),
        ]
        marks = [_mark(parameters[row], steps.counts[row]) for row in held]
        runs = find_runs(columns, marks)
        flat = [flatten(column, runs) for column in columns]
        if not group["amsgrad"]:
            flat.append([])
        steps.add(1)
        found_inf = getattr(self, "found_inf", None)  # of a GradScaler, as grad_scale
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
            lr = lr.to(device)
        if runs:  # this rank may hold nothing of these parameters
            torch._fused_adamw_(  # type: ignore[call-overload]
                *flat,
                [steps.views[held[first]] for first, _ in runs],
                amsgrad=group["amsgrad"],
                lr=lr,
                beta1=float(group["betas"][0]),
                beta2=float(group["betas"][1]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=found_inf,
            )
        if found_inf is not None:
            steps.add(-found_inf)
        note_edits(parameters)

    def _pack(self, parameters: list[torch.Tensor], moments: Sequence[str]) -> None:
        """Makes the moments of neighbours neighbours: new ones, zero, and those there are.

        Raises:
            RuntimeError: a moment lies over the ranks in another way than its parameter.
        """
        held = [parameter for parameter in parameters if local_of(parameter).numel()]
        locals_ = [local_of(parameter) for parameter in held]
        marks = [
            _mark(parameter, local.dtype) for parameter, local in zip(held, locals_, strict=True)
        ]
        runs = {id(held[first]): numel for first, numel in find_runs([locals_], marks)}
        flats: list[torch.Tensor] = []
        start = 0
        for parameter in parameters:
            local = local_of(parameter)
            if not local.is_floating_point():
                raise RuntimeError(f"AdamW steps floating-point parameters, not {local.dtype}")
            state = self.state[parameter]
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=local.device))
            if not isinstance(parameter, ShardedTensor):
                for name in moments:
                    state.setdefault(name, torch.zeros_like(parameter))
                continue
            if id(parameter) in runs:
                flats = [local.new_zeros(runs[id(parameter)]) for _ in moments]
                start = 0
            for index, name in enumerate(moments):
                part = local.new_zeros(0)
                if local.numel():
                    part = flats[index][start : start + local.numel()]
                if name in state:
                    part.copy_(local_operand("load_state_dict", state[name], parameter))
                state[name] = ShardedTensor.wrap(part, parameter._spec)
            start += local.numel()


def _mark(parameter: torch.Tensor, mark: object) -> object:
    """``mark`` for parameters that may be stepped together with neighbours, which are the sharded
    ones: others need not be flat."""
    return mark if isinstance(parameter, ShardedTensor) else object()


def _moments(group: dict[str, Any]) -> tuple[str, ...]:
    moments = ("exp_avg", "exp_avg_sq")
    return (*moments, "max_exp_avg_sq") if group["amsgrad"] else moments
