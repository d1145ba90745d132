"""Optimizer states that are contiguous in memory where their parameters are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from fsdp_overlap.comm.comm_streams import is_capturing
from fsdp_overlap.features.rows.row_tensor import RowTensor
from fsdp_overlap.optim.contiguous import find_runs, local_of, locals_of, run_key
from fsdp_overlap.tensor.ops import local_operand
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam


def pack(
    state: Mapping[torch.Tensor, dict[str, Any]],
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    dtype: torch.dtype | None = None,
) -> None:
    """Make the states ``names`` contiguous in memory where their parameters are.

    States that exist keep their values, and new ones are zero. All have ``dtype``, or else the
    dtype of their parameter.

    Raises:
        RuntimeError: the dtype of a parameter is not floating-point, or a state is sharded
            differently from its parameter.
    """
    for parameter in parameters:
        if not local_of(parameter).is_floating_point():
            raise RuntimeError(
                f"optimizers step floating-point parameters, not {local_of(parameter).dtype}"
            )
        check_not_captured(local_of(parameter).device)
    held = [parameter for parameter in parameters if local_of(parameter).numel()]
    locals_ = locals_of(held)
    keys = list(map(run_key, held, [local.dtype for local in locals_]))
    runs = {id(held[first]): numel for first, numel in find_runs([locals_], keys)}
    flats: list[torch.Tensor] = []
    start = 0
    for parameter in parameters:
        local = local_of(parameter)
        param_state = state[parameter]
        if not isinstance(parameter, ShardedParam):
            for name in names:
                zeros = torch.zeros_like(parameter, dtype=dtype)
                if name in param_state:
                    zeros.copy_(param_state[name])
                param_state[name] = zeros
            continue
        if id(parameter) in runs:
            flats = [local.new_zeros(runs[id(parameter)], dtype=dtype) for _ in names]
            start = 0
        for index, name in enumerate(names):
            part = local.new_zeros(0, dtype=dtype)
            if local.numel():
                part = flats[index][start : start + local.numel()]
            if name in param_state:
                part.copy_(_own_part(param_state[name], parameter).view(-1))
            param_state[name] = parameter.wrap_like(part)
        start += local.numel()


def check_not_captured(device: torch.device) -> None:
    """Check that states on ``device`` may be made, or moved to other memory.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would do it in each replay.
    """
    if is_capturing(device):
        raise RuntimeError(
            "a CUDA graph is captured in which optimizer states are made: before the capture, step "
            "the optimizer once with gradients of the same parameters"
        )


@contextmanager
def between_load_hooks(
    optimizer: torch.optim.Optimizer,
    before: Callable[[dict[str, Any]], dict[str, Any]],
    after: Callable[[], None],
) -> Iterator[None]:
    """Have torch's ``load_state_dict`` load what ``before`` makes of the state dict that users'
    hooks have returned, and call ``after`` before the hooks that users have it call at its end."""
    handles = (
        optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: before(state_dict)),
        optimizer.register_load_state_dict_post_hook(lambda _: after(), prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def keeping_dtypes(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Load states unrounded whose dtype differs from their parameter's, which torch's
    ``load_state_dict`` rounds to the parameter's dtype."""
    loaded: dict[str, Any] = {}

    def keep(state_dict: dict[str, Any]) -> dict[str, Any]:
        loaded.update(state_dict)
        return state_dict

    with between_load_hooks(optimizer, keep, lambda: _restore(optimizer, loaded)):
        yield


@torch.no_grad()
def _restore(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Copy values from ``state_dict`` into the states whose dtype differs from their
    parameter's."""
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, parameter in zip(saved, own, strict=True):
        dtype = local_of(parameter).dtype
        for name, value in state_dict["state"].get(index, {}).items():
            state = optimizer.state[parameter].get(name)
            if name != "step" and isinstance(state, torch.Tensor) and state.dtype != dtype:
                if isinstance(parameter, ShardedParam):
                    value = _own_part(value, parameter)
                local_of(state).copy_(value)


def _own_part(value: torch.Tensor, parameter: ShardedParam) -> torch.Tensor:
    """Return this rank's part of a loaded ``value``, which may be a full tensor."""
    if isinstance(parameter, RowTensor):
        return parameter.local_part(value)
    local: torch.Tensor = local_operand("load_state_dict", value, parameter)
    return local


def different_option(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first option of the group ``one`` that is another in ``other``, ``None`` if there
    is none. Parameters are no option."""
    names = (name for name in one if name not in ("params", "param_names"))
    return next((name for name in names if not same_option(one[name], other.get(name))), None)


def same_option(one: Any, other: Any) -> bool:
    """Return whether two values of an option are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and torch.equal(one, other)
    try:
        return one is other or bool(one == other)
    except (RuntimeError, ValueError):  # arrays, lists of tensors
        return False
