"""What shows every operation of a program to the modelled device: modes of torch that see each call
of Python and each operation of the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdp_overlap.modelled.device import ModelledDevice
from fsdp_overlap.modelled.findings import place
from fsdp_overlap.modelled.queues import Queue

NAME = "modelled"

PLAIN = (torch.Tensor, nn.Parameter)

# They take memory and do not touch it.
_ALLOCATE_ONLY = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

# They change what a tensor is a view of, or do nothing at all.
_TOUCH_NOTHING = {"set_", "resize_", "lift", "detach_", "_unsafe_view", "_reshape_alias"}

# They look at the shape of what they get, and at nothing in it.
_READ_NOTHING = {
    f"{value}_like" for value in ("zeros", "ones", "full", "rand", "randn", "randint")
} | {"new_zeros", "new_ones", "new_full"}

# They may have operands on both sides.
_CROSSING = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put_", "_index_put_impl_"}

# Collectives write their first argument, and read it where they have no other. The schemas do not
# tell.
_WRITES_NOTHING = {"barrier", "monitored_barrier_"}

_SYNCS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class About:
    """What the schema of an operation tells."""

    name: str
    is_collective: bool
    touches_nothing: bool
    allocates_only: bool
    reads_nothing: bool
    may_cross: bool
    gives_value: bool
    """Whether the host has to know a value to go on."""
    written: tuple[bool, ...]
    """Whether it writes each of its arguments."""
    non_blocking: int
    """Which argument says that the host does not wait, -1 if none does."""

    @classmethod
    @cache
    def of(cls, func: Any) -> About:
        name = func.overloadpacket.__name__
        arguments = func._schema.arguments
        is_collective = func.namespace == "c10d"
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        if is_collective and name not in _WRITES_NOTHING:
            written[0] = True
        return cls(
            name,
            is_collective,
            func.is_view or name in _TOUCH_NOTHING,
            name in _ALLOCATE_ONLY,
            name in _READ_NOTHING,
            name in _CROSSING,
            any(tag in func.tags for tag in _SYNCS),
            tuple(written),
            next((i for i, a in enumerate(arguments) if a.name == "non_blocking"), -1),
        )


class Dispatch(TorchDispatchMode):
    """Tells the device what each operation reads, writes and allocates."""

    def __init__(self, device: ModelledDevice) -> None:
        super().__init__()
        self.device = device
        self.makes_on_device: bool | None = None
        """Where new memory lies, if the call under way says so."""
        self.makes_pinned = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # which has no memory: torch asks for a shape
        if any(each not in PLAIN for each in types):
            return NotImplemented  # its own operations come one by one
        if torch.is_inference_mode_enabled() and func._can_decompose():
            # Autograd, which else takes such operations apart, was passed by.
            with self:
                return func.decompose(*args, **kwargs)
        about = About.of(func)
        with torch._C.DisableTorchFunction():
            if about.name.startswith("lift_fresh"):
                return self._take_in(func, args)
            if about.touches_nothing:
                return func(*args, **kwargs)
            values = [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])]
            reads = [
                t
                for value, w in zip(values, about.written, strict=True)
                if not w
                for t in _tensors(value)
            ]
            writes = [
                t
                for value, w in zip(values, about.written, strict=True)
                if w
                for t in _tensors(value)
            ]
            return self._run(about, reads, writes, values, lambda: func(*args, **kwargs))

    def _run(
        self,
        about: About,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        values: Sequence[Any],
        call: Callable[[], Any],
    ) -> Any:
        device = self.device
        on_device = self._is_on_device(about, [*reads, *writes])
        device.check_is_there(about.name, [*reads, *writes])
        output = call()
        makes = on_device if self.makes_on_device is None else self.makes_on_device
        new = [tensor for tensor in _tensors(output) if not device.knows(tensor)]
        for tensor in new:
            device.place(tensor, makes, self.makes_pinned)
        if about.allocates_only:
            return output
        reads = [] if about.reads_nothing else reads
        writes = [*writes, *new]
        group = _group_among(values) if about.is_collective and on_device else None
        if group is not None:
            device.issue(group, about.name, reads, writes)
        else:
            device.run(about.name, reads, writes, on_host=not (on_device or (new and makes)))
        if about.gives_value and on_device:
            self._wait(about)
        elif about.may_cross and reads and writes:
            does_not_wait = about.non_blocking >= 0 and bool(values[about.non_blocking])
            self._note_crossing(about, reads, writes, does_not_wait)
        return output

    def _take_in(self, func: Any, args: Any) -> Any:
        """``torch.tensor()`` has made a tensor of Python's numbers."""
        output = func(*args)
        if not self.device.knows(output):
            self.device.place(output, bool(self.makes_on_device), self.makes_pinned)
            if self.makes_on_device:
                self.device.wait_on_host(self.device.mark(self.device.current), "tensor")
        return output

    def _is_on_device(self, about: About, tensors: Sequence[torch.Tensor]) -> bool:
        """Where an operation runs.

        Raises:
            RuntimeError: its operands are on the host and on the device.
        """
        sides = [self.device.is_here(tensor) for tensor in tensors]
        if not any(sides):
            return False
        is_mixed = any(not side and t.dim() for side, t in zip(sides, tensors, strict=True))
        if is_mixed and not about.may_cross:
            raise RuntimeError(
                f"{about.name} got tensors on the host and on the modelled device ({place()}): "
                "move them to one of the two"
            )
        return True

    def _note_crossing(
        self,
        about: About,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        does_not_wait: bool,
    ) -> None:
        """The host waits for a copy between it and the device, unless it is asked not to and the
        host's memory cannot be paged out."""
        target = self.device.memory_of(writes[0])
        for source in map(self.device.memory_of, reads):
            if source.is_on_device == target.is_on_device:
                continue
            on_host = target if source.is_on_device else source
            if not (does_not_wait and on_host.is_pinned):
                self._wait(about)

    def _wait(self, about: About) -> None:
        self.device.wait_on_host(self.device.mark(self.device.current), about.name)


def _group_among(values: Sequence[Any]) -> dist.ProcessGroup | None:
    for value in values:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None


def _inner(tensor: torch.Tensor) -> torch.Tensor | None:
    """What lies in memory behind a tensor of torch's own classes."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _tensors(each)]
    return []


class Calls(TorchFunctionMode):
    """Gives tensors of the modelled device a device, moves tensors to it and back, and lets nodes
    of autograd's graph run on the stream of their forward, as the engine does for accelerators."""

    def __init__(self, device: ModelledDevice, dispatch: Dispatch) -> None:
        super().__init__()
        self.device = device
        self.dispatch = dispatch
        self._here = torch.device(NAME, 0)
        # By the engine's number of a backward: the stream it was called on, and those it used.
        self._backwards: dict[int, tuple[Queue, set[Queue]]] = {}
        tensor: Any = torch.Tensor  # whose stubs call properties bool
        self._getters: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: self._device_of,
            tensor.is_cpu.__get__: self._is_on_host,
            tensor.get_device: self._index_of,
        }
        self._instead: dict[Any, Callable[..., Any]] = {
            **self._getters,
            tensor.to: self._to,
            tensor.cpu: self._to_host,
            tensor.__deepcopy__: self._copy_deeply,
            tensor.pin_memory: self._pin,
            tensor.is_pinned: self._is_pinned,
            tensor.tolist: self._read,
            tensor.numpy: self._read,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for each in types if torch._C._is_torch_function_enabled() else ():
            if each.__torch_function__ is not _DISABLED and each not in PLAIN:
                # What it does to its inner tensors is to be seen too.
                with self:
                    return each.__torch_function__(func, types, args, kwargs)
        instead = self._instead.get(func)
        if instead is not None:
            if type(args[0]) in PLAIN:
                return instead(func, *args, **kwargs)
            if func in self._getters and (inner := _inner(args[0])) is not None:
                return instead(func, inner)
        if kwargs.get("device") is not None or kwargs.get("pin_memory"):
            return self._make(func, args, kwargs)
        output = func(*args, **kwargs)
        if torch.is_grad_enabled():
            self._follow(output)
        return output

    # Sides

    def _device_of(self, func: Any, tensor: torch.Tensor) -> torch.device:
        return self._here if self.device.is_here(tensor) else func(tensor)

    def _is_on_host(self, func: Any, tensor: torch.Tensor) -> bool:
        return func(tensor) and not self.device.is_here(tensor)

    def _index_of(self, func: Any, tensor: torch.Tensor) -> int:
        return 0 if self.device.is_here(tensor) else func(tensor)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call that says where what it makes is to lie."""
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        is_ours = target is not None and target.type == NAME
        pinned = bool(kwargs.pop("pin_memory", False))
        if is_ours:
            kwargs["device"] = "cpu"
        elif target is not None and target.type != "cpu":
            return func(*args, **kwargs)
        return self._with_memory(is_ours, pinned, lambda: func(*args, **kwargs))

    def _with_memory(self, on_device: bool, pinned: bool, make: Callable[[], Any]) -> Any:
        dispatch = self.dispatch
        before = dispatch.makes_on_device, dispatch.makes_pinned
        dispatch.makes_on_device, dispatch.makes_pinned = on_device, pinned
        try:
            output = make()
        finally:
            dispatch.makes_on_device, dispatch.makes_pinned = before
        if torch.is_grad_enabled():
            self._follow(output)
        return output

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            args = (
                args[0].device if not self.device.is_here(args[0]) else self._here,
                args[0].dtype,
            )
        copy = kwargs.pop("copy", False)
        target, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        is_here = self.device.is_here(tensor)
        goes_here = is_here if target is None else target.type == NAME
        if target is not None and target.type not in (NAME, "cpu"):
            return func(tensor, *args, **kwargs, copy=copy)
        options = {"non_blocking": non_blocking, "copy": copy or goes_here != is_here}
        if dtype is not None:
            options["dtype"] = dtype
        if memory_format is not None:
            options["memory_format"] = memory_format
        return self._with_memory(goes_here, False, lambda: func(tensor, "cpu", **options))

    def _to_host(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._to(torch.Tensor.to, tensor, "cpu")

    def _copy_deeply(self, func: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """torch copies the storage, by operations that do not tell where it lies."""
        with _disable_current_modes():
            output: torch.Tensor = func(tensor, memo)
        if not self.device.knows(output):
            is_here = self.device.is_here(tensor)
            self.device.place(output, is_here)
            self.device.run("deepcopy", [tensor], [output], on_host=not is_here)
        return output

    def _pin(self, func: Any, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        return self._with_memory(False, True, tensor.clone)

    def _is_pinned(self, func: Any, tensor: torch.Tensor, *args: Any) -> bool:
        return self.device.memory_of(tensor).is_pinned

    def _read(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The host reads values without an operation that the dispatcher sees."""
        device = self.device
        if self.device.is_here(tensor):
            if func == torch.Tensor.numpy:
                raise TypeError(
                    f"numpy() of a tensor on the modelled device ({place()}): use cpu()"
                )
            device.wait_on_host(device.mark(device.current), func.__name__)
        device.run(func.__name__, [tensor], [], on_host=True)
        return func(tensor, *args, **kwargs)

    # Autograd

    def _follow(self, output: Any) -> None:
        """Nodes that ``output`` added to the graph run on the stream that is current now."""
        stream = self.device.current
        for tensor in _tensors(output):
            last: Any = tensor.grad_fn
            if type(tensor) not in PLAIN or last is None or _KEY in last.metadata:
                continue
            # Before the hooks that others will add to it.
            tensor.register_hook(partial(self._enter_with, stream))
            pending = [last]
            while pending:
                node = pending.pop()
                if node is None or _KEY in node.metadata:
                    continue
                node.metadata[_KEY] = True
                node.register_prehook(partial(self._enter, stream))
                pending.extend(behind for behind, _ in node.next_functions)

    def _enter_with(self, stream: Queue, gradient: torch.Tensor) -> None:
        self._enter(stream, (gradient,))

    def _enter(self, stream: Queue, gradients: Sequence[torch.Tensor | None]) -> None:
        """A node that is to run on ``stream`` gets its gradients."""
        device = self.device
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            self._backwards[task] = device.current, set()
            Variable._execution_engine.queue_callback(partial(self._end_backward, task))
        self._backwards[task][1].add(stream)
        device.current = stream
        with torch._C.DisableTorchFunction():
            for gradient in gradients:
                if gradient is not None and type(gradient) in PLAIN:
                    self._wait_for_writers(gradient, stream)

    def _wait_for_writers(self, tensor: torch.Tensor, stream: Queue) -> None:
        """The engine lets a node's stream wait for those that its gradients were made on."""
        for access in self.device.memory_of(tensor).accesses:
            writer = self.device.queues[access.stamp.queue]
            if access.writes and writer is not stream:
                known = {**writer.clock, access.stamp.queue: access.stamp.tick}
                stream.learn(known, writer.ends)

    def _end_backward(self, task: int) -> None:
        """The stream that backward was called on waits for those that nodes ran on."""
        device = self.device
        caller, used = self._backwards.pop(task)
        for stream in used:
            device.wait(caller, device.mark(stream))
        device.current = caller

    def seeing(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``call`` and sees what it does, also where torch has left the mode because it has
        seen the call around it."""
        is_left = self not in _get_current_function_mode_stack()
        with self if is_left else nullcontext():
            return call(*args, **kwargs)

    def differentiate(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Lets the engine ``run`` a backward."""
        device, caller, before = self.device, self.device.current, dict(self._backwards)
        try:
            return self.seeing(run, *args, **kwargs)
        finally:
            # Also after an error, when the engine calls nobody back.
            device.current, self._backwards = caller, before


_DISABLED = torch._C._disabled_torch_function_impl

# What marks a node whose stream is known.
_KEY = "fsdp_overlap.modelled"
