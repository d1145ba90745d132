"""Run nodes of autograd's graph where the engine runs them on accelerators: on the stream of their
forward, and on a thread of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fsdp_overlap.tools.emulator.device import EmulatedDevice
from fsdp_overlap.tools.emulator.dispatch import PLAIN, inner_of, tensors_in
from fsdp_overlap.tools.emulator.queues import Moment, Queue
from fsdp_overlap.tools.emulator.sites import Site, call_site, enter_node_of
from fsdp_overlap.tools.emulator.threads import DeviceThread
from fsdp_overlap.tools.torch_internals import DisableTorchFunction
from fsdp_overlap.torch_internals import current_graph_task_id, queue_callback

# By which a node of the graph has its _Node.
_KEY = "fsdp_overlap.tools.emulator"


class _Node:
    """What is known of a node of the graph, which runs on ``stream``, and whose forward was called
    at ``site``."""

    def __init__(self, stream: Queue, site: Site) -> None:
        self.stream = stream
        self.site = site
        self.is_here = False
        """Whether it, or a node behind it, runs on the device."""
        self.behind: list[tuple[_Node | None, int]] = []
        """Who gets the gradients that it makes, and as which of its inputs."""


_Ready = tuple[Queue, Moment | None]
"""When a gradient is ready: at a moment of a stream, or at its last one."""


class _Backward:
    """A backward under way: the stream that it was called on, and the streams that it used."""

    def __init__(self, caller: Queue, start: Moment) -> None:
        self.caller = caller
        self.start = start
        self.used: set[Queue] = set()
        self.within: _Node | None = None
        """The node that was entered last."""
        self.ready: dict[_Node, dict[int, _Ready]] = {}
        """The gradients of nodes that have not run, by their inputs."""


class _ThreadBackwards(threading.local):
    """The backwards that a thread runs, by the engine's number."""

    def __init__(self) -> None:
        self.running: dict[int, _Backward] = {}


class Backwards:
    """All backwards of a device. Call :meth:`end` when no more will come."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self._thread = DeviceThread("emulated autograd", device.take_thread)
        self.end = self._thread.end
        self._of_thread = _ThreadBackwards()

    def follow(self, output: Any) -> None:
        """Let the nodes that ``output`` added to the graph run on the current stream."""
        stream = self.device.current
        for tensor in tensors_in(output):
            try:
                last: Any = tensor.grad_fn
            except RuntimeError:  # of a view that may be edited, and is not differentiable then
                continue
            if type(tensor) not in PLAIN or last is None or _KEY in last.metadata:
                continue
            with DisableTorchFunction():
                is_here = self.device.is_here(tensor)
            pending, new, site = [last], [], call_site()
            while pending:
                node = pending.pop()
                if node is None:
                    continue
                if _KEY in node.metadata:
                    is_here = is_here or node.metadata[_KEY].is_here
                    continue
                node.metadata[_KEY] = known = _Node(stream, site)
                # Registered now, to run before the hooks that others will add.
                if node is last:
                    tensor.register_hook(partial(self._enter_with, known))
                node.register_prehook(partial(self._enter, known))
                new.append(node)
                pending.extend(behind for behind, _ in node.next_functions)
            for node in new:
                known = node.metadata[_KEY]
                known.is_here = is_here
                known.behind = [
                    (None if behind is None else behind.metadata[_KEY], index)
                    for behind, index in node.next_functions
                ]
                if known.behind:
                    node.register_hook(partial(self._leave, known))

    def differentiate(
        self, run: Callable[..., Any], roots: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``run``, which lets the engine run a backward from ``roots``: on the thread of the
        device if a node is the device's, else on this one."""
        caller, is_here = self.device.current, any(map(self._runs_here, roots))
        call = partial(self._differentiate, caller, is_here, run, roots, *args, **kwargs)
        return self._thread.run(call) if is_here else call()

    def _differentiate(
        self, caller: Queue, is_here: bool, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        device, thread, running = self.device, self.device.of_thread, dict(self._of_thread.running)
        before, given, start = thread.stream, thread.given, device.host.ends
        thread.stream, thread.given, forward = caller, is_here, enter_node_of(None)
        try:
            return run(*args, **kwargs)
        finally:
            device.backwards.append((start, device.host.ends))
            # Also after an error: the engine then calls no callback.
            thread.stream, thread.given, self._of_thread.running = before, given, running
            enter_node_of(forward)

    def _runs_here(self, root: Any) -> bool:
        """Return whether a node is the device's, as far as is known."""
        if isinstance(root, torch.Tensor):
            held = root if type(root) in PLAIN else inner_of(root)
            if held is not None and self.device.is_here(held):
                return True
        node: Any = root.grad_fn if isinstance(root, torch.Tensor) else root.node
        known = None if node is None else node.metadata.get(_KEY)
        return known is not None and known.is_here

    def _enter_with(self, node: _Node, gradient: torch.Tensor) -> None:
        self._enter(node, (gradient,))

    def _enter(self, node: _Node, gradients: Sequence[torch.Tensor | None]) -> None:
        """Enter ``node`` when it gets its gradients, called by the hooks of its outputs and its
        own."""
        device, thread = self.device, self.device.of_thread
        task = current_graph_task_id()
        running = self._of_thread.running
        if task not in running:
            running[task] = _Backward(device.current, device.mark(device.current))
            queue_callback(partial(self._end_backward, task))
        backward = running[task]
        with DisableTorchFunction():
            is_here = any(map(device.is_here, _plain(gradients)))
        if backward.within is node:
            thread.given = thread.given is True or is_here
            return
        last, thread.stream = thread.stream, node.stream
        backward.within, thread.given = node, is_here
        enter_node_of(node.site)
        backward.used.add(node.stream)
        ready: list[_Ready] = list(backward.ready.pop(node, {}).values())
        if not ready:  # the backward begins here, or the node before is none that is known
            ready = [(backward.caller, backward.start), (last, None)]
        for each in ready:
            self._wait(node.stream, each)
        if any(stream is not node.stream for stream, _ in ready):
            with DisableTorchFunction():
                for gradient in _plain(gradients):
                    device.release_after(gradient, node.stream)

    def _leave(self, node: _Node, made: Sequence[torch.Tensor | None], _: object) -> None:
        """Leave ``node`` when it has ``made`` the gradients of those behind it."""
        device, backward = self.device, self._of_thread.running[current_graph_task_id()]
        is_marked = any(b is not None and b.stream is not node.stream for b, _ in node.behind)
        now = node.stream, device.mark(node.stream) if is_marked else None
        sums: Queue | None = None
        for (behind, index), gradient in zip(node.behind, made, strict=True):
            if behind is None or gradient is None:
                continue
            ready = backward.ready.setdefault(behind, {})
            if index not in ready:
                ready[index] = now
                continue
            # The engine is about to add it to the one before, on the stream of who gets the sum.
            sums = device.current = sums or behind.stream
            for each in (ready[index], now):
                self._wait(sums, each)
            ready[index] = sums, None

    def _wait(self, stream: Queue, ready: _Ready) -> None:
        made_on, moment = ready
        if made_on is not stream:
            self.device.wait(stream, moment or self.device.mark(made_on))

    def _end_backward(self, task: int) -> None:
        """Let the stream that backward was called on wait for the streams that nodes ran on."""
        device = self.device
        backward = self._of_thread.running.pop(task)
        for stream in backward.used:
            self._wait(backward.caller, (stream, None))
        device.current = backward.caller
        enter_node_of(None)


def _plain(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [each for each in gradients if each is not None and type(each) in PLAIN]
