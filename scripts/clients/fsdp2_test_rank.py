"""What a rank of `fsdp2_tests.py` does: it runs tests of one of torch's files, one after the other,
and sends home how each ended."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import time
import traceback
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

REWRITES = [
    (r"torch\.device\(\"cuda\", (0|torch\.cuda\.current_device\(\))\)", 'torch.device("cpu")'),
    (r"([\"'])cuda(?::0)?\1", r"\1cpu\1"),
    (r"torch\.cuda\.", "GPU."),
    (r"\.cuda\(\)", ".cpu()"),
    (r"device_ids=\[self\.rank\]", "device_ids=None"),  # DDP refuses any on a CPU
    (r"\bnccl\b", "gloo"),
    (r"\btest_compiled_fsdp\b", "compiled_fsdp_test"),  # as newer torch names it
]
"""What makes a test of GPUs one of CPUs. Nothing that a test asserts is touched."""

SLEEP_PER_MS = 0.1
"""How long the host sleeps, in milliseconds, where a test makes the GPU sleep for one."""

PATCHES = ["all_gather", "reduce_scatter", "all_reduce", "unshard", "reshard", "post_backward"]
"""torch's helpers `patch_...` that put a function of the test in the place of one of FSDP2's."""


@dataclass(frozen=True)
class Job:
    """What all ranks of a run have in common.

    Attributes:
        replaces: whether this library takes the place of FSDP2.
        tests: each as `Class.test_name`.
        seconds: that a collective may take.
        folder: an empty one, in which ranks meet.
    """

    replaces: bool
    file: Path
    tests: Sequence[str]
    ranks: int
    seconds: float
    folder: Path
    is_quiet: bool


@dataclass(frozen=True)
class Outcome:
    """How a test ended: "passed", "failed" or "skipped", and why.

    Attributes:
        bypassed: the test put functions of its own in the place of FSDP2's, and none was called.
    """

    state: str
    reason: str = ""
    details: str = ""
    bypassed: bool = False

    @property
    def is_pass(self) -> bool:
        return self.state == "passed"


# ---- a CPU in the place of GPUs ----


def _cpu_as_gpu(ranks: int) -> types.SimpleNamespace:
    """What the tests find in the place of `torch.cuda`. A CPU does not have what is not here. All
    is done when the call that asks for it returns, so events and streams have nothing to do."""
    return types.SimpleNamespace(
        Event=MagicMock,
        Stream=MagicMock,
        _sleep=lambda milliseconds: time.sleep(milliseconds / 1000),
        current_device=lambda: 0,
        current_stream=MagicMock,
        device_count=lambda: ranks,
        empty_cache=lambda: None,
        is_available=lambda: True,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda: None,
    )


def _skip_if_fewer(ranks: int, needed: int, **_: object) -> Callable[[Any], Any]:
    return unittest.skipIf(ranks < needed, f"needs {needed} ranks")


def _unchanged(*_: object) -> Callable[[Any], Any]:
    return lambda test: test


# ---- torch's tests ----


class Calls:
    """Counts the calls of functions that tests put in the place of FSDP2's."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._patched = self._called = 0

    @property
    def are_bypassed(self) -> bool:
        """Whether there were such functions, and none was called."""
        return self._patched > 0 and self._called == 0

    def count_in(self, patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A `patch_...` of torch that tells when the function is called."""

        @wraps(patch)
        def patch_and_count(function: Callable[..., Any]) -> Any:
            @wraps(function)
            def counted(*args: Any, **kwargs: Any) -> Any:
                self._called += 1
                return function(*args, **kwargs)

            self._patched += 1
            return patch(counted)

        return patch_and_count


def _prepare_torchs_helpers(ranks: int, calls: Calls) -> None:
    """Makes torch's helpers for tests believe that `ranks` CPUs are GPUs."""
    from torch.testing._internal import common_cuda, common_distributed, common_fsdp, common_utils

    common_distributed.skip_if_lt_x_gpu = partial(_skip_if_fewer, ranks)
    common_distributed.requires_nccl_version = _unchanged
    # `_sleep` above takes milliseconds; torch's function is a cached one.
    common_utils.get_cycles_per_ms = lambda: SLEEP_PER_MS  # type: ignore[assignment]
    common_cuda.TEST_CUDA = True
    common_fsdp.DEVICE_COUNT = ranks
    for name in PATCHES:
        patch = f"patch_{name}"
        setattr(common_fsdp, patch, calls.count_in(getattr(common_fsdp, patch)))


def _load(file: Path, ranks: int) -> types.ModuleType:
    text = file.read_text()
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    vars(module)["GPU"] = _cpu_as_gpu(ranks)
    sys.modules[file.stem] = module
    linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
    exec(compile(text, str(file), "exec"), vars(module))
    return module


@contextlib.contextmanager
def _process_group(store: Path, rank: int, size: int, seconds: float) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        dist.barrier()
        yield
        dist.barrier()
    except unittest.SkipTest:
        dist.barrier()
        raise
    finally:
        dist.destroy_process_group()


def _run(module: types.ModuleType, name: str, job: Job, rank: int) -> None:
    """Runs one test as torch's own processes do."""
    import torch
    from torch.testing._internal.common_utils import set_rng_seed

    class_name, _, method = name.partition(".")
    cls = getattr(module, class_name)
    # Where torch runs ranks as threads it has more of them than we have processes.
    cls.world_size = min(getattr(cls(method), "world_size", job.ranks), job.ranks)
    test = cls(method)
    test.rank = rank
    if rank >= test.world_size:
        return
    store = job.folder / f"{name}.store"
    with _process_group(store, rank, test.world_size, job.seconds):
        torch._dynamo.reset()
        set_rng_seed()
        getattr(test, method)()
        torch._dynamo.reset()


def _outcome_of(run: Callable[[], None]) -> Outcome:
    try:
        run()
    except unittest.SkipTest as skip:
        return Outcome("skipped", str(skip))
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome("failed", reason, traceback.format_exc())
    return Outcome("passed")


def run_rank(job: Job, rank: int, home: Connection) -> None:
    """Runs the tests of `job` on this rank until one fails, and sends each one's outcome home."""
    import torch

    if job.is_quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    torch.set_num_threads(1)
    library: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if job.replaces:
        from fsdp_overlap import patch_fsdp2

        library = patch_fsdp2()
    calls = Calls()
    with library:
        _prepare_torchs_helpers(job.ranks, calls)
        modules: list[types.ModuleType] = []
        outcome = _outcome_of(lambda: modules.append(_load(job.file, job.ranks)))
        for name in job.tests:
            calls.start()
            if modules:
                outcome = _outcome_of(partial(_run, modules[0], name, job, rank))
            home.send(replace(outcome, bypassed=calls.are_bypassed))
            if outcome.state == "failed":
                break  # what it left behind must not matter to other tests
