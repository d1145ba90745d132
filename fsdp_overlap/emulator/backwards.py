"""Runs nodes of autograd's graph where the engine runs them on accelerators: on the stream of their
forward, and on a thread of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fsdp_overlap.emulator.device import EmulatedDevice
from fsdp_overlap.emulator.dispatch import PLAIN, inner_of, tensors_in
from fsdp_overlap.emulator.queues import Queue
from fsdp_overlap.emulator.threads import DeviceThread
from fsdp_overlap.torch_internals import (
    DisableTorchFunction,
    current_graph_task_id,
    queue_callback,
)

# By which a node of the graph says whether it, or a node behind it, runs on the device. Such a node
# knows its stream.
_KEY = "fsdp_overlap.emulator"


class _OfThread(threading.local):
    """The backwards that a thread runs, by the engine's number: the stream that each was called on,
    and the streams that it used."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[Queue, set[Queue]]] = {}


class Backwards:
    """All backwards of a device. Call :meth:`end` when no more will come."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self._thread = DeviceThread("emulated autograd", device.take_thread)
        self.end = self._thread.end
        self._of_thread = _OfThread()

    def follow(self, output: Any) -> None:
        """Lets the nodes that ``output`` added to the graph run on the current stream."""
        stream = self.device.current
        for tensor in tensors_in(output):
            last: Any = tensor.grad_fn
            if type(tensor) not in PLAIN or last is None or _KEY in last.metadata:
                continue
            with DisableTorchFunction():
                is_here = self.device.is_here(tensor)
            # Registered now, to run before the hooks that others will add.
            tensor.register_hook(partial(self._enter_with, stream))
            pending, new = [last], []
            while pending:
                node = pending.pop()
                if node is None:
                    continue
                if _KEY in node.metadata:
                    is_here = is_here or node.metadata[_KEY]
                    continue
                node.metadata[_KEY] = False
                node.register_prehook(partial(self._enter, stream))
                new.append(node)
                pending.extend(behind for behind, _ in node.next_functions)
            for node in new if is_here else ():
                node.metadata[_KEY] = True

    def differentiate(
        self, run: Callable[..., Any], roots: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls ``run``, which lets the engine run a backward from ``roots``: on the thread of the
        device if a node is the device's, else on this one."""
        call = partial(self._differentiate, self.device.current, run, roots, *args, **kwargs)
        return self._thread.run(call) if any(map(self._runs_here, roots)) else call()

    def _differentiate(self, caller: Queue, run: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        device, running = self.device, dict(self._of_thread.running)
        before, start = device.current, device.host.ends
        device.current = caller
        try:
            return run(*args, **kw)
        finally:
            device.backwards.append((start, device.host.ends))
            # Also after an error: the engine then calls no callback.
            device.current, self._of_thread.running = before, running

    def _runs_here(self, root: Any) -> bool:
        """Whether a node is the device's, as far as is known."""
        if isinstance(root, torch.Tensor):
            held = root if type(root) in PLAIN else inner_of(root)
            if held is not None and self.device.is_here(held):
                return True
        node: Any = root.grad_fn if isinstance(root, torch.Tensor) else root.node
        return node is not None and bool(node.metadata.get(_KEY))

    def _enter_with(self, stream: Queue, gradient: torch.Tensor) -> None:
        self._enter(stream, (gradient,))

    def _enter(self, stream: Queue, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called when a node that is to run on ``stream`` gets its gradients."""
        device = self.device
        task = current_graph_task_id()
        running = self._of_thread.running
        if task not in running:
            running[task] = device.current, set()
            queue_callback(partial(self._end_backward, task))
        running[task][1].add(stream)
        device.current = stream
        with DisableTorchFunction():
            for gradient in gradients:
                if gradient is not None and type(gradient) in PLAIN:
                    self._wait_for_writers(gradient, stream)

    def _wait_for_writers(self, tensor: torch.Tensor, stream: Queue) -> None:
        """Lets a node's stream wait for the streams that its gradients were made on, as the engine
        does."""
        for access in self.device.memory_of(tensor).accesses:
            writer = self.device.queues[access.stamp.queue]
            if access.writes and writer is not stream:
                known = {**writer.clock, access.stamp.queue: access.stamp.tick}
                stream.learn(known, writer.ends)

    def _end_backward(self, task: int) -> None:
        """Lets the stream that backward was called on wait for the streams that nodes ran on."""
        device = self.device
        caller, used = self._of_thread.running.pop(task)
        for stream in used:
            device.wait(caller, device.mark(stream))
        device.current = caller
