"""Functional collectives, which DTensors use: each returns a new tensor, which is waited for later.

torch runs them on the stream of their process group, and keeps what they read until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_overlap.emulator.device import EmulatedDevice
from fsdp_overlap.emulator.queues import Moment
from fsdp_overlap.torch_internals import AsyncCollectiveTensor, group_named


def is_functional(func: Any) -> bool:
    """Return whether an operator is a functional collective, or of those that wait for one."""
    return bool(func.namespace == "_c10d_functional")


class Functional:
    """Issues functional collectives as plain ones, each on the stream of its group."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self._pending: dict[int, _Pending] = {}

    def run(self, name: str, args: Sequence[Any]) -> torch.Tensor:
        """Do what the operator ``name`` does. What it takes memory for and enqueues on the way is
        seen by the modes that are on.

        Raises:
            NotImplementedError: the emulated device has no such collective.
        """
        tensor: torch.Tensor = args[0]
        if name == "wait_tensor":
            self._wait(tensor)
            return tensor
        if name == "_wrap_tensor_autograd":
            # For a tensor without values torch returns another one, and waits for none.
            return AsyncCollectiveTensor(tensor)
        if name not in _PLAIN:
            raise NotImplementedError(
                f"the functional collective {name} on the emulated device: there are "
                f"{', '.join(_PLAIN)}"
            )
        *options, group = args[1:]
        if not isinstance(group, dist.ProcessGroup):
            group = group_named(group)
        source = tensor.contiguous()
        plain = _PLAIN[name](group, source, *options)
        self._issue(group.group_name, plain, source)
        return plain.output

    def _issue(self, group: str, plain: _Plain, source: torch.Tensor) -> None:
        device, current = self.device, self.device.current
        stream = device.stream_of(group)
        device.program_streams.add(stream)
        device.wait(stream, device.mark(current))
        device.current = stream
        try:
            work = plain.issue()
        finally:
            device.current = current
        key = plain.output.untyped_storage()._cdata
        self._pending[key] = _Pending(device.mark(stream), work, source)

    def _wait(self, tensor: torch.Tensor) -> None:
        pending = self._pending.pop(tensor.untyped_storage()._cdata, None)
        if pending is not None:
            pending.work.wait()
            self.device.wait(self.device.current, pending.moment)


class _Pending(NamedTuple):
    """When a collective ends, what it reads until then, and what to wait for: a group of real ranks
    may put its result in place no earlier."""

    moment: Moment
    work: dist.Work
    source: torch.Tensor


class _Plain(NamedTuple):
    """What a functional collective returns, and what issues the plain one that fills it."""

    output: torch.Tensor
    issue: Callable[[], dist.Work]


def _all_gather(group: Any, source: torch.Tensor, ranks: int) -> _Plain:
    output = source.new_empty((ranks * source.shape[0], *source.shape[1:]))
    return _Plain(output, partial(group._allgather_base, output, source))


def _reduce_scatter(group: Any, source: torch.Tensor, operation: str, ranks: int) -> _Plain:
    output = source.new_empty((source.shape[0] // ranks, *source.shape[1:]))
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, operation.upper())
    return _Plain(output, partial(group._reduce_scatter_base, output, source, options))


def _all_reduce(group: Any, source: torch.Tensor, operation: str) -> _Plain:
    output = source.clone()
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, operation.upper())
    return _Plain(output, partial(group.allreduce, [output], options))


def _all_to_all(
    group: Any, source: torch.Tensor, received: Sequence[int], sent: Sequence[int]
) -> _Plain:
    output = source.new_empty((sum(received), *source.shape[1:]))
    return _Plain(output, partial(group.alltoall_base, output, source, received, sent))


_PLAIN: dict[str, Callable[..., _Plain]] = {
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all_single": _all_to_all,
}
