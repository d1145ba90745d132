"""``torch.emulated``: streams, events and all else that torch and this library ask of a device's
module. Torch has it, and a device type ``emulated``, from the first :func:`running` on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from fsdp_overlap.tools.emulator.allocator import MemPool
from fsdp_overlap.tools.emulator.backwards import Backwards
from fsdp_overlap.tools.emulator.calls import NAME, Calls
from fsdp_overlap.tools.emulator.device import PRIORITIES, EmulatedDevice
from fsdp_overlap.tools.emulator.dispatch import PLAIN, Dispatch, inner_of
from fsdp_overlap.tools.emulator.functional import Functional
from fsdp_overlap.tools.emulator.queues import Moment, Queue
from fsdp_overlap.tools.emulator.threads import following_threads
from fsdp_overlap.tools.torch_internals import (
    FakeTensorMode,
    determinism_checks,
    disable_current_modes,
    get_current_dispatch_mode_stack,
    get_current_function_mode_stack,
    group_tensors,
    moving_random_states_by,
    push_pending_hooks,
    register_device,
    replacing_group_tensors,
    running_backwards_by,
    wrapping_on,
)

# What C++ calls the kind of device that a library adds to torch.
PRIVATE_USE = 20

_active: list[EmulatedDevice] = []


def active() -> EmulatedDevice:
    """Return the device of the innermost :func:`running`.

    Raises:
        RuntimeError: there is none.
    """
    if not _active:
        raise RuntimeError(
            "no emulated device runs: use it within fsdp_overlap.tools.emulator.running()"
        )
    return _active[-1]


@contextmanager
def running(device: EmulatedDevice) -> Iterator[EmulatedDevice]:
    """Make ``device`` the one that ``torch.device("emulated")`` names, in this thread and in those
    that it starts.

    Raises:
        RuntimeError: this process has used CUDA, which cannot be beside an emulated device.
    """
    register()
    _active.append(device)
    device.take_thread()
    modes = Modes(device)
    try:
        with (
            _telling(modes),
            following_threads(modes.are_on, modes.on_in_thread),
            modes.on_in_thread(),
        ):
            yield device
    finally:
        device.is_over = True
        modes.backwards.end()
        _active.pop()
        if device.index:
            FakeTensorMode.cache_clear()  # it has the device's number


def sees_this_thread() -> bool:
    """Return whether a device sees what this thread does now."""
    return any(isinstance(mode, Dispatch) for mode in get_current_dispatch_mode_stack())


class Modes:
    """The modes of all threads."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.backwards = Backwards(device)
        self._functional = Functional(device)

    @contextmanager
    def on_in_thread(self) -> Iterator[None]:
        """Have the device see what this thread does."""
        dispatch = Dispatch(self.device, self._functional)
        with dispatch, Calls(self.device, dispatch, self.backwards):
            yield

    def are_on(self) -> bool:
        """Return whether the device sees what this thread does now."""
        return self._dispatch() is not None

    def _dispatch(self) -> Dispatch | None:
        for mode in reversed(get_current_dispatch_mode_stack()):
            if isinstance(mode, Dispatch) and mode.device is self.device:
                return mode
        return None

    def seeing(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``call`` so that calls of Python are seen, also where torch has left the mode
        because it is handling the call around it."""
        dispatch = self._dispatch()
        modes = get_current_function_mode_stack()
        if dispatch is None or any(isinstance(m, Calls) and m.dispatch is dispatch for m in modes):
            return call(*args, **kwargs)
        with Calls(self.device, dispatch, self.backwards):
            return call(*args, **kwargs)

    def differentiate(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``run``, which lets the engine run a backward."""
        return self.seeing(self.backwards.differentiate, run, *args, **kwargs)


@contextmanager
def _telling(modes: Modes) -> Iterator[None]:
    """Patch functions of torch that no mode sees, or that call back outside of the mode."""
    resize = torch.UntypedStorage.resize_
    checks = determinism_checks()
    device = modes.device

    def resize_and_tell(storage: torch.UntypedStorage, nbytes: int) -> Any:
        device.resize(storage, nbytes)
        return resize(storage, nbytes)

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        device.release_after(tensor, stream.queue)

    def push_hooks(hooks: saved_tensors_hooks) -> None:
        push_pending_hooks(
            partial(modes.seeing, hooks.pack_hook), partial(modes.seeing, hooks.unpack_hook)
        )

    seen = {name: partial(modes.seeing, check) for name, check in checks.items()}
    propagator: Any = DTensor._op_dispatcher.sharding_propagator

    with (
        patch.object(torch.UntypedStorage, "resize_", resize_and_tell),
        patch.object(torch.Tensor, "record_stream", record_stream),
        running_backwards_by(modes.differentiate),
        # Hooks of saved tensors run while torch handles the call that saves them.
        patch.object(saved_tensors_hooks, "__enter__", push_hooks),
        patch.dict(checks, seen),
        # DTensors try out on tensors without memory how results will lie.
        patch.object(
            propagator,
            "propagate_op_sharding_non_cached",
            disable_current_modes()(propagator.propagate_op_sharding_non_cached),
        ),
        replacing_group_tensors(partial(_group, device)),
        moving_random_states_by(modes.seeing),
        # Else some wrappers would lie where C++ believes, and some where they do.
        wrapping_on("cpu" if device.values else "meta", (device.device_type, NAME)),
        # Else C++ answers, which does not know the emulated streams.
        patch.object(torch.accelerator, "current_stream", current_stream),
        patch.object(torch.accelerator, "set_stream", set_stream),
        patch.object(torch.accelerator, "synchronize", synchronize),
        patch.object(torch.accelerator, "current_device_index", current_device),
        patch.object(torch.accelerator, "set_device_index", set_device),
    ):
        yield


def _group(
    device: EmulatedDevice, lists: list[list[Any]], with_indices: bool = False
) -> dict[Any, Any]:
    """Group the tensors of ``lists`` as torch does, and by the sides that they lie on."""
    groups: dict[Any, Any] = {}
    here = torch.device(device.device_type, device.index)
    for (where, dtype), (tensors, indices) in group_tensors(lists, True).items():
        for index, tensor in zip(indices, tensors[0], strict=True):
            first: Any = tensor
            held = inner_of(first) if type(first) not in PLAIN else first
            side = here if held is not None and device.is_here(held) else where
            parts, mine = groups.setdefault((side, dtype), ([[] for _ in lists], []))
            for part, each in zip(parts, lists, strict=True):
                if each:
                    part.append(each[index])
            mine.append(index)
    return groups


class Event:
    """Works like ``torch.cuda.Event``."""

    def __init__(self, *args: object, **options: object) -> None:
        self._moment: Moment | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._moment = active().mark((stream or current_stream()).queue)

    def wait(self, stream: Stream | None = None) -> None:
        if self._moment is not None:
            active().wait((stream or current_stream()).queue, self._moment)

    def query(self) -> bool:
        if self._moment is None:
            return True
        active().use(None)
        return active().is_done(self._moment)

    def synchronize(self) -> None:
        if self._moment is not None:
            active().use(None)
            active().wait_on_host("Event.synchronize", self._moment)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``."""
        assert self._moment is not None
        assert end._moment is not None
        return 1e3 * (end._moment.ends - self._moment.ends)


class Stream:
    """Works like ``torch.cuda.Stream``."""

    def __init__(
        self, device: object = None, priority: int = 0, queue: Queue | None = None
    ) -> None:
        if queue is None:
            active().use(_index(device))
            queue = active().next_stream(priority)
        self.queue = queue
        self.priority = priority
        self.device = torch.device(active().device_type, queue.device)
        self.device_index = queue.device
        self.device_type = PRIVATE_USE
        self._within: list[Any] = []

    @property
    def stream_id(self) -> int:
        return self.queue.index

    @property
    def cuda_stream(self) -> int:
        """Return what CUDA calls it: 0 is the default stream."""
        return 0 if self.queue is active().default else 0x1000 + self.queue.index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.queue is other.queue

    def __hash__(self) -> int:
        return hash(self.queue)

    def __enter__(self) -> Stream:
        self._within.append(stream(self))
        self._within[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.pop().__exit__(*error)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        device = active()
        device.wait(self.queue, device.mark(other.queue))

    def query(self) -> bool:
        return active().is_done(Moment.of(self.queue))

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 1 - PRIORITIES

    def is_capturing(self) -> bool:
        return self.queue.is_captured

    def synchronize(self) -> None:
        active().wait_on_host("Stream.synchronize", Moment.of(self.queue))


def current_stream(device: object = None) -> Stream:
    """Return the stream that operations are enqueued on."""
    here, index = active(), _index(device)
    return Stream(queue=here.current if index == here.index else here.elsewhere(index))


def default_stream(device: object = None) -> Stream:
    here, index = active(), _index(device)
    return Stream(queue=here.default if index == here.index else here.elsewhere(index))


def set_stream(stream: Stream) -> None:
    """Make ``stream`` the current one, and its device."""
    here = active()
    if stream.device_index != here.of_thread.index:
        set_device(stream.device)
    if stream.device_index == here.index:
        here.current = stream.queue


@contextmanager
def stream(stream: Stream | None) -> Iterator[Stream | None]:
    """Make ``stream`` the current one. Afterwards the current device is what it was, even if it is
    another."""
    if stream is None:
        yield None
        return
    before, before_there = current_stream(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield stream
    finally:
        set_stream(before_there)
        set_stream(before)


@contextmanager
def use_mem_pool(pool: MemPool, device: object = None) -> Iterator[None]:
    """Make allocations of this thread take memory from ``pool``."""
    here = active().of_thread
    before, here.pool = here.pool, pool
    try:
        yield
    finally:
        here.pool = before


def synchronize(device: object = None) -> None:
    if not _active:
        return  # torch's profiler calls this wherever a device of this kind is registered
    index = _index(device)
    active().use(index)
    if index == active().index:
        active().wait_for_all("synchronize")


def is_available() -> bool:
    return bool(_active)


def is_initialized() -> bool:
    return bool(_active)


def device_count() -> int:
    return active().index + 1 if _active else 1


def current_device() -> int:
    return active().of_thread.index if _active else 0


def set_device(device: object) -> None:
    """Make ``device`` the current one of this thread."""
    index = _index(device)
    active().use(index)
    active().of_thread.index = index


@contextmanager
def device(device: object) -> Iterator[None]:
    """Make ``device`` the current one of this thread. Going back to another makes no context
    there."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        active().of_thread.index = before


def _index(device: object) -> int:
    """Return the number of ``device``, of the current one if it has none."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return current_device() if index is None else cast("int", index)


class _Runtime:
    """Functions of CUDA's runtime, which return an error, or 0."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return 0 if active().pin(address, nbytes) else 712

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if not _active or active().unpin(address) else 713


def cudart() -> _Runtime:
    return _Runtime()


def get_rng_state(device: object = None) -> torch.Tensor:
    # Operations run on the host, and so draw from its generator.
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    pass  # torch.manual_seed() itself seeds the host's generator


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def memory_allocated(device: object = None) -> int:
    return active().allocator.allocated


def max_memory_allocated(device: object = None) -> int:
    return active().allocator.peak_allocated


def memory_reserved(device: object = None) -> int:
    return active().allocator.reserved


def max_memory_reserved(device: object = None) -> int:
    return active().allocator.peak_reserved


def reset_peak_memory_stats(device: object = None) -> None:
    active().allocator.count_peaks_anew()


def empty_cache() -> None:
    # Nobody promises that the host waits, but what was freed may still be in use.
    active().wait_for_all("empty_cache", is_promised=False)
    active().allocator.release_free()


def register() -> None:
    """Give torch the device type ``emulated``, once."""
    if getattr(torch, NAME, None) is None:
        register_device(NAME, sys.modules[__name__])
