"""``"cuda"`` as the name of the emulated device, for programs that are written for GPUs.

Within :func:`as_cuda` torch answers as it would on a machine with GPUs: ``torch.cuda`` has the
streams, events, graphs and memory of the emulated device, and groups of ``"nccl"`` enqueue their
collectives on it. What is not emulated raises :class:`NotEmulated`, with its name and the line
that called it.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from hashlib import blake2b
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from fsdp_overlap.tools.emulator import graphs, torch_module
from fsdp_overlap.tools.emulator.device import EmulatedDevice, Operation
from fsdp_overlap.tools.emulator.dispatch import unseen
from fsdp_overlap.tools.emulator.sites import call_site
from fsdp_overlap.tools.emulator.torch_module import (
    active,
    current_device,
    running,
    sees_this_thread,
)
from fsdp_overlap.tools.emulator.triton_kernels import noting_triton
from fsdp_overlap.tools.torch_internals import (
    ProfilerBase,
    attention_on_host,
    c10d,
    patch_accelerator,
    patch_raw_stream,
    shaping_dtensors_on_host,
)

DEVICE_TYPE = "cuda"
MEMORY = 80 << 30
"""The bytes that the emulated GPU says it has."""


class NotEmulated(NotImplementedError):
    """A program calls what the emulated device has not."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not emulated; called at {call_site()}")


@contextmanager
def as_cuda(device: EmulatedDevice, devices: int = 1) -> Iterator[EmulatedDevice]:
    """Run ``device`` as the GPU that this process uses, of as many ``devices`` as the machine is to
    have.

    Raises:
        ValueError: ``device`` is of another type than ``"cuda"``.
    """
    if device.device_type != DEVICE_TYPE:
        raise ValueError(f"EmulatedDevice(device_type='cuda') is needed, not {device.device_type}")
    with noting_triton(device, sees_this_thread), ExitStack() as stack:
        for module in _ASK_WHEN_IMPORTED:
            import_module(module)
        _shard_attention()
        stack.enter_context(running(device))
        for owner, names in _patches(devices):
            for name, value in names.items():
                stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(patch_accelerator(torch.device(DEVICE_TYPE)))
        stack.enter_context(patch_raw_stream(_raw_stream))
        stack.enter_context(shaping_dtensors_on_host())
        stack.callback(torch.set_default_device, None)
        yield device


# Modules of torch that would find a build for GPUs, and want what it has in C++.
_ASK_WHEN_IMPORTED = ("torch._dynamo", "torch._inductor.utils")


@cache
def _shard_attention() -> None:
    """Tell DTensor how the host's kernel of attention may be sharded: as those of GPUs, over rows
    and heads."""
    attention, backward = attention_on_host
    for operator, outputs, inputs in ((attention, 2, 3), (backward, 3, 6)):

        def shardings(
            *args: object, outputs: int = outputs, inputs: int = inputs, **_: object
        ) -> Any:
            others: list[Any] = [None] * (len(args) - inputs)
            ways = (Replicate(), Shard(0), Shard(1))
            return [([way] * outputs, [way] * inputs + others) for way in ways]

        register_sharding(operator)(shardings)


def _patches(devices: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield what of torch is replaced: who has it, and the names and values there."""
    functions = _functions(devices)
    yield from _of_module(torch.cuda, functions)
    for name, module in inspect.getmembers(torch.cuda, inspect.ismodule):
        if module.__name__ == f"torch.cuda.{name}" and name in _SUBMODULES:
            yield from _of_module(module, {**functions, **_SUBMODULES[name]})
    accelerator: Any = torch.accelerator
    shared = {name: functions[name] for name in accelerator.__all__ if name in functions}
    del shared["is_available"], shared["device_count"]  # they ask the module of the device
    shared |= {"device_index": torch_module.device, "get_memory_info": functions["mem_get_info"]}
    yield accelerator, shared
    yield (
        torch,
        {
            "Stream": torch_module.Stream,
            "Event": torch_module.Event,
            "Generator": Generator,
            "device": _Device,
            "compile": _compile,
            "is_autocast_enabled": _is_autocast_enabled,
            "get_autocast_dtype": _get_autocast_dtype,
            "set_autocast_enabled": _on_host(torch.set_autocast_enabled),
            "set_autocast_dtype": _on_host(torch.set_autocast_dtype),
            "get_autocast_gpu_dtype": partial(_get_autocast_dtype, DEVICE_TYPE),
        },
    )
    yield ProfilerBase, {"__init__": _profile_host}
    yield nn.DataParallel, {"__init__": refuse("torch.nn.DataParallel")}
    yield torch.autocast, {"__init__": _begin_autocast}
    yield torch.version, {"cuda": "12.8"}
    yield torch.backends.cuda, {"is_built": lambda: True}
    yield torch.backends.cudnn, {"is_acceptable": lambda tensor: False}  # its kernels are GPUs'
    yield torch.UntypedStorage, {"cuda": _storage_to_cuda}
    yield dist, {"Reducer": _make_reducer, "is_nccl_available": lambda: True}
    yield c10d, {"is_nccl_available": lambda: True}
    yield _reducer, {"_rebuild_buckets": _rebuild_buckets}


def _of_module(
    module: ModuleType, functions: dict[str, Any]
) -> Iterator[tuple[ModuleType, dict[str, Any]]]:
    """Yield what of ``torch.cuda``, or of a module in it, is replaced: what is emulated, and all
    else that would ask for a GPU."""
    replaced = {}
    for name, value in vars(module).items():
        is_of_cuda = getattr(value, "__module__", "").startswith("torch.cuda")
        if name in functions and (is_of_cuda or not inspect.ismodule(value)):
            replaced[name] = functions[name]
        elif name in _KEPT or name.startswith("_") or inspect.ismodule(value) or not is_of_cuda:
            continue
        elif inspect.isroutine(value) or inspect.isclass(value):
            replaced[name] = refuse(f"{module.__name__}.{name}")
    yield module, replaced


def refuse(name: str) -> Callable[..., Any]:
    """Return a function that says that ``name`` is not emulated."""

    def call(*args: object, **kwargs: object) -> Any:
        raise NotEmulated(name)

    return call


# What of torch.cuda needs no GPU, or asks through functions that are replaced.
_KEPT = {
    "CudaError",
    "DeferredCudaCallError",
    "cudaStatus",
    "get_device_name",
    "make_graphed_callables",
    "memory_cached",
    "max_memory_cached",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "check_error",
    "memory_stats_as_nested_dict",
    "profile",
    "range",
}


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _functions(devices: int) -> dict[str, Any]:
    """Return what ``torch.cuda`` has instead, by its names."""
    of_device = {
        name: value
        for name, value in vars(torch_module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(_EMULATOR)
    }
    of_device |= {
        name: getattr(graphs, name)
        for name in ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing")
    }
    for name in ("active", "running", "register", "sees_this_thread", "Modes"):
        of_device.pop(name)
    return of_device | _of_devices(devices) | _of_random_numbers(devices) | _OF_MEMORY


def _of_devices(devices: int) -> dict[str, Any]:
    """Return what tells of the GPUs that there are, and of the one that is used."""
    return {
        "StreamContext": torch_module.stream,
        "device_count": lambda: devices,
        "device_of": _device_of,
        "_lazy_init": _nothing,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": lambda: False,
        "_is_compiled": lambda: True,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "_get_device": lambda device: torch.device(DEVICE_TYPE, torch_module._index(device)),
        "_sleep": _nothing,
        "init": _nothing,
        "ipc_collect": _nothing,
        "cudart": lambda: _CudaRuntime(),
        "can_device_access_peer": lambda device, peer: False,
        "get_arch_list": lambda: ["sm_90"],
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: _PROPERTIES,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "set_sync_debug_mode": _nothing,
        "get_sync_debug_mode": lambda: 0,
    }


def _of_random_numbers(devices: int) -> dict[str, Any]:
    """Return what seeds generators, and what has their states."""
    return {
        "_get_generator": lambda device: torch.default_generator,
        "default_generators": (torch.default_generator,) * devices,
        "manual_seed": _nothing,  # torch.manual_seed() itself seeds the host's generator
        "seed": torch.seed,
        "seed_all": torch.seed,
        "initial_seed": torch.initial_seed,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "get_rng_state_all": lambda: [_get_rng_state() for _ in range(devices)],
        "set_rng_state_all": lambda states: _set_rng_state(list(states)[current_device()]),
    }


_EMULATOR = __name__.rpartition(".")[0]

_SUBMODULES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "memory": {},
    "random": {},
    "streams": {},
    "nccl": {"version": lambda: (2, 27, 5), "is_available": lambda *_: True},
    "nvtx": dict.fromkeys(("range_push", "range_pop", "range_end", "mark"), _nothing)
    | {"range_start": lambda message: 0},
    "profiler": dict.fromkeys(("init", "start", "stop"), _nothing),
}
"""The modules in ``torch.cuda`` that programs name, and what they have beside its functions."""


class _CudaRuntime(torch_module._Runtime):
    """What ``torch.cuda.cudart()`` returns. Other functions do nothing, and succeed."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "cudaMemGetInfo":
            return _mem_get_info
        if name in ("cudaProfilerStart", "cudaProfilerStop", "cudaDeviceSynchronize"):
            return lambda *_: 0
        raise NotEmulated(f"torch.cuda.cudart().{name}")


_PROPERTIES = SimpleNamespace(
    name="emulated GPU",
    major=9,
    minor=0,
    total_memory=MEMORY,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=52428800,
    gcnArchName="",
    is_integrated=False,
    is_multi_gpu_board=False,
    uuid="emulated",
)


@contextmanager
def _device_of(tensor: torch.Tensor) -> Iterator[None]:
    with torch_module.device(tensor.get_device() if tensor.is_cuda else None):
        yield


def _exchange_device(device: int) -> int:
    before = current_device()
    if device >= 0:
        torch_module.set_device(device)
    return before


def _raw_stream(device: int) -> int:
    return torch_module.current_stream(device).cuda_stream


def _mem_get_info(device: object = None) -> tuple[int, int]:
    return MEMORY - active().allocator.reserved, MEMORY


def _memory_stats(device: object = None) -> dict[str, int]:
    allocator = active().allocator
    stats: dict[str, int] = defaultdict(int)
    for kind, now, peak in (
        ("allocated", allocator.allocated, allocator.peak_allocated),
        ("active", allocator.allocated, allocator.peak_allocated),
        ("reserved", allocator.reserved, allocator.peak_reserved),
    ):
        stats[f"{kind}_bytes.all.current"] = now
        stats[f"{kind}_bytes.all.peak"] = peak
    for name in ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"):
        stats[name] = 0
    return stats


_OF_MEMORY: dict[str, Any] = {
    "mem_get_info": _mem_get_info,
    "memory_stats": _memory_stats,
    "memory_summary": lambda device=None, abbreviated=False: str(dict(_memory_stats())),
    "memory_snapshot": lambda *_, **__: [],
    "reset_accumulated_memory_stats": _nothing,
    "reset_accumulated_host_memory_stats": _nothing,
    "reset_peak_host_memory_stats": _nothing,
    "host_memory_stats": lambda: defaultdict(int),
    "get_allocator_backend": lambda: "native",
    "caching_allocator_enable": _nothing,
    "set_per_process_memory_fraction": _nothing,
    "get_per_process_memory_fraction": lambda device=None: 1.0,
    "_record_memory_history": _nothing,
    "_snapshot": lambda *_, **__: {"segments": [], "device_traces": []},
    "_dump_snapshot": _nothing,
    "_set_allocator_settings": _nothing,
}
"""What counts memory, and what sets how the allocator works."""


# Random numbers: operations run on the host, and so draw from its generator. A state of CUDA's
# generator is a seed and an offset, 16 bytes that libraries such as DTensor's take apart. Here they
# stand for a state of the host's.

_states: OrderedDict[bytes, torch.Tensor] = OrderedDict()
_STATES_KEPT = 10_000


def _number_of(state: bytes) -> int:
    """Return a number for ``state``, the same in all processes, as ranks share states and compare
    them."""
    return int.from_bytes(blake2b(state, digest_size=8).digest()) >> 2


def _get_rng_state(device: object = None) -> torch.Tensor:
    with unseen():
        state = torch.get_rng_state()
        number = _number_of(state.numpy().tobytes())
        told = torch.tensor([number, 0]).view(torch.uint8)
        _states[told.numpy().tobytes()] = state
    if len(_states) > _STATES_KEPT:
        _states.popitem(last=False)
    return told


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    with unseen():
        key = state.numpy().tobytes()
        known = _states.get(key)
        if known is None:
            torch.default_generator.manual_seed(_number_of(key))
        else:
            torch.set_rng_state(known)


_meta: Any = type(torch.Generator)


class _OfGenerators(_meta):
    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _HostGenerator)


_HostGenerator: Any = torch.Generator


class Generator(_HostGenerator, metaclass=_OfGenerators):
    """Works like ``torch.Generator``, and is the host's in truth."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made: Generator = _HostGenerator.__new__(cls, "cpu")
        return made

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()
        self._told = torch.device(device)

    @property
    def device(self) -> torch.device:
        return self._told


_device: Any = torch.device


class _OfDevices(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _device)


class _Device(metaclass=_OfDevices):
    """Makes a ``torch.device``. A number alone is for C++ one of the device that a library has
    added to torch, and here one of a GPU."""

    __module__, __qualname__ = "torch", "device"  # as which pickles name it

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int):
            args = (DEVICE_TYPE, *args)
        return _device(*args, **kwargs)


# Mixed precision. Below, tensors are the host's, and so is the autocast that casts them.


def _below(device_type: Any) -> Any:
    return "cpu" if device_type == DEVICE_TYPE else device_type


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` of a device type and other arguments, for the host instead of CUDA."""

    @wraps(function)
    def call(*args: Any) -> Any:
        if args and isinstance(args[0], str):
            return function(_below(args[0]), *args[1:])
        return function("cpu", *args)  # without a device type it is CUDA's

    return call


_enabled, _dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_begin = torch.autocast.__init__


def _is_autocast_enabled(device_type: str = DEVICE_TYPE) -> bool:
    return _enabled(_below(device_type))


def _get_autocast_dtype(device_type: str = DEVICE_TYPE) -> torch.dtype:
    if device_type == DEVICE_TYPE and not _enabled("cpu"):
        return torch.float16
    return _dtype(_below(device_type))


def _begin_autocast(
    self: Any, device_type: Any, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
) -> None:
    if dtype is None and device_type == DEVICE_TYPE:
        dtype = _get_autocast_dtype(device_type)
    _begin(self, _below(device_type), dtype, *args, **kwargs)


# Compilation


def _compile(model: Any = None, **options: Any) -> Any:
    """Return ``model``, which runs eagerly."""
    if model is None:
        return partial(_compile, **options)
    active().note_opaque("torch.compile (runs eagerly)")
    return model


# Profiles

_profile = ProfilerBase.__init__


def _profile_host(self: Any, *, activities: Any = None, **options: Any) -> None:
    """Record what the host does. What the device does takes no time."""
    cpu = torch.profiler.ProfilerActivity.CPU
    _profile(self, activities=None if activities is None else [cpu], **options)


# Storages


def _tensor_of(storage: torch.UntypedStorage) -> torch.Tensor:
    with unseen():
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def _storage_to_cuda(
    storage: torch.UntypedStorage, device: Any = None, non_blocking: bool = False
) -> torch.UntypedStorage:
    copy = _tensor_of(storage).to(DEVICE_TYPE, non_blocking=non_blocking)
    return copy.untyped_storage()


def _tell_location(storage: Any) -> str | None:
    """Note that ``torch.save()`` reads ``storage``, and tell where it lies."""
    if not torch_module.is_available() or active().device_type != DEVICE_TYPE:
        return None
    device, tensor = active(), _tensor_of(storage)
    is_here = device.is_here(tensor)
    if is_here:
        device.wait_for_current("save")
    device.run(Operation("save", [tensor], []), on_host=True)
    return f"{DEVICE_TYPE}:{device.index}" if is_here else None


def _put_where_told(storage: Any, location: str) -> Any:
    """Put what ``torch.load()`` has read on the device, if it is to lie there."""
    if not torch_module.is_available() or active().device_type != DEVICE_TYPE:
        return None
    if not location.startswith(DEVICE_TYPE):
        return None
    torch_module.active().use(torch_module._index(location))
    tensor = _tensor_of(storage)
    if not active().knows(tensor):
        active().place(tensor, on_device=True)
        active().wait_for_current("load")
        return storage
    return storage if active().is_here(tensor) else _storage_to_cuda(storage)


torch.serialization.register_package(1, _tell_location, _put_where_told)


# DistributedDataParallel

_reducer: Any = dist.Reducer
_rebuild: Callable[..., Any] = _reducer._rebuild_buckets
_on_device: weakref.WeakSet[Any] = weakref.WeakSet()
"""The reducers whose parameters lie on the device."""


def _make_reducer(parameters: list[nn.Parameter], *args: Any, **kwargs: Any) -> Any:
    """Make a reducer, whose buckets are tensors that C++ makes, beside its parameters."""
    if not parameters[0].is_cuda:
        return _reducer(parameters, *args, **kwargs)
    with active().of_thread.making(on_device=True):
        made = _reducer(parameters, *args, **kwargs)
    _on_device.add(made)
    return made


def _rebuild_buckets(reducer: Any) -> Any:
    with active().of_thread.making(on_device=True) if reducer in _on_device else nullcontext():
        return _rebuild(reducer)
