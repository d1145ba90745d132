"""Run a function on several real ranks, from one pool of processes that lasts the test session.

    def sum_over_ranks(x: float) -> float: ...  # top level: workers import it by module and name
    assert run_ranks(sum_over_ranks, 2, 1.0) == [2.0, 2.0]

Workers keep imports, environment variables and module globals from call to call; process group,
store, seed and thread count are fresh. A worker that did not come back clean is killed, and its
place is filled by the next call.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.cuda import _sanitizer
from torch.distributed import FileStore  # type: ignore[attr-defined]

T = TypeVar("T")

# What nearly every test imports, and what takes a worker seconds to import by itself; then what
# runs of the program import (support/program.py).
PRELOAD = "torch.distributed.fsdp torch.distributed.tensor.debug pytest".split()
PRELOAD += "fsdp_overlap.tools.cli.main fsdp_overlap.tools.cli.train".split()
PRELOAD += "plotly.graph_objs._figure".split()
PRELOAD += "matplotlib.figure matplotlib.backends.backend_agg".split()
SANITIZE = "FSDP_OVERLAP_CUDA_SANITIZER"
"""Set: workers look at all that CUDA streams do. torch's own variable would make the import of
torch start CUDA, which no process can do that others are forked from."""
NCCL_OF_A_SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",  # which asks the GPUs, and not their hosts, who is near
    "NCCL_MAX_CTAS": "8",  # so that the kernels of several ranks find room
}
STARTUP_SECONDS = 180.0  # importing torch on a busy machine
GRACE_SECONDS = 3.0  # for the other ranks, once one has failed
CLEAN_UP_SECONDS = 3.0  # for destroying the process groups after the call
STACKS_SECONDS = 3.0  # for a killed rank's last words


class RankError(AssertionError):
    """Some rank did not do what the test asked; the message shows how every rank ended."""


@dataclass(frozen=True)
class _Job:
    rank: int
    world_size: int
    backend: str
    store: str  # path of a file
    group_timeout: timedelta
    sys_path: list[str]
    call: bytes  # the pickled (fn, args), opened where an import error counts as the rank's own


@dataclass(frozen=True)
class _Outcome:
    """How one rank ended.

    `message` is "Type: text" of its exception, `details` a traceback or stacks.
    """

    state: Literal["returned", "raised", "died", "running"]
    value: bytes = b""
    message: str = ""
    details: str = ""


# ---- what tests call ----


def run_ranks(
    fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, backend: str = "gloo"
) -> list[T]:
    """Run `fn(*args)` on ranks 0..world_size-1 at once and return their results in rank order.

    `fn` must be importable by module and qualified name; `args` and results travel pickled, so
    tensors are copied. Each rank runs with `torch.distributed` initialised on a store of this
    call's own, `torch.manual_seed(0)` and one thread. `timeout` (seconds) does not include
    starting processes; collectives time out at 0.9 of it.

    Raises `RankError` with every rank's traceback or stacks if one raises, dies or is not done in
    time. After the first failure the others get `GRACE_SECONDS`; then the whole pool is killed.
    """
    __tracebackhide__ = True
    outcomes = _run(fn, world_size, args, timeout, backend, "returned")
    if any(outcome.state != "returned" for outcome in outcomes.values()):
        raise RankError(_report(fn, outcomes))
    return [pickle.loads(outcomes[rank].value) for rank in range(world_size)]


def expect_rank_errors(
    fn: Callable[..., object],
    world_size: int,
    *args: Any,
    match: str,
    timeout: float = 60.0,
    backend: str = "gloo",
) -> list[str]:
    """Assert that `fn(*args)` raises on every rank; return the messages, "Type: text", by rank.

    The regex `match` must be found in every message. A rank may raise any time before `timeout`,
    however early the others did. Processes stay in the pool, so claims about errors are cheap.
    """
    __tracebackhide__ = True
    outcomes = _run(fn, world_size, args, timeout, backend, "raised")
    wrong = sorted(
        r for r, o in outcomes.items() if o.state != "raised" or not re.search(match, o.message)
    )
    if wrong:
        raise RankError(
            f"ranks {wrong} did not raise an error matching {match!r}.\n{_report(fn, outcomes)}"
        )
    return [outcomes[rank].message for rank in range(world_size)]


def start_importing() -> None:
    """Start the process that workers are forked from, so that it imports meanwhile."""
    if sys.platform == "linux":
        multiprocessing.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def close_pool() -> None:
    """Kill and reap every worker. The next call starts new ones."""
    while _pool:
        _pool.pop().kill()


# ---- the test's process ----


class _Worker:
    """One process of the pool, seen from the test's process."""

    def __init__(self) -> None:
        # Never forked from this process, whose threads' locks and CUDA state it would inherit.
        # The fork server has neither, and imports once for all, so that a new worker is cheap.
        # Off Linux, a fork after imports is not safe.
        context: Any = multiprocessing.get_context(
            "forkserver" if sys.platform == "linux" else "spawn"
        )
        multiprocessing.set_forkserver_preload(PRELOAD)
        self._stacks = tempfile.NamedTemporaryFile("r", prefix="rank-stacks-", errors="replace")  # noqa: SIM115
        self.conn, theirs = context.Pipe()
        # daemon, so that multiprocessing's own exit handler does not wait for it.
        self.process = context.Process(
            target=_worker_main, args=(theirs, self._stacks.name), daemon=True
        )
        self.process.start()
        theirs.close()  # so that a dead worker reads as the end of the pipe
        self._ready = False

    def wait_ready(self) -> None:
        if not self._ready:
            if not self.conn.poll(STARTUP_SECONDS):
                raise RuntimeError(f"a worker process was not ready after {STARTUP_SECONDS:.0f} s")
            self._ready = self.receive().state == "returned"

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # a dead worker: the next receive() says so
            self.conn.send_bytes(pickle.dumps(message))

    def receive(self) -> _Outcome:
        try:
            outcome: _Outcome = pickle.loads(self.conn.recv_bytes())
            return outcome
        except (EOFError, OSError):
            self.process.join(STACKS_SECONDS)
            return _Outcome(
                "died", details=f"exit code {self.process.exitcode}\n{self._stacks.read()}"
            )

    def ask_for_stacks(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)

    def read_stacks(self) -> str:
        """Return what the worker wrote when asked; returns once the text stops growing."""
        text, deadline = "", time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            more = self._stacks.read()
            if text and not more:
                return text
            text += more
        return text or "(no stacks: the process does not answer signals)"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()  # reaps it
        self.conn.close()
        self._stacks.close()


def _close_at_exit() -> None:
    close_pool()
    with contextlib.suppress(Exception):  # private, but the fork server is ours to reap
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


_pool: list[_Worker] = []
atexit.register(_close_at_exit)


def _take_workers(count: int) -> list[_Worker]:
    for index in range(count):
        if index == len(_pool):
            _pool.append(_Worker())
        elif not _pool[index].process.is_alive():
            _pool[index].kill()
            _pool[index] = _Worker()
    for worker in _pool[:count]:  # in a second loop, so that they start side by side
        worker.wait_ready()
    return _pool[:count]


def _run(
    fn: Callable[..., object],
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    backend: str,
    wanted: Literal["returned", "raised"],
) -> dict[int, _Outcome]:
    """Return how each rank ended, in the order in which they did.

    The pool survives only if all ended as `wanted`.
    """
    call = pickle.dumps((fn, args))
    # Shorter than ours, so that a hung collective raises its own error first.
    group_timeout = timedelta(seconds=0.9 * timeout)
    # A file, because a TCP store asks a name server who connects: 5 s wherever an answer is lost,
    # as it may be on purpose if many are asked for.
    store = tempfile.TemporaryDirectory(prefix="rank-store-", ignore_cleanup_errors=True)
    try:
        workers = _take_workers(world_size)
        path = os.path.join(store.name, "store")
        for rank, worker in enumerate(workers):
            worker.send(_Job(rank, world_size, backend, path, group_timeout, sys.path, call))
        outcomes = _collect(
            workers, timeout, grace=GRACE_SECONDS if wanted == "returned" else timeout
        )
        if all(outcome.state == wanted for outcome in outcomes.values()):
            dirty = _clean_up(workers)
            if dirty and wanted == "returned":  # after an error, work left in flight is no surprise
                warnings.warn(f"did not destroy the process group, replaced: {dirty}", stacklevel=3)
        else:
            close_pool()
    except BaseException:  # KeyboardInterrupt too: the next call must find no half-done work
        close_pool()
        raise
    finally:
        store.cleanup()
    return outcomes


def _collect(workers: Sequence[_Worker], timeout: float, grace: float) -> dict[int, _Outcome]:
    outcomes: dict[int, _Outcome] = {}
    deadline = time.monotonic() + timeout
    while running := {
        worker.conn: rank for rank, worker in enumerate(workers) if rank not in outcomes
    }:
        ready = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in (rank for conn, rank in running.items() if conn in ready):
            outcomes[rank] = workers[rank].receive()
            if outcomes[rank].state != "returned":
                deadline = min(deadline, time.monotonic() + grace)

    for rank in running.values():  # all first, then read: the stacks of one moment
        workers[rank].ask_for_stacks()
    for rank in running.values():
        outcomes[rank] = _Outcome("running", details=workers[rank].read_stacks())
    return outcomes


def _clean_up(workers: Sequence[_Worker]) -> dict[str, str]:
    """Destroy the process groups; kill each worker that cannot, and return how it ended.

    On all ranks at once, and only after every rank has ended: a rank that closed its connections
    earlier could fail its peers' last collective.
    """
    dirty: dict[str, str] = {}
    for worker in workers:
        worker.send("clean up")
    deadline = time.monotonic() + CLEAN_UP_SECONDS
    for rank, worker in enumerate(workers):
        answered = worker.conn.poll(max(0.0, deadline - time.monotonic()))
        outcome = worker.receive() if answered else _Outcome("running")
        if outcome.state != "returned":
            worker.kill()
            dirty[f"rank {rank}"] = outcome.message or outcome.state
    return dirty


def _report(fn: Callable[..., object], outcomes: Mapping[int, _Outcome]) -> str:
    failed = [rank for rank, outcome in outcomes.items() if outcome.state != "returned"]
    name = getattr(fn, "__qualname__", repr(fn))
    lines = [f"{name}: {len(failed)} of {len(outcomes)} ranks failed, in this order: {failed}"]
    for rank, outcome in sorted(outcomes.items()):
        what = "still running, killed; its threads" if outcome.state == "running" else outcome.state
        lines.append(f"---- rank {rank}: {what} ----\n{outcome.details.rstrip()}".rstrip())
    return "\n".join(lines)


# ---- the worker's process ----


def _worker_main(conn: Connection, stacks_path: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test's process, which kills us
    threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()
    stacks = open(stacks_path, "a")  # noqa: SIM115  (faulthandler keeps only the number of the file)
    # Threads of C++, as gloo's, have no stacks in Python. torch prints theirs on what it takes for
    # the standard error, with which a job's warnings come along.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    os.dup2(stacks.fileno(), sys.stderr.fileno())
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _rewrite_assertions()
    for module in PRELOAD:  # where there is no fork server
        with contextlib.suppress(ImportError):  # a machine without a network may lack some
            importlib.import_module(module)
    if os.environ.get(SANITIZE):
        _sanitizer.enable_cuda_sanitizer()
    _freeze_what_was_imported()
    conn.send_bytes(pickle.dumps(_Outcome("returned")))
    while True:
        job = pickle.loads(conn.recv_bytes())
        os.truncate(stacks_path, 0)
        conn.send_bytes(pickle.dumps(_outcome_of(_run_job, job)))
        del job
        conn.recv_bytes()  # every rank has ended
        conn.send_bytes(pickle.dumps(_outcome_of(_forget_job)))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _rewrite_assertions() -> None:
    """Let a failed `assert` in a rank show its values. Best effort: pytest's internals."""
    with contextlib.suppress(Exception):
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        hook = install_importhook(get_config())
        hook._must_rewrite.add("support")


def _outcome_of(fn: Callable[..., object], *args: Any) -> _Outcome:
    try:
        return _Outcome("returned", value=pickle.dumps(fn(*args)))
    except BaseException as error:  # SystemExit and pytest's own outcomes fail the rank too
        message = "".join(traceback.format_exception_only(error)).strip()
        return _Outcome(
            "raised", message=message, details="".join(traceback.format_exception(error))
        )


def _run_job(job: _Job) -> object:
    sys.path.extend(path for path in job.sys_path if path not in sys.path)
    fn, args = pickle.loads(job.call)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "nccl" in job.backend:
        _take_gpu(job.rank, job.world_size)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # gloo would look up the host's name, which may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = FileStore(job.store, job.world_size)
    store.set_timeout(job.group_timeout)
    dist.init_process_group(
        job.backend,
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=job.group_timeout,
    )
    return fn(*args)


def _take_gpu(rank: int, world_size: int) -> None:
    """Choose this rank's GPU, which ranks share where there are fewer.

    NCCL refuses ranks that have both the host's hash and the GPU in common, so each says that it is
    a host. It reads that once in a process, at the first communicator, so all ranks say it that may
    ever share a GPU. They then talk through sockets.
    """
    gpus = torch.cuda.device_count()
    if gpus < max(2, world_size):
        os.environ.update(NCCL_OF_A_SHARED_GPU, NCCL_HOSTID=str(os.getpid()))
    torch.cuda.set_device(rank % gpus)


def _forget_job() -> None:
    from torch.distributed.device_mesh import DeviceMesh  # slow: workers only
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from fsdp_overlap.torch_internals import let_go_of_groups

    if dist.is_initialized():
        dist.destroy_process_group()
    # DTensor caches results with their meshes, and a mesh of the next call equals one whose groups
    # are gone.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    gc.collect()
    # Other caches of torch keep meshes too. Each of their groups would keep threads, which look
    # around a hundred times a second: of hundreds of groups that takes all cores.
    for each in gc.get_objects():
        if type(each) is DeviceMesh:
            let_go_of_groups(each)
    _freeze_what_was_imported()


_imported = 0
"""How many modules there were when objects were last frozen."""


def _freeze_what_was_imported() -> None:
    """Module stay. Those that clients import have more objects than all else, and each later call
    would look at them again, for up to a second of all ranks."""
    global _imported
    if len(sys.modules) > _imported:
        _imported = len(sys.modules)
        gc.freeze()
