"""Muon for matrices and AdamW for all else, on sharded parameters, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.lanes import Lane, make_lane
from fsdp_overlap.optim.adamw import AdamW
from fsdp_overlap.optim.exchange import Exchange, cut_matrix, plan_rounds
from fsdp_overlap.optim.fused_adamw import FusedAdamW
from fsdp_overlap.optim.groups import ALGORITHMS, parameter_groups
from fsdp_overlap.optim.matrices import Ranges, Split, Stack, divide, part_rows
from fsdp_overlap.optim.newton_schulz import COEFFICIENTS, Polynomial, polynomials
from fsdp_overlap.optim.orthogonalization import Products, run, run_rounds, tasks_of
from fsdp_overlap.optim.runs import local_of
from fsdp_overlap.optim.states import pack
from fsdp_overlap.tensor.operands import note_edits
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor

_OF_ADAMW = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` (Keller Jordan, kellerjordan.github.io/posts/muon) for the matrices of a
    model, AdamW for its other parameters.

    On parameters that lie whole on a rank each, as under the layout ``Whole()``, :meth:`step`
    communicates nothing. A matrix that several ranks hold parts of is sent to one of them,
    orthogonalized once, and sent back, while others are orthogonalized. The result is the same.
    Parameters that are not sharded are stepped too, on every rank.

    Args:
        params: a model: AdamW steps its embeddings, its output head (the last matrix, if it has
            the shape of the largest embedding), its convolutions and all of less than two
            dimensions, Muon the rest. Or parameters or groups as for any optimizer, which Muon
            steps but for groups with ``"algorithm": "adamw"``.
        lr, weight_decay, momentum, nesterov, eps, ns_steps, adjust_lr_fn: as for
            ``torch.optim.Muon``. Of three dimensions or more, the last two are matrices.
        ns_coefficients: ``"quintic"``, torch's default; ``"polar_express"`` (arXiv 2505.16932),
            which comes closer to orthogonal matrices; numbers ``(a, b, c)``; or such a tuple for
            each step.
        ns_dtype: of the products; by default bfloat16 on a GPU, and float32 on a CPU, most of which
            multiply that faster.
        algorithms: parameter names of the model, or patterns of them, with the algorithm that is
            to step them, ``"muon"`` or ``"adamw"``.
        split: names or patterns likewise, with the parts of a matrix that are orthogonalized apart,
            as the heads of a fused projection: a number of equal parts, or the rows of each. In a
            group of parameters, the option ``"split"``.
        adamw: options of AdamW, ``lr`` among them, as :class:`~fsdp_overlap.optim.AdamW` takes
            them, with its defaults.

    Raises:
        TypeError, ValueError: an option or a parameter is none that it can work with.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[float] | Sequence[Polynomial] = "quintic",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        algorithms: Mapping[str, str] | None = None,
        split: Mapping[str, Split] | None = None,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        options = dict(adamw or {})
        checked = AdamW([torch.empty(0)], **options).defaults  # by torch
        self._adamw_options = {name: checked[name] for name in _OF_ADAMW}
        self._moment_dtype = options.get("moment_dtype")
        self._ns_dtype = ns_dtype
        self._forget()
        if isinstance(params, nn.Module):
            params = parameter_groups(params, algorithms or {}, split or {})
        elif algorithms or split:
            raise ValueError(
                "algorithms= and split= name parameters of a model: pass the model, or groups of "
                'parameters with "algorithm" and "split" in each'
            )
        super().__init__(
            params,
            {
                "algorithm": "muon",
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "split": 1,
            },
        )

    def _forget(self) -> None:
        """All but what was asked for and the state."""
        self._adamw = FusedAdamW(self._moment_dtype)
        self._lanes: dict[torch.device, Lane] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("algorithm") == "adamw":
            param_group = self._adamw_options | param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            if group["ns_coefficients"] == "quintic":  # as torch's Muon, which may load it
                [group["ns_coefficients"]] = COEFFICIENTS["quintic"]
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        names = ("_adamw_options", "_moment_dtype", "_ns_dtype")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            # What comes from torch's Muon has neither.
            group.setdefault("algorithm", "muon")
            group.setdefault("split", 1)
            if group["algorithm"] == "adamw":
                self._adamw.load(self.state, group)
            else:
                started = [parameter for parameter in group["params"] if self.state.get(parameter)]
                pack(self.state, started, ["momentum_buffer"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the parameters that have a gradient. Where ranks hold parts of a matrix, must
        be called on every rank of its mesh."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: list[Update] = []
        for index, group in enumerate(self.param_groups):
            if group["algorithm"] == "adamw":
                self._adamw.step(self.state, index, group)
            else:
                updates += self._advance(group)
        for mesh, device in dict.fromkeys((update.mesh, update.device) for update in updates):
            self._orthogonalize(
                mesh, device, [u for u in updates if u.mesh == mesh and u.device == device]
            )
        note_edits([update.parameter for update in updates])
        return loss

    def _advance(self, group: dict[str, Any]) -> list[Update]:
        """Lets the momentum take in the gradients, and the weights decay; what is to be done
        then."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        fresh = [parameter for parameter in parameters if not self.state[parameter]]
        pack(self.state, fresh, ["momentum_buffer"])
        updates = [
            Update(parameter, self.state[parameter]["momentum_buffer"], group)
            for parameter in parameters
        ]
        held = [update for update in updates if update.local.numel()]
        if held:
            torch._foreach_lerp_(
                [update.buffer for update in held],
                [update.gradient for update in held],
                1 - group["momentum"],
            )
            decay = 1 - float(group["lr"]) * group["weight_decay"]
            torch._foreach_mul_([update.local for update in held], decay)
        return updates

    def _orthogonalize(
        self, mesh: DeviceMesh | None, device: torch.device, updates: list[Update]
    ) -> None:
        """Moves parameters of one mesh, or of none, along their orthogonalized momentum."""
        dtype = self._ns_dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        rank = mesh.get_local_rank() if mesh is not None else 0
        products = Products(device, dtype)
        whole = (
            task
            for update in updates
            for task in tasks_of(update, update.division.whole.get(rank, ()), products)
        )
        cut = tuple(
            cut_matrix(index, stack, update.ranges)
            for index, update in enumerate(updates)
            for stack in update.division.cut
        )
        if mesh is None or not cut:
            run(whole, products)
            return
        loads = [0] * mesh.size()
        for update in updates:
            for other, stacks in update.division.whole.items():
                loads[other] += sum(stack.work for stack in stacks)
        if device not in self._lanes:
            self._lanes[device] = make_lane(device)
        exchanges = (
            Exchange(matrices, mesh.get_group(), self._lanes[device], dtype, device)
            for matrices in plan_rounds(cut, tuple(loads))
        )
        run_rounds(updates, whole, exchanges, products)


class Update:
    """A parameter that is to move along its orthogonalized momentum.

    ``local``, ``gradient`` and ``buffer``, the momentum, are what this rank holds, flat.
    """

    def __init__(
        self, parameter: torch.Tensor, buffer: torch.Tensor, group: dict[str, Any]
    ) -> None:
        assert parameter.grad is not None
        self.parameter = parameter
        self.mesh: DeviceMesh | None = None
        self._start = 0
        self.ranges: Ranges = ((0, 0, parameter.numel()),)
        if isinstance(parameter, ShardedTensor):
            self.mesh = parameter.device_mesh
            self._start = parameter.local_range[0]
            self.ranges = parameter.placement.ranges
        self.local = local_of(parameter).detach().view(-1)
        self.gradient = local_of(parameter.grad).reshape(-1)
        self.buffer = local_of(buffer).view(-1)
        self.device = self.local.device
        self._group = group
        self.division = divide(tuple(parameter.shape), group["split"], self.ranges)
        self.steps = tuple(polynomials(group["ns_coefficients"], group["ns_steps"]))
        self.eps = group["eps"]

    def read(self, first: int, last: int) -> torch.Tensor:
        """Elements of the direction, before it is orthogonalized."""
        part = slice(first - self._start, last - self._start)
        if not self._group["nesterov"]:
            return self.buffer[part]
        return self.gradient[part].lerp(self.buffer[part], self._group["momentum"])

    def write(self, stack: Stack, first: int, last: int, values: torch.Tensor) -> None:
        """Moves the elements by ``values``, of the orthogonal matrices ``stack``."""
        part = self.local[first - self._start : last - self._start].view(values.shape)
        part.add_(values, alpha=-_step_size(self._group, stack))


def _step_size(group: dict[str, Any], stack: Stack) -> float:
    """The learning rate for matrices of this shape, as torch's Muon has it."""
    lr = float(group["lr"])
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * sqrt(max(stack.rows, stack.columns)) * lr
    return sqrt(max(1, stack.rows / stack.columns)) * lr


def _check_group(group: dict[str, Any]) -> None:
    if group["algorithm"] not in ALGORITHMS:
        raise ValueError(f'"algorithm": {group["algorithm"]!r} in a group; use "muon" or "adamw"')
    if group["algorithm"] == "adamw":
        return
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not float(group[name]) >= 0:
            raise ValueError(f"{name}={group[name]}: must not be negative")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            f'adjust_lr_fn={group["adjust_lr_fn"]!r}: use "original" or "match_rms_adamw"'
        )
    polynomials(group["ns_coefficients"], group["ns_steps"])
    for parameter in group["params"]:
        shape = tuple(parameter.shape)
        if parameter.dim() < 2 or not local_of(parameter).is_floating_point():
            raise ValueError(
                f"Muon orthogonalizes matrices, not a parameter of shape {shape} and "
                f'{parameter.dtype}: pass the model, or put it in a group with "algorithm": "adamw"'
            )
        if isinstance(parameter, DTensor) and not isinstance(parameter, ShardedTensor):
            raise TypeError(
                f"a parameter of shape {shape} is a DTensor with placements "
                f"{parameter.placements}, of another library: shard it by fsdp_overlap.fully_shard"
            )
        if not isinstance(parameter, ShardedTensor) and not parameter.is_contiguous():
            raise ValueError(
                f"a parameter of shape {shape} is not contiguous (strides {parameter.stride()}); "
                "replace its data by .contiguous() first"
            )
        part_rows(shape, group["split"])
