"""Threads of the program, which torch's modes do not follow by themselves, and the thread on which
autograd runs nodes of the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from fsdp_overlap.tools.emulator.dispatch import unseen
from fsdp_overlap.tools.emulator.sites import attributed_to, call_site
from fsdp_overlap.tools.torch_internals import (
    DisableTorchFunction,
    get_current_dispatch_mode_stack,
    get_current_function_mode_stack,
    is_torch_function_all_disabled,
    is_torch_function_enabled,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)
from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass

Call = Callable[[], Any]

_start = threading.Thread.start


class DeviceThread:
    """A thread that runs one call after the other, each with what torch carries along to autograd's
    threads: the modes of the thread that asked for it. It calls ``begin`` first."""

    def __init__(self, name: str, begin: Callable[[], object]) -> None:
        self._name = name
        self._begin = begin
        self._calls: queue.SimpleQueue[tuple[Future[list[Any]], Call] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Call) -> Any:
        """Return what ``call`` returns there. A call from the thread itself runs at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            _start(self._thread)
        if self._thread is threading.current_thread():
            return call()
        future: Future[list[Any]] = Future()
        self._calls.put((future, partial(_carried(), call)))
        del call
        return future.result().pop()

    def end(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        self._begin()
        while (request := self._calls.get()) is not None:
            future, call = request
            del request
            try:
                settle = partial(future.set_result, [call()])
            except BaseException as error:
                settle = partial(future.set_exception, error)
            # Tensors are freed when the program drops them, and not when this thread does: so the
            # caller goes on after the call is dropped, and takes the result out of its list.
            del call
            settle()
            del future, settle


def _carried() -> Callable[[Call], Any]:
    """Run a call on another thread as it would run on this one."""
    modes = get_current_dispatch_mode_stack(), get_current_function_mode_stack()
    disabled: Callable[[], AbstractContextManager[object]] = nullcontext
    if is_torch_function_all_disabled():
        disabled = DisableTorchFunction
    elif not is_torch_function_enabled():
        disabled = DisableTorchFunctionSubclass
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    where = call_site()

    def run(call: Call) -> Any:
        with ExitStack() as stack:
            for mode in modes[0]:
                push_dispatch_mode(mode)
                stack.callback(pop_dispatch_mode)
            for mode in modes[1]:
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            enabled, dtype = autocast
            stack.enter_context(torch.autocast("cpu", dtype, enabled=enabled))
            stack.enter_context(disabled())
            stack.enter_context(attributed_to(where))
            return call()

    return run


@contextmanager
def following_threads(
    is_seen: Callable[[], bool], seeing: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Run threads that are started within, and calls that are submitted to pools of threads, within
    ``seeing()``, if what starts or submits them ``is_seen``. Others run without modes."""
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def run_seen(run: Call) -> None:
        with seeing():
            run()

    def start_and_follow(thread: threading.Thread) -> None:
        if is_seen():
            vars(thread)["run"] = partial(run_seen, thread.run)
        start(thread)

    def call_as(seen: bool, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if seen:
            with nullcontext() if is_seen() else seeing():
                return call(*args, **kwargs)
        with unseen():
            return call(*args, **kwargs)

    def submit_and_follow(
        pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        return submit(pool, partial(call_as, is_seen(), call), *args, **kwargs)

    with (
        patch.object(threading.Thread, "start", start_and_follow),
        patch.object(ThreadPoolExecutor, "submit", submit_and_follow),
    ):
        yield
