"""Slow checks of every operation, recordings of steps, and ranges for profilers that torch does not
know."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm import comm_streams
from fsdp_overlap.engine import hooks
from fsdp_overlap.engine.comm_context import CommContext
from fsdp_overlap.engine.param import is_of_own_class
from fsdp_overlap.engine.param_group import ParamGroup, ParamGroupState
from fsdp_overlap.engine.unit import FREED, INSTEAD, unit_of
from fsdp_overlap.recording.recorder import Recorder
from fsdp_overlap.recording.steps import observing
from fsdp_overlap.torch_internals import TorchDispatchMode


def check_parameters(model: nn.Module) -> TorchDispatchMode:
    """Make an operation raise if it edits an unsharded parameter of ``model``, or uses one after
    its memory was freed. The error comes where the operation is called, and names the parameter and
    its unit.

    Put ``with check_parameters(model):`` around a step to look for a mistake. It makes each
    operation slow.

    Raises:
        ValueError: nothing in ``model`` was sharded.
    """
    units = dict.fromkeys(
        unit for module in model.modules() if (unit := unit_of(module)) is not None
    )
    if not units:
        raise ValueError(
            f"check_parameters() of a {type(model).__name__} without units: call fully_shard() "
            "before"
        )
    return _Checks([param_group for unit in units for param_group in unit.param_groups])


@contextmanager
def record_ranges() -> Iterator[None]:
    """Enter the ``record_function`` ranges of units and collectives although no profiler of torch
    runs. Without one they are left out, which costs nothing."""

    def is_profiled() -> bool:
        return True

    # Each asks by itself, which is faster than an empty range.
    with (
        patch.object(comm_streams, "profiler_enabled", is_profiled),
        patch.object(hooks, "profiler_enabled", is_profiled),
        patch.object(CommContext, "is_profiled", staticmethod(is_profiled)),
    ):
        yield


@contextmanager
def record(
    folder: str | os.PathLike[str], *, steps: int | None = None, keep: str | None = None
) -> Iterator[None]:
    """Record the training steps within the ``with`` block, for ``fsdp-overlap diff``: digests and
    norms of what modules compute, of gradients and of weights, of any program, with any library of
    data parallelism or none.

    Each rank writes a file in ``folder`` when a step ends. Nothing is sent between ranks.

    Args:
        folder: is made if it is not there.
        steps: how many steps to record, by default all. A step ends where the next begins: with the
            first forward after an optimizer's step.
        keep: the name of a module whose outputs, gradients and weights are also saved whole, in
            ``tensors`` in that folder.
    """
    recorder = Recorder(Path(folder), steps, keep)
    try:
        with observing(recorder):
            yield
    finally:
        recorder.close()


class _Checks(TorchDispatchMode):
    def __init__(self, param_groups: Sequence[ParamGroup]) -> None:
        super().__init__()
        self._param_groups = param_groups

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = [*zip(arguments, args, strict=False)]
        by_name = {argument.name: argument for argument in arguments}
        given += [(by_name[name], value) for name, value in kwargs.items()]
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _plain_tensors(value):
                self._check(func, tensor, writes)
        return func(*args, **kwargs)

    def _check(self, func: Any, tensor: torch.Tensor, writes: bool) -> None:
        param_group = next(
            (param_group for param_group in self._param_groups if param_group.full.holds(tensor)),
            None,
        )
        if param_group is None or not tensor.numel():
            return
        # In the other states the library itself writes, to gather.
        if param_group.state is ParamGroupState.UNSHARDED and writes:
            raise RuntimeError(
                f"{func} edits {_name(param_group, tensor)} while it is unsharded, which would be "
                f"lost, because only shards last. {INSTEAD}"
            )
        if param_group.state is ParamGroupState.SHARDED and not (
            func.is_view or _makes_another(func)
        ):
            raise RuntimeError(
                f"{func} uses {_name(param_group, tensor)}: " + FREED.format(param_group.label)
            )


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, DTensor):
        value = value._local_tensor
    if type(value) in (torch.Tensor, nn.Parameter) or is_of_own_class(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain_tensors(item)


def _makes_another(func: Any) -> bool:
    """Return whether ``func`` only reads the shape and dtype of its arguments."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")


def _name(param_group: ParamGroup, tensor: torch.Tensor) -> str:
    index = param_group.full.index_of(tensor)
    if index is not None:
        return f"parameter {param_group.plan.specs[index].fqn!r} of unit {param_group.label!r}"
    return f"the full buffer of unit {param_group.label!r}"
