"""What fully_shard() refuses of parameters before it changes anything, and what ranks compare: the
values that parameters had, and plans."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.desync.order_check import START, greatest
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.options import QuantizedCommPolicy, reduce_dtype
from fsdp_overlap.engine.param import (
    UNKNOWN,
    ParamInfo,
    hash_of,
    kind_of,
    modules_outside_units,
    owner_of,
    tp_local_tensor,
)
from fsdp_overlap.engine.param_group import Bucket
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.tensor.carried import SUMMED
from fsdp_overlap.tensor.extension import inner_tensors, is_subclass, missing_methods
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor
from fsdp_overlap.tensor.sharded_param import refused_grad_dtype

# ---- What fully_shard() refuses ----


def check_parameters(
    modules: Sequence[nn.Module], owned: list[ParamInfo], device: torch.device
) -> None:
    kind = kind_of(modules)
    for item in owned:
        parameter = item.parameter
        where = name_of(kind, item)
        _check_no_owner(modules, item, where)
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"{where} is not initialized; run a forward before fully_shard()")
        held = tp_local_tensor(parameter)
        if item.is_opaque:
            _check_opaque(where, parameter, device)
        else:
            _check_class(where, held)
        if not held.is_contiguous():
            raise ValueError(
                f"{where} is not contiguous (shape {tuple(held.shape)}, strides "
                f"{held.stride()}); replace its data by .contiguous() first"
            )
        grad_dtype = parameter.grad_dtype
        if (refused := refused_grad_dtype(parameter.dtype, grad_dtype)) is not None:
            raise ValueError(
                f"{where} is {parameter.dtype} and its grad_dtype {grad_dtype}: {refused}"
            )
        if parameter.layout is not torch.strided:
            raise TypeError(f"{where} has layout {parameter.layout}; only strided is supported")
        if parameter.device.type not in (device.type, "cpu", "meta"):
            raise ValueError(
                f"{where} is on {parameter.device}, the mesh on {device.type}; move the module "
                "first"
            )
        if parameter.is_meta != owned[0].parameter.is_meta:
            raise ValueError(
                f"{where} is on {parameter.device}, {owned[0].fqn!r} on "
                f"{owned[0].parameter.device}: put all parameters of a unit on the meta device, or "
                "none"
            )


def _check_opaque(where: str, parameter: nn.Parameter, device: torch.device) -> None:
    """Check that a parameter of a class of its own can be sharded with what its class knows.

    Raises:
        TypeError, ValueError: it cannot.
    """
    kind = type(parameter).__name__
    if parameter.requires_grad:
        raise TypeError(
            f"{where} is a {kind} that requires grad; parameters of a class of their own are "
            "supported if they are frozen, and are then never cast: call requires_grad_(False), or "
            "use a plain torch.nn.Parameter"
        )
    is_there = parameter.device.type == device.type
    if not is_there or (device.index is not None and parameter.device.index != device.index):
        raise ValueError(
            f"{where} is a {kind} on {parameter.device}, and the unit computes on {device}: move "
            "the module there first, because what the class holds beside the elements, such as "
            "scales, would stay behind"
        )


def _check_class(where: str, held: torch.Tensor) -> None:
    """Check that the parameter whose tensor is ``held`` can be gathered. A tensor that consists of
    others may get both methods of an extension later, as in FSDP2.

    Raises:
        TypeError: it cannot.
    """
    missing = missing_methods(held)
    may_come_later = len(missing) == 2 and bool(inner_tensors(held))
    if is_subclass(held) and missing and not may_come_later:
        raise TypeError(
            f"{where} is a {type(held).__name__} without {' and '.join(missing)}; only plain "
            "torch.nn.Parameter, frozen ones of a class derived from it, DTensors of tensor "
            "parallelism and tensors with both methods of FSDP2's extensions are supported"
        )


def _check_no_owner(modules: Sequence[nn.Module], item: ParamInfo, where: str) -> None:
    owner = owner_of(item.parameter)
    if owner is None:
        return
    name = item.fqn if len(modules) == 1 else item.fqn.partition(".")[2]
    # A unit around these modules registered its sharded parameter in them. The parameter's name in
    # that unit is longer, and ends as this one does.
    if isinstance(item.parameter, RaggedDTensor) and owner.fqn.endswith(f".{name}"):
        raise ValueError(
            f"{where} was sharded already, as {owner.fqn!r} of the unit {owner.unit} around it: "
            "call fully_shard on inner modules first, then on the module around them"
        )
    raise ValueError(
        f"{where} is also {owner.fqn!r} of the unit {owner.unit}: a parameter belongs to one unit; "
        "make one unit of the two modules that share it, by fully_shard([a, b], ctx), or call "
        "fully_shard on neither and on a module that holds both"
    )


def check_gradients(kind: str, owned: list[ParamInfo], mp_policy: MixedPrecisionPolicy) -> None:
    for item in owned:
        dtype = reduce_dtype(item.spec.grad_dtype or item.parameter.dtype, mp_policy)
        if item.parameter.requires_grad and dtype not in SUMMED:
            raise ValueError(
                f"gradients of {name_of(kind, item)} would be reduced in {dtype}, in which nothing "
                "can be summed: use MixedPrecisionPolicy(reduce_dtype=torch.float32), or freeze it "
                "by requires_grad_(False)"
            )


def check_synced(kind: str, owned: list[ParamInfo]) -> None:
    for item in owned:
        if item.parameter.is_meta:
            raise ValueError(
                f"{name_of(kind, item)} is on the meta device, and sync_module_states=True takes "
                "it from the first rank: build the model with memory on every rank, or leave the "
                "argument out and load the weights after to_empty()"
            )
        if item.is_opaque:
            raise ValueError(
                f"{name_of(kind, item)} is a {type(item.parameter).__name__}, and "
                "sync_module_states=True takes elements alone from the first rank, without what "
                "the class holds beside them: quantize the same weights on every rank"
            )


def check_extension(
    kind: str, item: ParamInfo, is_in_rows: bool, comm_policy: QuantizedCommPolicy | None
) -> None:
    """Check that a parameter that says itself how it is gathered can be.

    Raises:
        ValueError: it cannot.
    """
    what = f"{name_of(kind, item)} is a {type(tp_local_tensor(item.parameter)).__name__}, which"
    if not is_in_rows:
        raise ValueError(
            f"{what} is cut between rows alone: use FsdpContext(layout=PerTensor()), or a "
            "function that "
            "returns PerTensor() for it"
        )
    if item.cut_dim:
        raise ValueError(
            f"{what} is cut along its first dimension alone, and shard_placement_fn wants "
            f"Shard({item.cut_dim}): return None or Shard(0)"
        )
    if comm_policy is not None:
        raise ValueError(
            f"{what} says itself what travels: leave out comm_policy, or make a unit of its own of "
            "the module that has it"
        )


def check_kept_parts(
    kind: str, owned: list[ParamInfo], reshard_after_forward: bool | int | None
) -> None:
    for item in owned:
        if item.is_extension and type(reshard_after_forward) is int:
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward}: {name_of(kind, item)} is a "
                f"{type(tp_local_tensor(item.parameter)).__name__}, of which no part can be kept: "
                "use True, False or None"
            )


def check_rows(kind: str, item: ParamInfo, mesh_info: MeshInfo) -> None:
    """Check that a parameter can be cut into rows.

    Raises:
        ValueError: it cannot.
    """
    if item.parameter.ndim == 0:
        raise ValueError(
            f"{name_of(kind, item)} is a scalar, of which there are no rows: make it a tensor of "
            "one dimension, or give it the layout Flat()"
        )
    if mesh_info.divides_copies:
        raise ValueError(
            f"{name_of(kind, item)} is in PerTensor(), which copies cannot divide: leave out "
            "shard_optimizer_over_replicas=True, or choose another layout"
        )


def name_of(kind: str, item: ParamInfo) -> str:
    return f"parameter {item.fqn!r} of {kind}"


# ---- Whether ranks planned the same ----


def compare_plans(
    units: Sequence[Unit], mesh_info: MeshInfo, groups: Sequence[dist.ProcessGroup]
) -> None:
    """Check that the ranks of ``mesh_info`` planned ``units`` alike. Collective over ``groups``,
    which together connect these ranks.

    Raises:
        RuntimeError: ranks planned differently.
    """
    mine = [
        (f"{unit.name!r} ({unit.module_kind})", _digest(plans))
        for unit in units
        if (
            plans := [
                f"{bucket.plan!r} {bucket.comm_policy}"
                for bucket in unit.buckets
                if bucket.mesh_info is mesh_info
            ]
        )
    ]
    of_all = {dist.get_rank(): mine}
    # The plans of all ranks are collected first, so that every rank finds the same difference.
    for group in groups:
        known = [of_all] * group.size()
        dist.all_gather_object(known, of_all, group)
        of_all = {rank: theirs for part in known for rank, theirs in part.items()}
    first = min(of_all)
    for rank, theirs in sorted(of_all.items()):
        for ours, other in zip_longest(of_all[first], theirs, fillvalue=("none", "")):
            if ours != other:
                what = f"where rank {first} has unit {ours[0]}, rank {rank} has {other[0]}"
                if ours[0] == other[0]:
                    what = (
                        f"unit {ours[0]} has other parameters, dtypes or layouts on rank {first} "
                        f"than on rank {rank}"
                    )
                raise RuntimeError(
                    f"ranks planned differently: {what}; every rank must build the same model and "
                    "shard it in the same order, and ctx.plan_layout() it or not"
                )


def _digest(plans: list[str]) -> str:
    return sha256(repr(plans).encode()).hexdigest()


# ---- Whether ranks start from the same values: Note [starts] ----

# Stands for the summary of a rank's digests, if it is known that some ranks differ.
DIFFERENT = -1


def verify_params_across_ranks(buckets: Iterable[Bucket]) -> None:
    """Compare what ranks start from in those ``buckets`` that were not compared yet. Collective
    over their meshes.

    Raises:
        RuntimeError: on every rank, if ranks hold different values. Name the first parameter.
    """
    by_mesh: dict[MeshInfo, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.init_hashes is not None:
            by_mesh.setdefault(bucket.mesh_info, []).append(bucket)
    failure = ""
    # Small meshes first: a difference there is an error on all ranks of the meshes that follow.
    for mesh_info in sorted(by_mesh, key=lambda mesh_info: mesh_info.mesh.size()):
        failure = _difference(mesh_info, by_mesh[mesh_info], failure) or failure
    if failure:
        raise RuntimeError(failure)
    for compared in by_mesh.values():
        for bucket in compared:
            bucket.init_hashes = None


def _difference(mesh_info: MeshInfo, buckets: Sequence[Bucket], failure: str) -> str:
    """Return what differs between ranks of ``mesh_info``, or was found on another mesh, in words.
    ``failure`` is what this rank found there. Empty if nothing differs, and if ranks have different
    models, which the check of the order finds."""
    names = [f"{spec.fqn!r} of unit {b.label!r}" for b in buckets for spec in b.plan.specs]
    digests: list[int] = []
    for bucket in buckets:
        assert bucket.init_hashes is not None
        digests += bucket.init_hashes.digests(bucket.version)
    shapes = hash_of(repr([bucket.plan.specs for bucket in buckets]).encode())
    summary = DIFFERENT if failure else hash_of(array("q", digests).tobytes())
    groups = mesh_info.groups_to_ask
    for group in groups:
        # What differs in one group is made known to the next.
        for _, its_shapes, its_summary in mesh_info.order_check.ask(
            [START, shapes, summary], group
        ):
            shapes = shapes if its_shapes == shapes else DIFFERENT
            summary = summary if its_summary == summary else DIFFERENT
    if shapes == DIFFERENT or summary != DIFFERENT:
        return ""

    def over_ranks(numbers: Sequence[int]) -> list[int]:
        found: list[int] = greatest(torch.tensor(numbers, device=mesh_info.device), groups).tolist()
        return found

    # The greatest of a number and the greatest of its complement tell whether all ranks agree.
    complements = [UNKNOWN if each == UNKNOWN else ~each for each in digests]
    has_failed, *of_all = over_ranks([bool(failure), *digests, *complements])
    high, low = of_all[: len(digests)], of_all[len(digests) :]
    different = [
        index
        for index, (most, least) in enumerate(zip(high, low, strict=True))
        if UNKNOWN != most != ~least
    ]
    if not different:
        elsewhere = "ranks of another mesh were given different weights, as they tell"
        return failure or (elsewhere if has_failed else "")
    first = different[0]
    is_known, is_high = digests[first] != UNKNOWN, digests[first] == high[first]
    rank = dist.get_rank()
    ranks = over_ranks([rank if is_high else -1, rank if is_known and not is_high else -1])
    others = len(different) - 1
    differ = f"(and {others} other{'s'[: others > 1]}) differ" if others else "differs"
    return (
        f"Parameter {names[first]} {differ} across ranks {min(ranks)} and {max(ranks)} at "
        "fully_shard(). Seed or load every rank identically, or pass "
        "FsdpContext(sync_module_states=True)."
    )


def sync_module_states_from_first(
    modules: Sequence[nn.Module],
    by_mesh: Mapping[MeshInfo, Sequence[ParamInfo]],
    mesh: DeviceMesh,
) -> None:
    """Give parameters the values that they have on the first rank of their mesh, and the
    buffers of ``modules`` those that they have on the first rank of ``mesh``. Collective over these
    meshes."""
    for mesh_info, items in by_mesh.items():
        for item in items:
            for values in inner_tensors(tp_local_tensor(item.parameter)):
                _broadcast_from_first(values, mesh_info.mesh)
    for _, owner in modules_outside_units(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and not buffer.is_meta:
                _broadcast_from_first(tp_local_tensor(buffer), mesh)


def _broadcast_from_first(values: torch.Tensor, mesh: DeviceMesh) -> None:
    """Overwrite ``values`` with those of the first rank. Take as much memory again if they are
    not contiguous, or not on the device of ``mesh``."""
    if not values.numel():
        return
    values = values.detach()
    sent = values.to(mesh.device_type).contiguous()
    # Sent as bytes, because not every backend knows every dtype.
    raw = sent.view(-1).view(torch.uint8)
    for dim in range(mesh.ndim):
        coordinate = list(mesh.get_coordinate() or ())
        coordinate[dim] = 0
        first = int(mesh.mesh[tuple(coordinate)])
        dist.broadcast(raw, first, group=mesh.get_group(dim))
    if sent is not values:
        values.copy_(sent)
