"""Units that are cast after they were made, as ``model.bfloat16()`` does, and before they run."""

from __future__ import annotations

from dataclasses import replace

import torch

from fsdp_overlap.engine.bucket import Bucket
from fsdp_overlap.engine.policy_dtypes import compute_dtype, reduce_dtype
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.tensor.carried import SUMMED
from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass


def refusal(unit: Unit, bucket: Bucket, result: torch.Tensor, has_run: bool) -> str | None:
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
    """Makes ``values`` the shard of ``bucket``, and their dtype its own. Sharded and unsharded
    parameters stay the same objects, so optimizers may have been made."""
    old = bucket.sharded_parameters
    version, full = bucket.version, bucket.full
    specs = tuple(replace(spec, dtype=values.dtype) for spec in bucket.plan.specs)
    bucket.plan = replace(bucket.plan, specs=specs)
    bucket.compute_dtype = compute_dtype(specs[0], unit.mp_policy)
    bucket.allocate(bucket.device, old)
    bucket.full.memory, bucket.full.keeps_storage = full.memory, full.keeps_storage
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
    if bucket.start is not None:
        bucket.start.move(version, bucket.version)
    unit.forget_parameters()
