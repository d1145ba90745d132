"""The dtypes that a model's numbers have on their way through a step."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_overlap.engine.context import ModelContext
from fsdp_overlap.engine.describe import aligned
from fsdp_overlap.engine.param import reduce_dtype
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.unit import Unit, unit_names, unit_of
from fsdp_overlap.features.quantized.policy import QuantizedCommPolicy


@dataclass(frozen=True)
class UnitDtypes:
    """The dtypes of parameters of one unit that are gathered together, of their gradients and of
    the states that optimizers have of them.

    Attributes:
        unit: the unit's name.
        parameters: the names of the parameters in the unit.
        at_rest: the dtype of shards, in which optimizers store weights.
        gathered: what all-gathers carry. ``None`` if a tensor class says it.
        computed: the dtype of unsharded parameters.
        accumulated: in which microbatches without synchronization are added up. ``None`` if the
            parameters are frozen, as for the next three.
        reduced: what reductions carry.
        summed: in which they add up what ranks send.
        gradient: the dtype of sharded gradients, in which synchronized microbatches are added up.
        optimizers: the classes of the optimizers that have the parameters. Empty if there is none.
        states: the dtypes of floating-point states of the size of a parameter. Empty before the
            first step.
    """

    unit: str
    parameters: tuple[str, ...]
    at_rest: torch.dtype
    gathered: torch.dtype | None
    computed: torch.dtype
    accumulated: torch.dtype | None
    reduced: torch.dtype | None
    summed: torch.dtype | None
    gradient: torch.dtype | None
    optimizers: tuple[str, ...]
    states: tuple[torch.dtype, ...]


def unit_dtypes(model: ModelContext | nn.Module) -> list[UnitDtypes]:
    """Return the dtypes of each param group of ``model``, a context or a module with units, in the
    order of their :func:`fully_shard` calls. Not collective. It looks through all objects of the
    process for the optimizers."""
    if isinstance(model, nn.Module):
        found = dict.fromkeys(filter(None, map(unit_of, model.modules())))
        units = sorted(found, key=lambda unit: unit.index)
    else:
        units = model.units
    return [each for of_unit in _dtypes_of(units) for each in of_unit]


def optimizers_of(parameters: Iterable[torch.Tensor]) -> dict[int, list[Optimizer]]:
    """Return the optimizers that have each of ``parameters``, by its id. Without optimizers that
    hold another."""
    having: dict[int, list[Optimizer]] = {id(parameter): [] for parameter in parameters}
    if having:
        for found in gc.get_objects():
            if issubclass(type(found), Optimizer) and "param_groups" in vars(found):
                for parameter in (p for group in found.param_groups for p in group["params"]):
                    if id(parameter) in having:
                        having[id(parameter)].append(found)
    return having


def state_tensors(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the floating-point states of a parameter that have its size on this rank, or more."""
    numel = max(2, _local(parameter).numel())
    state: Any = vars(optimizer).get("state", {}).get(parameter, {})
    return {
        name: _local(value)
        for name, value in (state.items() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and _local(value).numel() >= numel
    }


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _dtypes_of(units: Sequence[Unit]) -> list[list[UnitDtypes]]:
    names = unit_names(units)
    having = optimizers_of(parameter for unit in units for parameter in unit.sharded_parameters)
    return [
        [
            _dtypes(unit, names.get(unit) or unit.module_class_name, param_group, having)
            for param_group in unit.param_groups
        ]
        for unit in units
    ]


def _dtypes(
    unit: Unit, name: str, param_group: ParamGroup, having: dict[int, list[Optimizer]]
) -> UnitDtypes:
    own = param_group.sharded_parameters
    is_trained = any(parameter.requires_grad for parameter in own)
    summed = reduce_dtype(param_group.grad_dtype, unit.mp_policy) if is_trained else None
    gathered: torch.dtype | None = param_group.compute_dtype
    reduced, policy = summed, param_group.comm_policy
    if isinstance(policy, QuantizedCommPolicy) and policy.applies_to(param_group.gather_plan):
        gathered = policy.gather_dtype or gathered
        if policy.reduce_dtype is not None and summed is not None:
            reduced, summed = policy.reduce_dtype, torch.promote_types(summed, torch.float32)
    optimizers = [(each, p) for p in own for each in having[id(p)] if p.requires_grad]
    states = [value.dtype for pair in optimizers for value in state_tensors(*pair).values()]
    return UnitDtypes(
        name,
        tuple(spec.fqn for spec in param_group.plan.specs),
        param_group.shard.dtype,
        None if param_group.is_extension else gathered,
        param_group.compute_dtype,
        reduce_dtype(param_group.grad_dtype, unit.mp_policy) if is_trained else None,
        reduced,
        summed,
        param_group.grad_dtype if is_trained else None,
        tuple(dict.fromkeys(type(each).__name__ for each, _ in optimizers)),
        tuple(dict.fromkeys(states)),
    )


# ---- print(ctx) ----

HEAD = ("dtypes", "at rest", "gathered", "computed", "accumulated", "reduced", "stepped")


def described_dtypes(units: Sequence[Unit]) -> list[str]:
    """Return the lines of a table of dtypes. Units that are alike share rows. Empty if all is in
    one dtype, and no optimizer has the parameters."""
    of_units = [(_rows(of_unit), of_unit[0].unit) for of_unit in _dtypes_of(units) if of_unit]
    cells = {cell for rows, _ in of_units for _, row in rows for cell in row}
    if len(cells - {"-", ""}) < 2:
        return []
    table: list[tuple[str, ...]] = [HEAD]
    for rows, alike in groupby(of_units, key=itemgetter(0)):
        [first, *rest] = [unit for _, unit in alike]
        name = f"{first} ... {rest[-1]} ({len(rest) + 1})" if rest else first
        table += [(name + which, *row) for which, row in rows]
    return aligned(table)


def _rows(of_unit: Sequence[UnitDtypes]) -> list[tuple[str, tuple[str, ...]]]:
    """Return which parameters of the unit a row is about, and its cells."""
    by_row: dict[tuple[str, ...], int] = {}
    for each in of_unit:
        row = _row(each)
        by_row[row] = by_row.get(row, 0) + len(each.parameters)
    total = sum(by_row.values())
    return [
        ("" if count == total else f": {count} of {total} parameters", row)
        for row, count in by_row.items()
    ]


def _row(dtypes: UnitDtypes) -> tuple[str, ...]:
    reduced = _name(dtypes.reduced)
    if dtypes.summed != dtypes.reduced:
        reduced += f", summed in {_name(dtypes.summed)}"
    if dtypes.gradient != dtypes.summed:
        reduced += f", then {_name(dtypes.gradient)}"
    stepped = " and ".join(dtypes.optimizers)
    if dtypes.states and dtypes.states != (dtypes.at_rest,):
        stepped += f", states {' and '.join(map(_name, dtypes.states))}"
    return (
        _name(dtypes.at_rest),
        "by its class" if dtypes.gathered is None else _name(dtypes.gathered),
        _name(dtypes.computed),
        _name(dtypes.accumulated),
        reduced,
        stepped or ("no" if dtypes.reduced is None else ""),
    )


def _name(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else str(dtype).removeprefix("torch.")
