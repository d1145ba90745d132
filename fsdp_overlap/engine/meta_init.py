"""Units that get their memory or dtype after fully_shard(): from the meta device, and by a cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fsdp_overlap.engine.options import compute_dtype, reduce_dtype
from fsdp_overlap.engine.param import mark_replaced, modules_outside_units, note_replacement
from fsdp_overlap.engine.param_group import Bucket
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.tensor.carried import SUMMED
from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass, given_grad_dtype

# ---- Units that are cast before they run, as by model.bfloat16() ----


def validate_cast(unit: Unit, bucket: Bucket, result: torch.Tensor, has_run: bool) -> str | None:
    """Why the shard of ``bucket`` cannot become ``result``, or a tensor like it. ``None`` if it
    can. ``has_run``: whether units of its context have run."""
    shard, kind = bucket.shard, unit.module_kind
    is_given_memory = bucket.is_meta and result.device.type == bucket.rest_device.type
    if result.device != shard.device and not is_given_memory:
        return (
            f"{kind} is sharded, its shards are on {shard.device} and cannot move to "
            f"{result.device}: move a module before fully_shard(); a unit on the meta device gets "
            f"memory by to_empty(device={bucket.rest_device.type!r})"
        )
    if result.dtype == shard.dtype:
        return None
    cast = f"{kind} is sharded, its shards are {shard.dtype} and cannot become {result.dtype}"
    if bucket.is_opaque:
        return f"{cast}: their class alone knows what their elements stand for"
    if has_run or unit.is_list or is_given_memory:
        when = "when it has run" if has_run else "as one of several modules of a unit"
        when = "while it gets memory" if is_given_memory else when
        return (
            f"{cast} {when}: cast it before fully_shard(); for the dtype of compute alone, use "
            "MixedPrecisionPolicy(param_dtype=...)"
        )
    if bucket.is_extension:
        return f"{cast}, which are of a class of their own: cast it before fully_shard()"
    grad_dtype = bucket.plan.specs[0].grad_dtype or result.dtype
    is_trained = any(parameter.requires_grad for parameter in bucket.sharded_parameters)
    if not (shard.is_floating_point() and result.is_floating_point()) or (
        is_trained and reduce_dtype(grad_dtype, unit.mp_policy) not in SUMMED
    ):
        return f"{cast}: parameters stay floating, in a dtype in which gradients can be summed"
    return None


@torch.no_grad()
def cast(unit: Unit, bucket: Bucket, values: torch.Tensor) -> None:
    """Make ``values`` the shard of ``bucket``, and their dtype its own. Sharded and unsharded
    parameters stay the same objects, so optimizers may have been made."""
    old = bucket.sharded_parameters
    version = bucket.version
    specs = tuple(replace(spec, dtype=values.dtype) for spec in bucket.plan.specs)
    bucket.plan = replace(bucket.plan, specs=specs)
    bucket.compute_dtype = compute_dtype(specs[0], unit.mp_policy)
    bucket.allocate(bucket.device, old)
    bucket.shard.copy_(values)
    for parameter, form in zip(old, bucket.sharded_parameters, strict=True):
        gradient = parameter.grad
        parameter.grad = None
        with DisableTorchFunctionSubclass():
            parameter.data = form  # sets its dtype alone
        parameter._local_tensor, parameter._spec = form._local_tensor, form._spec
        parameter.keep_gradients_in(parameter._given_grad_dtype)
        parameter.grad = gradient  # cast, if its dtype follows the parameter's
    bucket.register(old)
    bucket.give_memory()
    if bucket.init_hashes is not None:
        bucket.init_hashes.move(version, bucket.version)
    unit.forget_parameters()


# ---- Units that get memory, or parameters, late: from the meta device, from load_state_dict() ----


def materialize(unit: Unit, device: torch.device) -> None:
    """Give memory on ``device`` to a unit of the meta device. Its parameters are new objects."""
    for bucket in unit.buckets:
        replaced = bucket.sharded_parameters
        bucket.materialize(device)
        for parameter in replaced:
            mark_replaced(parameter, by="the model was given memory")
    note_replacement()
    # A forward that failed because the unit had no memory may have noted the old parameters.
    unit.forget_parameters()


def take_assigned(unit: Unit, device: torch.device, has_run: bool) -> bool:
    """Copy what ``load_state_dict(assign=True)`` registered into the shards, and register the
    sharded parameters again.

    A unit on the meta device waits until all its parameters were assigned. Then it first gets
    memory on ``device``. A bucket whose parameters were all assigned in another dtype is cast,
    unless units of its context have run, as ``has_run`` says. Return whether the unit got memory.

    Raises:
        RuntimeError: an assigned parameter has another dtype, and its bucket cannot be cast. Or it
            has another ``grad_dtype``. The unit is as before then.
    """
    unit.update_shared_params()
    assigned = [bucket.module_info.assigned() for bucket in unit.buckets]
    is_meta = unit.is_meta
    counts = [_count(bucket) for bucket in unit.buckets]
    if not any(assigned) or (is_meta and list(map(len, assigned)) != counts):
        return False
    for bucket, values in zip(unit.buckets, assigned, strict=True):
        _check_grad_dtypes(unit, bucket, values)
    dtypes = [
        _dtype_for(unit, bucket, values, has_run)
        for bucket, values in zip(unit.buckets, assigned, strict=True)
    ]
    for bucket, dtype in zip(unit.buckets, dtypes, strict=True):
        if dtype != bucket.shard.dtype:
            cast(unit, bucket, bucket.shard.to(dtype))
    if is_meta:
        materialize(unit, device)
    with torch.no_grad():
        for bucket, values in zip(unit.buckets, assigned, strict=True):
            bucket.module_info.to_sharded()
            for index, value in values.items():
                bucket.sharded_parameters[index].copy_(value)
    if is_meta:
        register_unsharded_once(unit)
    return is_meta


def _count(bucket: Bucket) -> int:
    """Return how many parameters modules have. One that was replaced by another of its unit has no
    place left."""
    return sum(bool(item.registrations) for item in bucket.owned)


def _check_grad_dtypes(unit: Unit, bucket: Bucket, values: Mapping[int, torch.Tensor]) -> None:
    for index, value in values.items():
        its, given = bucket.sharded_parameters[index], given_grad_dtype(value)
        if given not in (None, its._grad_dtype):
            unit.to_sharded()
            raise RuntimeError(
                f"load_state_dict(assign=True) gives parameter {bucket.plan.specs[index].fqn!r} of "
                f"{unit.module_kind} the grad_dtype {given}, and gradients of the sharded one are "
                f"{its._grad_dtype}: set the grad_dtype of sharded parameters before that"
            )


def _dtype_for(
    unit: Unit, bucket: Bucket, values: Mapping[int, torch.Tensor], has_run: bool
) -> torch.dtype:
    """Return the dtype that a bucket rests in when it has taken ``values``, by the index of the
    parameter. Raise RuntimeError if it cannot take them."""
    dtype, found = bucket.shard.dtype, {value.dtype for value in values.values()}
    if found <= {dtype}:
        return dtype
    if len(values) == _count(bucket) and len(found) == 1:
        other = found.pop()
        example = bucket.shard.new_empty(0, dtype=other)
        if validate_cast(unit, bucket, example, has_run) is None:
            return other
    unit.to_sharded()
    [index, *_] = [index for index, value in values.items() if value.dtype != dtype]
    name, given = bucket.plan.specs[index].fqn, values[index].dtype
    what = f"load_state_dict(assign=True) gives parameter {name!r} of {unit.module_kind} as {given}"
    if bucket.is_opaque:
        kind = type(bucket.parameters[index]).__name__
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
    for bucket in unit.buckets:
        unsharded = dict(zip(map(id, bucket.sharded_parameters), bucket.parameters, strict=True))
        for _, module in modules_outside_units(unit.modules):
            for name, parameter in list(module._parameters.items()):
                if id(parameter) in unsharded:
                    setattr(module, name, unsharded[id(parameter)])
        bucket.module_info.to_sharded()
