"""Private names of torch that only the tools use.

``fsdp_overlap/torch_internals.py`` says what names are here and how they are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import _ops, autograd, overrides, profiler
from torch._subclasses import fake_tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import _op_schema, _random
from torch.nn import init
from torch.utils import _device, _python_dispatch, checkpoint

ATTRIBUTES = {
    "DTensor._op_dispatcher": "its sharding_propagator computes how the results of operations lie",
    "OpOverload._can_decompose": "whether inference mode left an operation whole",
    "ScriptObject._type": "tells process groups among the arguments of an operation",
}
"""Private attributes of torch's objects that only the tools read, and why."""


# The autograd engine


def push_pending_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Push hooks of saved tensors as ``saved_tensors_hooks`` does, so that others may intercept
    it."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


without_transform = torch._C._functorch.get_unwrapped
"""The tensor that a transform of ``torch.func`` has wrapped."""

ProfilerBase = profiler._KinetoProfile
"""What ``torch.profiler.profile`` tells which activities to record."""


@contextmanager
def running_backwards_by(run: Callable[..., Any]) -> Iterator[None]:
    """Call ``run(engine, *args, **kwargs)`` for every backward within, where torch would call
    ``engine(*args, **kwargs)``. No mode sees a backward begin and end."""
    engine: Any = autograd._engine_run_backward
    autograd._engine_run_backward = partial(run, engine)
    try:
        yield
    finally:
        autograd._engine_run_backward = engine


def determinism_checks() -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return what checkpointing compares when it recomputes a tensor, by name. Modes do not see
    that."""
    return checkpoint._allowed_determinism_checks_to_fns


# Tensor subclasses and modes

DisableTorchFunction = torch._C.DisableTorchFunction
"""Within it modes do not see a call either, so that the emulated device does not see itself."""

is_torch_function_enabled = torch._C._is_torch_function_enabled
is_torch_function_all_disabled = torch._C._is_torch_function_all_disabled
"""Whether a subclass is asked about a call, so that the emulated device asks it too; and whether
modes see no calls either."""

disabled_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of classes that are asked nothing, as parameters are."""

swap_tensor_impl = torch._C._swap_tensor_impl
"""Exchange what two tensors are in C++. ``torch.utils.swap_tensors`` refuses one that has weak
references."""

parse_to = torch._C._nn._parse_to
"""What the arguments of ``tensor.to()`` mean."""

HigherOrderOperator = _ops.HigherOrderOperator
OpOverload = _ops.OpOverload
"""The classes of operators, which torch calls where a program calls functions. The first ones call
functions themselves, as flex attention does."""

disable_current_modes = _python_dispatch._disable_current_modes
"""Within it no mode sees operations."""

get_current_function_mode_stack = overrides._get_current_function_mode_stack
"""The modes that see calls now. torch leaves a mode while it runs what the mode has seen."""

push_function_mode = overrides._push_mode
pop_function_mode = overrides._pop_mode
"""Have a mode see calls of this thread, without entering it, and end that: it was entered on
another thread, whose backward this thread runs."""

get_current_dispatch_mode_stack = _python_dispatch._get_current_dispatch_mode_stack
"""The modes that see operations now."""

push_dispatch_mode = _python_dispatch._push_mode
pop_dispatch_mode = _python_dispatch._pop_mode
"""Do the same for operations."""

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
"""A tensor without memory, which torch makes to ask for a shape; and what makes them, and remembers
for all devices what shapes it found."""

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
masked_attention = torch.ops.aten._scaled_dot_product_efficient_attention
"""Attention as a GPU computes it, without and with a mask, which is not chosen for an emulated
device without values."""

attention_on_host = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Attention as the host computes it, and its backward, of which DTensor knows no sharding."""

default_device = _device
"""The module whose ``CURRENT_DEVICE`` is that of ``torch.set_default_device()``, if there is one.
``torch.get_default_device()`` makes a tensor to tell it."""

takes_default_device = _device._device_constructors
"""The functions that make tensors on the device of ``torch.set_default_device()``."""

group_tensors = torch._C._group_tensors_by_device_and_dtype
"""Groups the tensors of optimizers by device and dtype, as C++ knows them."""

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operator has a kernel of its own for a device or a way to run."""


def run_kernel_of_cuda(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that a library has given ``operator`` for CUDA, on tensors that may lie
    elsewhere."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return operator.redispatch(keys, *args, **kwargs)


@contextmanager
def replacing_group_tensors(group: Callable[..., dict[Any, Any]]) -> Iterator[None]:
    """Have optimizers call ``group`` instead of :data:`group_tensors`."""
    with patch.object(torch._C, "_group_tensors_by_device_and_dtype", group):
        yield


@contextmanager
def wrapping_on(device: str, asked: Sequence[str]) -> Iterator[None]:
    """Have tensors of classes that are made of others lie on ``device`` where one of the types
    ``asked`` is asked for."""
    wrap: Any = torch.Tensor._make_wrapper_subclass

    def wrap_there(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("device")
        if given is not None and torch.device(given).type in asked:
            kwargs["device"] = device
        return wrap(*args, **kwargs)

    with patch.object(torch.Tensor, "_make_wrapper_subclass", wrap_there):
        yield


@contextmanager
def moving_random_states_by(call: Callable[..., Any]) -> Iterator[None]:
    """Have ``call`` call what moves the state of a device's generator, before and after a random
    operation on DTensors. torch does so from within the operation, where no mode is on."""

    def calling(method: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(method)(lambda *args: call(method, *args))

    owners = {
        _random._PhiloxState: ("__init__",),
        _random.OffsetBasedRNGTracker: ("_get_device_state", "_set_device_state"),
    }
    with ExitStack() as stack:
        for owner, names in owners.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, calling(getattr(owner, name))))
        yield


@contextmanager
def shaping_dtensors_on_host() -> Iterator[None]:
    """Have DTensor try out on the host's fake tensors what shape a result has. Those of the mesh's
    device need a build of torch for it."""

    def rebuild(arg: Any) -> Any:
        size, stride, dtype = arg.tensor_meta
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    with patch.object(_op_schema, "_rebuild_tensor_from_dtensor_meta", rebuild):
        yield


@contextmanager
def drawing_without_bounds() -> Iterator[None]:
    """Have ``nn.init.trunc_normal_`` draw once, and not until all values are within its bounds."""

    def draw(
        tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Any:
        return init.normal_(tensor, mean, std, generator)

    with patch.object(init, "_no_grad_trunc_normal_", draw):
        yield


@contextmanager
def patch_raw_stream(current: Callable[[int], int]) -> Iterator[None]:
    """Give libraries with kernels of their own, such as bitsandbytes, what ``current`` returns as
    CUDA's handle of the current stream."""
    with patch.object(torch._C, "_cuda_getCurrentRawStream", current, create=True):
        yield


@contextmanager
def patch_accelerator(device: torch.device) -> Iterator[None]:
    """Make ``device`` the accelerator that torch's Python functions return."""
    with (
        patch.object(torch._C, "_get_accelerator", lambda *_: device),
        patch.object(torch._C, "_accelerator_getAccelerator", lambda: device),
    ):
        yield


# Process groups

name_of_group = c10d._get_process_group_name
"""The name that torch knows a group by, also one whose class is written in Python."""

names_of_groups = c10d._world.pg_names
"""The names of all groups. Of one whose class is written in Python, C++ has none."""

group_named = c10d._resolve_process_group
"""The group that has a name."""


# A device type of Python


def register_device(name: str, module: ModuleType) -> None:
    """Give torch a device type ``name``. ``module`` is what ``torch.cuda`` is for CUDA.

    From then on this is torch's only accelerator: backward does not order the streams of another.

    Raises:
        RuntimeError: CUDA is initialized. Initializing it later raises, too.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(
            f"this process uses CUDA: use the device {name!r} in a process of its own"
        )

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        """What C++ asks about the device, as in a barrier."""

        def is_available(self) -> bool:
            return bool(module.is_available())

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return False

    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, module)
    torch._C._acc.register_python_privateuseone_hook(Hooks())

    def refuse() -> None:
        raise RuntimeError(f"this process has a device {name!r}: use CUDA in a process of its own")

    torch.cuda._lazy_call(refuse)
