"""Units that get their memory or dtype after fully_shard(): from the meta device, and by a cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fsdp_overlap.engine.param import (
    ParamHashes,
    compute_dtype,
    mark_replaced,
    modules_outside_units,
    record_replacement,
    reduce_dtype,
)
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.tensor.comm_dtypes import REDUCE_DTYPES
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam
from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass, given_grad_dtype

# ---- Units that are cast before they run, as by model.bfloat16() ----


def validate_cast(unit: Unit, param_group: ParamGroup, result: torch.Tensor) -> str | None:
    """Return why the shard of ``param_group`` cannot become ``result``, or a tensor like it.
    ``None`` if it can."""
    shard, kind = param_group.shard, unit.module_class_name
    is_given_memory = param_group.is_meta and result.device.type == param_group.rest_device.type
    if result.device != shard.device and not is_given_memory:
        return (
            f"{kind} is sharded, its shards are on {shard.device} and cannot move to "
            f"{result.device}: move a module before fully_shard(); a unit on the meta device gets "
            f"memory by to_empty(device={param_group.rest_device.type!r})"
        )
    if result.dtype == shard.dtype:
        return None
    cast = f"{kind} is sharded, its shards are {shard.dtype} and cannot become {result.dtype}"
    if param_group.never_cast:
        return f"{cast}: their class alone knows what their elements stand for"
    if param_group.shares_shard:
        return f"{cast} once its weight is tied to that of another unit: load it in that dtype"
    has_run = unit.context.was_initialized
    if has_run or unit.has_several_modules or is_given_memory:
        when = "when it has run" if has_run else "as one of several modules of a unit"
        when = "while it gets memory" if is_given_memory else when
        return (
            f"{cast} {when}: cast it before fully_shard(); for the dtype of compute alone, use "
            "MixedPrecisionPolicy(param_dtype=...)"
        )
    if param_group.is_extension:
        return f"{cast}, which are of a class of their own: cast it before fully_shard()"
    grad_dtype = param_group.plan.specs[0].grad_dtype or result.dtype
    is_trained = any(parameter.requires_grad for parameter in param_group.sharded_parameters)
    if not (shard.is_floating_point() and result.is_floating_point()) or (
        is_trained and reduce_dtype(grad_dtype, unit.mp_policy) not in REDUCE_DTYPES
    ):
        return f"{cast}: parameters stay floating, in a dtype in which gradients can be summed"
    return None


@torch.no_grad()
def cast_param_group(unit: Unit, param_group: ParamGroup, values: torch.Tensor) -> None:
    """Make ``values`` the shard of ``param_group``, and their dtype its own. Sharded and unsharded
    parameters stay the same objects, so optimizers may have been made."""
    old = param_group.sharded_parameters
    version = param_group.version
    specs = tuple(replace(spec, dtype=values.dtype) for spec in param_group.plan.specs)
    param_group.plan = param_group.plan.with_specs(specs)
    param_group.compute_dtype = compute_dtype(specs[0], unit.mp_policy)
    param_group.allocate(param_group.device, old)
    param_group.shard.copy_(values)
    for parameter, form in zip(old, param_group.sharded_parameters, strict=True):
        gradient = parameter.grad
        parameter.grad = None
        with DisableTorchFunctionSubclass():
            parameter.data = form  # sets its dtype alone
        parameter._local_tensor, parameter._spec = form._local_tensor, form._spec
        parameter.keep_gradients_in(parameter._given_grad_dtype)
        parameter.grad = gradient  # cast, if its dtype follows the parameter's
    param_group.register(old)
    param_group.give_memory()
    if param_group.init_hashes is not None:
        param_group.init_hashes.move(version, param_group.version)
    unit.forget_parameters()


class UnwrittenParams(ParamHashes):
    """Tells which of ``parameters`` nobody has written to, of a param group that has just got its
    memory. Each element holds a nan that no arithmetic makes."""

    def __init__(self, parameters: Sequence[ShardedParam]) -> None:
        super().__init__([], -1)
        self._count = len(parameters)
        for _, bits, mark in _marks(parameters):
            bits.fill_(mark)

    @staticmethod
    def unwritten(param_groups: Sequence[ParamGroup]) -> str:
        """Return which parameters of ``param_groups`` are unwritten, in words."""
        names = [name for param_group in param_groups for name in _unwritten(param_group)]
        if not names:
            return ""
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            "nothing was written to the memory that to_empty() gave to "
            f"{', '.join(names[:3])}{more}: initialize it, as by each module's reset_parameters(), "
            "or load a checkpoint"
        )


def _unwritten(param_group: ParamGroup) -> list[str]:
    found = {
        index: (bits == mark).any()
        for index, bits, mark in _marks(param_group.sharded_parameters)
        if _is_registered(param_group, index)
    }
    flags: list[bool] = torch.stack([*found.values()]).tolist() if found else []
    return [
        f"{param_group.plan.specs[index].fqn!r} of unit {param_group.label!r}"
        for index, flag in zip(found, flags, strict=True)
        if flag
    ]


def _is_registered(param_group: ParamGroup, index: int) -> bool:
    """Return whether modules have a parameter, and not another one that it was tied to since."""
    forms = param_group.sharded_parameters[index], param_group.parameters[index]
    tables = param_group.owned[index].registrations
    return any(table.get(name) is form for table, name in tables for form in forms)


_MARKS = {
    torch.float16: (torch.int16, 0x7EED),
    torch.bfloat16: (torch.int16, 0x7FED),
    torch.float32: (torch.int32, 0x7FEDFEED),
    torch.float64: (torch.int64, 0x7FFDFEEDFEEDFEED),
}
"""The integers that elements of a dtype are viewed as, and the mark of one that is unwritten."""


def _marks(parameters: Sequence[ShardedParam]) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Yield the index of each parameter that can be marked, what this rank has of it, as integers,
    and the mark."""
    for index, parameter in enumerate(parameters):
        local = parameter._local_tensor
        if type(local) is torch.Tensor and local.dtype in _MARKS:
            integers, mark = _MARKS[local.dtype]
            yield index, local.detach().view(-1).view(integers), mark


# ---- Units that get memory, or parameters, late: from the meta device, from load_state_dict() ----


def materialize(unit: Unit) -> None:
    """Give memory to a unit of the meta device. Its parameters are new objects."""
    context = unit.context
    for param_group in unit.param_groups:
        replaced = param_group.sharded_parameters
        param_group.materialize(context.device)
        if not param_group.never_cast:
            param_group.init_hashes = UnwrittenParams(param_group.sharded_parameters)
        for parameter in replaced:
            mark_replaced(parameter, by="the model was given memory")
    record_replacement()
    # A forward that failed because the unit had no memory may have noted the old parameters.
    unit.forget_parameters()
    context.require_lazy_init()


def load_assigned(unit: Unit) -> None:
    """Copy what ``load_state_dict(assign=True)`` registered into the shards, and register the
    sharded parameters again.

    A unit on the meta device waits until all its parameters were assigned. Then it first gets
    memory. A param group whose parameters were all assigned in another dtype is cast, unless units
    of its context have run.

    Raises:
        RuntimeError: an assigned parameter has another dtype, and its param group cannot be cast.
            Or it has another ``grad_dtype``. The unit is as before then.
    """
    update_shared_params(unit)
    assigned = [param_group.module_info.assigned() for param_group in unit.param_groups]
    is_meta = unit.is_meta
    counts = [_count(param_group) for param_group in unit.param_groups]
    if not any(assigned) or (is_meta and list(map(len, assigned)) != counts):
        return
    try:
        cast_to_assigned(unit, assigned, "load_state_dict(assign=True) gives")
    except RuntimeError:
        unit.to_sharded()
        raise
    if is_meta:
        materialize(unit)
    with torch.no_grad():
        for param_group, values in zip(unit.param_groups, assigned, strict=True):
            param_group.module_info.to_sharded()
            for index, value in values.items():
                param_group.sharded_parameters[index].copy_(value)
    if is_meta:
        register_unsharded_once(unit)


def update_shared_params(unit: Unit) -> None:
    """Use one parameter of the unit where modules registered it in place of another. The other
    keeps its memory and travels, as in FSDP2, but nothing computes with it."""
    items = [item for param_group in unit.param_groups for item in param_group.owned]
    by_parameter = dict(zip(map(id, unit.sharded_parameters), items, strict=True))
    has_ties = False
    for item in items:
        for registration in [*item.registrations]:
            table, name = registration
            tied = by_parameter.get(id(table.get(name)), item)
            if tied is not item:
                # not remove(), which compares tables, and so the tensors in them
                item.registrations = [r for r in item.registrations if r is not registration]
                tied.registrations.append(registration)
                has_ties = True
    if has_ties:
        for param_group in unit.param_groups:
            param_group.find_registrations()


def cast_to_assigned(
    unit: Unit, assigned: Sequence[Mapping[int, torch.Tensor]], giver: str
) -> None:
    """Cast the param groups of ``unit`` to the dtype of what each was assigned, by the index of the
    parameter. ``giver``: what assigned it, for errors.

    Raises:
        RuntimeError: a param group cannot be cast, or a ``grad_dtype`` differs. Nothing was
            changed.
    """
    for param_group, values in zip(unit.param_groups, assigned, strict=True):
        _check_grad_dtypes(unit, param_group, values, giver)
    dtypes = [
        _dtype_for(unit, param_group, values, giver)
        for param_group, values in zip(unit.param_groups, assigned, strict=True)
    ]
    for param_group, dtype in zip(unit.param_groups, dtypes, strict=True):
        if dtype != param_group.shard.dtype:
            cast_param_group(unit, param_group, param_group.shard.to(dtype))


def _count(param_group: ParamGroup) -> int:
    """Return how many parameters modules have. One that was replaced by another of its unit has no
    place left."""
    return sum(bool(item.registrations) for item in param_group.owned)


def _check_grad_dtypes(
    unit: Unit, param_group: ParamGroup, values: Mapping[int, torch.Tensor], giver: str
) -> None:
    for index, value in values.items():
        its, given = param_group.sharded_parameters[index], given_grad_dtype(value)
        if given not in (None, its._grad_dtype):
            raise RuntimeError(
                f"{giver} parameter {param_group.plan.specs[index].fqn!r} of "
                f"{unit.module_class_name} the grad_dtype {given}, and gradients of the sharded "
                f"one are {its._grad_dtype}: set the grad_dtype of sharded parameters before that"
            )


def _dtype_for(
    unit: Unit, param_group: ParamGroup, values: Mapping[int, torch.Tensor], giver: str
) -> torch.dtype:
    """Return the dtype that a param group rests in when it has taken ``values``, by the index of
    the parameter. Raise RuntimeError if it cannot take them."""
    dtype, dtypes = param_group.shard.dtype, {value.dtype for value in values.values()}
    if dtypes <= {dtype}:
        return dtype
    if len(values) == _count(param_group) and len(dtypes) == 1:
        other = dtypes.pop()
        example = param_group.shard.new_empty(0, dtype=other)
        if validate_cast(unit, param_group, example) is None:
            return other
    [index, *_] = [index for index, value in values.items() if value.dtype != dtype]
    name, given = param_group.plan.specs[index].fqn, values[index].dtype
    what = f"{giver} parameter {name!r} of {unit.module_class_name} as {given}"
    if param_group.never_cast:
        kind = type(param_group.parameters[index]).__name__
        raise RuntimeError(
            f"{what}, and it is a {kind}, which is never cast: load what was stored as {dtype}"
        )
    raise RuntimeError(
        f"{what}, and it is sharded as {dtype}: cast the state dict, or the module before "
        "fully_shard()"
    )


def register_unsharded_once(unit: Unit) -> None:
    """Assign the unsharded parameters to the modules by ``setattr``, for modules that then keep
    references of their own, as ``nn.LSTM`` does. Register the sharded parameters again after
    that."""
    for param_group in unit.param_groups:
        unsharded = dict(
            zip(map(id, param_group.sharded_parameters), param_group.parameters, strict=True)
        )
        for _, module in modules_outside_units(unit.modules):
            for name, parameter in list(module._parameters.items()):
                if id(parameter) in unsharded:
                    setattr(module, name, unsharded[id(parameter)])
        param_group.module_info.to_sharded()
