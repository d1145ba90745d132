"""A dispatch mode that shows the emulated device every operation that torch runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.tools.emulator.device import EmulatedDevice, Operation, OperatorCall
from fsdp_overlap.tools.emulator.functional import Functional, is_functional
from fsdp_overlap.tools.emulator.shapes import run_on_shapes
from fsdp_overlap.tools.emulator.sites import call_site
from fsdp_overlap.tools.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    HigherOrderOperator,
    disable_current_modes,
    has_kernel,
    run_kernel_of_cuda,
)
from fsdp_overlap.torch_internals import AsyncCollectiveTensor, TorchDispatchMode, tree_map_only

NAME = "emulated"
"""What torch calls devices of this kind. A number alone is one of them, too."""

PLAIN = (torch.Tensor, nn.Parameter)

# Operations that take memory and do not touch it.
_ALLOCATE_ONLY = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

# Operations that change what a tensor is a view of, or do nothing at all.
_TOUCH_NOTHING = {"set_", "resize_", "lift", "detach_", "_unsafe_view", "_reshape_alias"}
_TOUCH_NOTHING |= {"record_grad_output_stream"}

# Operations that read the shapes of their inputs, but no elements.
_READ_NOTHING = {
    f"{value}_like" for value in ("zeros", "ones", "full", "rand", "randn", "randint")
} | {"new_zeros", "new_ones", "new_full"}

# Operations by which models get their first values.
_DRAW = {"normal_", "uniform_"}
_UNWRITTEN = 1 << 20  # bytes

# Operations that may have operands both on the host and on the device.
_CROSSING = {
    "copy_",
    "_to_copy",
    "_foreach_copy_",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
}

# Collectives write their first argument, and read it if they have no other; their schemas do not
# say so. These write nothing.
_WRITES_NOTHING = {"barrier", "monitored_barrier_"}

# Where libraries put kernels that run on the host.
_HOST = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")

_OF_TORCH = {
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "aten",
    "c10d",
    "dtensor",
    "fsdp",
    "prim",
    "prims",
    "profiler",
    "quantized",
    "rngprims",
    "streams",
    "symm_mem",
}
"""The namespaces of torch's own operators."""

_SYNCS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class OpTraits:
    """What the schema and the name of an operation tell."""

    name: str
    is_collective: bool
    touches_nothing: bool
    allocates_only: bool
    reads_nothing: bool
    may_cross: bool
    gives_value: bool
    """Whether the host has to know a value to go on."""
    written: tuple[bool, ...]
    """For each argument, whether the operation writes it."""
    may_copy: bool
    """Whether it gives a view or a copy, as operations do that it is made of."""
    is_of_gpu: bool
    """Whether a library has it for CUDA alone."""
    is_opaque: bool
    """Whether it is a library's, of which nothing is seen within."""
    non_blocking: int
    """The index of the argument that says that the host does not wait; -1 if there is none."""

    @classmethod
    @cache
    def of(cls, func: Any) -> OpTraits:
        name = func.overloadpacket.__name__
        arguments = func._schema.arguments
        is_collective = func.namespace == "c10d"
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        if is_collective and name not in _WRITES_NOTHING:
            written[0] = True
        is_opaque = func.namespace not in _OF_TORCH
        has_host = any(has_kernel(func.name(), key) for key in _HOST)
        return cls(
            name,
            is_collective,
            func.is_view or name in _TOUCH_NOTHING,
            name in _ALLOCATE_ONLY,
            name in _READ_NOTHING,
            name in _CROSSING,
            any(tag in func.tags for tag in _SYNCS),
            tuple(written),
            func.is_view and func._can_decompose(),
            is_opaque and has_kernel(func.name(), "CUDA") and not has_host,
            is_opaque,
            next((i for i, a in enumerate(arguments) if a.name == "non_blocking"), -1),
        )


# ---- Where new tensors lie ----
#
# For C++ all tensors are the host's, or have no values. The first of these that applies decides
# whether a new one lies on the emulated device:
#
# 1. ``ThreadState.makes_on_device``: a device is named, or a tensor moved. A call of Python does so
#    (``Calls``), or an operation where torch handles the call around it, and no mode sees calls
#    (``Dispatch``). So does the reducer of ``DistributedDataParallel``, which C++ makes.
# 2. The tensors that the operation reads and writes.
# 3. ``ThreadState.given``, where an operation has none. Modules such as ``LSTM`` make zeros by
#    themselves: these lie where the arguments of the call do. A node of autograd's graph makes them
#    for gradients that it did not get: they lie where those do that it got, whatever the backward
#    was called with, as the loss may have been moved to the host.
#
# These are of a thread: while one calls a backward, another one runs the nodes.


class Dispatch(TorchDispatchMode):
    """Tells the device what each operation reads, writes and allocates."""

    supports_higher_order_operators = True

    def __init__(self, device: EmulatedDevice, functional: Functional) -> None:
        super().__init__()
        self.device = device
        self.functional = functional

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types or self.device.is_over:
            return func(*args, **kwargs)  # such tensors have no memory: torch asks for a shape
        if any(each not in PLAIN for each in types):
            return NotImplemented  # the operations that the class runs come here one by one
        if isinstance(func, HigherOrderOperator):
            return self._run_whole(func, args, kwargs)
        target = kwargs.get("device")
        if target is not None and target.type in (self.device.device_type, NAME):
            # Torch has left the mode that sees calls, as within a DTensor's operations.
            below = torch.device("cpu" if self.device.values else "meta")
            with self.device.of_thread.making(on_device=True):
                return self.__torch_dispatch__(func, types, args, {**kwargs, "device": below})
        about = OpTraits.of(func)
        if about.name == "to" and any(map(self._is_ours, (*args, *kwargs.values()))):
            return self._move(func, args, kwargs)
        if about.may_copy or (torch.is_inference_mode_enabled() and func._can_decompose()):
            # Inference mode skips autograd, which else takes such operations apart, and so does
            # what a class does to its inner tensors.
            with self:
                return func.decompose(*args, **kwargs)
        with DisableTorchFunction():
            if about.name.startswith("lift_fresh"):
                return self._take_in(func, args)
            if about.touches_nothing:
                return func(*args, **kwargs)
            if is_functional(func) and self.device.is_here(args[0]):
                with self:
                    return self.functional.run(about.name, args)
            values = [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])]
            reads: list[torch.Tensor] = []
            writes: list[torch.Tensor] = []
            for value, is_written in zip(values, about.written, strict=True):
                (writes if is_written else reads).extend(tensors_in(value))
            return self._run(about, OperatorCall(func, args, kwargs), values, reads, writes)

    def _run_whole(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator that calls functions, such as flex attention, as one operation."""
        device = self.device
        device.note_opaque(f"the operator {func}")
        output = func(*args, **kwargs)
        with DisableTorchFunction():
            reads = tensors_in([*args, *kwargs.values()])
            new = [tensor for tensor in tensors_in(output) if not device.knows(tensor)]
            on_device = any(map(device.is_here, reads))
            for tensor in new:
                device.place(tensor, on_device)
            device.run(Operation(str(func), reads, new), on_host=not on_device)
        return output

    def _run(
        self,
        about: OpTraits,
        call: OperatorCall,
        values: Sequence[Any],
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
    ) -> Any:
        """Run an operation on ``values``, those of all arguments, in their order."""
        device, thread = self.device, self.device.of_thread
        makes = thread.makes_on_device
        if makes is None and not (reads or writes):
            on_device = self._is_given_here()
        else:
            on_device = self._is_on_device(about, [*reads, *writes])
        makes = on_device if makes is None else makes
        device.check_is_there(about.name, [*reads, *writes])
        if about.is_opaque:
            device.note_opaque(f"the operator {call.func}")
        if device.values and about.is_of_gpu:
            output = run_kernel_of_cuda(call.func, *call.args, **call.kwargs)
        elif device.values:
            output = run_with_values(about, call)
        elif device.keeps_integers and about.name in _DRAW and values[0].nbytes > _UNWRITTEN:
            output = values[0]  # the host takes memory when it is written
        else:
            output = run_without_values(about, call, [*reads, *writes], makes)
        outputs = tensors_in(output)
        if any(isinstance(tensor, FakeTensor) for tensor in outputs):
            return output
        new = [tensor for tensor in outputs if not device.knows(tensor)]
        if not device.values and any(tensor.is_meta for tensor in new):
            makes = True  # what C++ makes beside operands without values
        for tensor in new:
            device.place(tensor, makes, thread.makes_pinned)
        if about.allocates_only:
            device.note_empty(new)
            return output
        reads = [] if about.reads_nothing else reads
        writes = [*writes, *new]
        group = _group_among(values) if about.is_collective and on_device else None
        if group is not None:
            device.issue(group, about.name, reads, writes)
            return output
        runs_here = on_device or bool(new and makes)
        crossing = self._crossing(about, reads, writes)
        does_not_wait = about.non_blocking >= 0 and bool(values[about.non_blocking])
        not_direct = [c for c in crossing if not (does_not_wait and self._is_direct(c))]
        for copy in crossing:
            device.count_copy(copy.on_host.nbytes, copy.to_device)
        if crossing:
            staged = [c.on_host for c in not_direct if does_not_wait and c.to_device]
        else:  # numbers
            staged = [t for t in reads if not device.is_here(t)] if runs_here else []
        call = call._replace(output=output)
        operation = Operation(about.name, reads, writes, call, None, staged, bool(crossing))
        device.run(operation, not runs_here)
        if about.gives_value and on_device:
            device.wait_for_current(about.name)
        for _ in not_direct:
            device.wait_for_current(about.name, is_promised=not does_not_wait)
        return output

    def _is_ours(self, value: object) -> bool:
        return isinstance(value, torch.device) and value.type == self.device.device_type

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Move a tensor to the device where DTensor does so within an operation of C++, and no
        call of Python is seen."""
        names = [argument.name for argument in func._schema.arguments]
        options = dict(zip(names, args, strict=False)) | kwargs
        tensor, target = options.pop("self"), options.pop("device")
        self.device.use(target.index)
        options.pop("layout", None)
        options.pop("pin_memory", None)
        options["copy"] = options.get("copy", False) or not self.device.is_here(tensor)
        below = torch.device("cpu" if has_values(tensor) else "meta")
        with self.device.of_thread.making(on_device=True), self:
            return tensor.to(below, **{k: v for k, v in options.items() if v is not None})

    def _take_in(self, func: Any, args: Any) -> Any:
        """Place a tensor that ``torch.tensor()`` has made from Python's numbers."""
        output, thread = func(*args), self.device.of_thread
        if not self.device.knows(output):
            self.device.place(output, bool(thread.makes_on_device), thread.makes_pinned)
            if thread.makes_on_device:
                self.device.wait_for_current("tensor")
        return output

    def _is_on_device(self, about: OpTraits, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether an operation on ``tensors`` runs on the device.

        Raises:
            RuntimeError: some are on the host and some on the device, and it does not allow that.
        """
        sides = [self.device.is_here(tensor) for tensor in tensors]
        if not any(sides):
            return False
        is_mixed = any(not side and t.dim() for side, t in zip(sides, tensors, strict=True))
        if is_mixed and not about.may_cross:
            raise RuntimeError(
                f"{about.name} got tensors on the host and on the {self.device.device_type} device "
                f"({call_site()}): move them to one of the two"
            )
        return True

    def _is_given_here(self) -> bool:
        """Return whether what C++ was called with lies on the device."""
        given = self.device.of_thread.given
        if isinstance(given, bool):
            return given
        args, kwargs = given
        held = (
            t if type(t) in PLAIN else inner_of(t) for t in tensors_in([*args, *kwargs.values()])
        )
        return any(tensor is not None and self.device.is_here(tensor) for tensor in held)

    def _crossing(
        self, about: OpTraits, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> list[Crossing]:
        """Return the copies between the host and the device that an operation consists of."""
        if not (about.may_cross and reads and writes):
            return []
        is_here = self.device.is_here
        targets = writes if about.name == "_foreach_copy_" else [writes[0]] * len(reads)
        return [
            Crossing(target if is_here(source) else source, is_here(target))
            for source, target in zip(reads, targets, strict=True)
            if is_here(source) != is_here(target)
        ]

    def _is_direct(self, crossing: Crossing) -> bool:
        """Return whether the device itself reads or writes the host's memory. Else the host may
        wait for the copy, and CUDA does not promise that it does."""
        host = crossing.on_host
        # torch copies what is not contiguous by way of pageable memory.
        return self.device.is_pinned(host) and host.is_contiguous()


@contextmanager
def unseen() -> Iterator[None]:
    """Hide from the emulated device what is done within, such as what a collective consists of."""
    with disable_current_modes(), DisableTorchFunction():
        yield


class Crossing(NamedTuple):
    """A copy between the host and the device: the tensor that is on the host, and the direction."""

    on_host: torch.Tensor
    to_device: bool


def _group_among(values: Sequence[Any]) -> dist.ProcessGroup | None:
    for value in values:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in tensors_in(each)]
    return []


def has_values(tensor: torch.Tensor) -> bool:
    with DisableTorchFunction():
        return not tensor.is_meta


_NO_KERNEL = re.compile(r"not implemented for '(Half|Long|Int)'")
_WIDE = {
    "Half": (torch.float16, torch.float32),
    "Long": (torch.int64, torch.float64),
    "Int": (torch.int32, torch.float64),
}
"""By C++'s name: a dtype for which the host has not all kernels of a GPU, and one for which it has.
"""


def run_with_values(about: OpTraits, call: OperatorCall) -> Any:
    """Return what a call returns. Where the host has no kernel for a dtype, and a GPU has, compute
    in a wider one."""
    try:
        return call.func(*call.args, **call.kwargs)
    except NotImplementedError as error:
        if about.name in _PRODUCTS and any(isinstance(each, torch.dtype) for each in call.args):
            return _multiply_wide(call)
        missing = _NO_KERNEL.search(str(error))
        if missing is None or any(about.written):
            raise
    narrow, wide = _WIDE[missing[1]]

    def cast(source: torch.dtype, target: torch.dtype, values: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda each: each.to(target) if each.dtype is source else each, values
        )

    args, kwargs = cast(narrow, wide, (list(call.args), dict(call.kwargs)))
    return cast(wide, narrow, call.func(*args, **kwargs))


def depends_on_value() -> RuntimeError:
    """Return what to raise where nothing can be read instead of a value that there is not."""
    return RuntimeError(
        f"the program depends on a value ({call_site()}), and tensors on this device have none"
    )


_PRODUCTS = frozenset("mm bmm addmm baddbmm".split())


def _multiply_wide(call: OperatorCall) -> Any:
    """Return a product with an ``out_dtype`` that is wider than its factors, which only a GPU has.
    Products of two factors are exact in the wider one."""
    (wide,) = (each for each in call.args if isinstance(each, torch.dtype))
    args = [
        each.to(wide) if isinstance(each, torch.Tensor) else each
        for each in call.args
        if each is not wide
    ]
    packet = call.func.overloadpacket
    return (packet.out if "out" in call.kwargs else packet.default)(*args, **call.kwargs)


def run_without_values(
    about: OpTraits, call: OperatorCall, tensors: Sequence[torch.Tensor], makes_on_device: bool
) -> Any:
    """Return what a call returns for ``tensors`` of which some have no values. What it would write
    to those that have some is lost, and what comes to the host is zero."""
    func, args, kwargs = call.func, call.args, call.kwargs
    without = [tensor.is_meta for tensor in tensors]
    # The shape of what is indexed by numbers depends on no value.
    masks = [tensor for tensor in tensors[1:] if tensor.dtype in (torch.bool, torch.uint8)]
    if about.gives_value and any(without) and (masks or not about.name.startswith("index")):
        dtype = tensors[0].dtype
        if about.name != "_local_scalar_dense" or dtype is torch.bool:
            raise depends_on_value()
        return torch.zeros((), dtype=dtype).item()
    if about.name == "_to_copy" and any(without) and not makes_on_device:
        dtype = kwargs.get("dtype") or tensors[0].dtype
        return torch.zeros(tensors[0].shape, dtype=dtype, device="cpu")
    if not any(without):
        return func(*args, **kwargs)
    if all(without):
        return run_on_shapes(func, args, kwargs, tensors)
    if about.name == "embedding" and not without[1]:
        rows, last = len(tensors[0]), int(tensors[1].max())
        if last >= rows:
            raise IndexError(f"an embedding of {rows} rows has no row {last} ({call_site()})")
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        empty = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        replaced[id(empty)] = empty, tensor
        return empty

    args, kwargs = tree_map_only(torch.Tensor, without_values, (args, kwargs))
    return tree_map_only(
        torch.Tensor,
        lambda tensor: replaced.get(id(tensor), (tensor, tensor))[1],
        func(*args, **kwargs),
    )


_HELD: dict[type, str | None] = {}
"""By class: the attribute with the first tensor that tensors of the class consist of."""


def inner_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor in memory behind one of torch's own classes, or of a class that tells what
    its tensors consist of; None for any other tensor."""
    if isinstance(tensor, DTensor):
        held: Any = tensor._local_tensor
    elif isinstance(tensor, AsyncCollectiveTensor):
        held = tensor.elem
    else:
        kind = type(tensor)
        if kind not in _HELD:  # asked once: the answer may read values, as that of torchao does
            flatten = getattr(tensor, "__tensor_flatten__", None)
            names = flatten()[0] if flatten is not None else ()
            _HELD[kind] = names[0] if names else None
        name = _HELD[kind]
        held = None if name is None else getattr(tensor, name)
    return held if held is None or type(held) in PLAIN else inner_of(held)
