"""What :func:`~fsdp_overlap.fully_shard` refuses of parameters, before it changes anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.engine import tiles
from fsdp_overlap.engine.comm_policy import QuantizedCommPolicy
from fsdp_overlap.engine.domain import Domain
from fsdp_overlap.engine.ownership import OwnedParameter, kind_of, owner_of
from fsdp_overlap.engine.policy_dtypes import reduce_dtype
from fsdp_overlap.tensor.carried import SUMMED
from fsdp_overlap.tensor.extension import inner_tensors, is_subclass, missing_methods
from fsdp_overlap.tensor.held_gradient import refused_grad_dtype
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor


def check_parameters(
    modules: Sequence[nn.Module], owned: list[OwnedParameter], device: torch.device
) -> None:
    kind = kind_of(modules)
    for item in owned:
        parameter = item.parameter
        where = name_of(kind, item)
        _check_no_owner(modules, item, where)
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"{where} is not initialized; run a forward before fully_shard()")
        held = tiles.tile_in(parameter)
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
    """Checks that a parameter of a class of its own can be sharded with what its class knows.

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
    """Checks that the parameter whose tensor is ``held`` can be gathered. A tensor that consists of
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


def _check_no_owner(modules: Sequence[nn.Module], item: OwnedParameter, where: str) -> None:
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


def check_gradients(
    kind: str, owned: list[OwnedParameter], mp_policy: MixedPrecisionPolicy
) -> None:
    for item in owned:
        dtype = reduce_dtype(item.spec.grad_dtype or item.parameter.dtype, mp_policy)
        if item.parameter.requires_grad and dtype not in SUMMED:
            raise ValueError(
                f"gradients of {name_of(kind, item)} would be reduced in {dtype}, in which nothing "
                "can be summed: use MixedPrecisionPolicy(reduce_dtype=torch.float32), or freeze it "
                "by requires_grad_(False)"
            )


def check_synced(kind: str, owned: list[OwnedParameter]) -> None:
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
    kind: str, item: OwnedParameter, is_in_rows: bool, comm_policy: QuantizedCommPolicy | None
) -> None:
    """Checks that a parameter that says itself how it is gathered can be.

    Raises:
        ValueError: it cannot.
    """
    what = f"{name_of(kind, item)} is a {type(tiles.tile_in(item.parameter)).__name__}, which"
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
    kind: str, owned: list[OwnedParameter], reshard_after_forward: bool | int | None
) -> None:
    for item in owned:
        if item.is_extension and type(reshard_after_forward) is int:
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward}: {name_of(kind, item)} is a "
                f"{type(tiles.tile_in(item.parameter)).__name__}, of which no part can be kept: "
                "use True, False or None"
            )


def check_rows(kind: str, item: OwnedParameter, domain: Domain) -> None:
    """Checks that a parameter can be cut into rows.

    Raises:
        ValueError: it cannot.
    """
    if item.parameter.ndim == 0:
        raise ValueError(
            f"{name_of(kind, item)} is a scalar, of which there are no rows: make it a tensor of "
            "one dimension, or give it the layout Flat()"
        )
    if domain.divides_copies:
        raise ValueError(
            f"{name_of(kind, item)} is in PerTensor(), which copies cannot divide: leave out "
            "shard_optimizer_over_replicas=True, or choose another layout"
        )


def name_of(kind: str, item: OwnedParameter) -> str:
    return f"parameter {item.fqn!r} of {kind}"
