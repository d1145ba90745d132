"""Functional collectives, which DTensors use: each returns a new tensor, which is waited for later.

torch runs them on the stream of their process group, and keeps what they read until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_overlap.tools.emulator.device import EmulatedDevice, EnqueuedCollective
from fsdp_overlap.tools.torch_internals import group_named
from fsdp_overlap.torch_internals import AsyncCollectiveTensor


def is_functional(func: Any) -> bool:
    """Return whether an operator is a functional collective, or of those that wait for one."""
    return bool(func.namespace == "_c10d_functional")


class Functional:
    """Issues functional collectives as plain ones, each on the stream of its group."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self._pending: WeakKeyDictionary[
            torch.UntypedStorage, tuple[dist.Work, EnqueuedCollective]
        ] = WeakKeyDictionary()
        """What to wait for, by the storage of the output: a group of real ranks may put its result
        in place no earlier than its work is done."""

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
        with self.device.on_stream_of(group) as stream:
            self.device.program_streams.add(stream)
            work = plain.issue()
        enqueued = self.device.keep(stream, (source, plain.output))
        self._pending[plain.output.untyped_storage()] = work, enqueued

    def _wait(self, tensor: torch.Tensor) -> None:
        work, enqueued = self._pending.pop(tensor.untyped_storage(), (None, None))
        if work is not None and enqueued is not None:
            work.wait()
            enqueued.wait()


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
