"""Join the ranks that torchrun started, or start ranks on this machine."""

import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsdp_overlap.tools.cli.config import TrainConfig
from fsdp_overlap.tools.cli.job import restarts
from fsdp_overlap.tools.cli.output import BadInput
from fsdp_overlap.tools.cli.process_group import cores, ranks_here
from fsdp_overlap.tools.cli.train import train

# More would only wait for each other, each with its own copy of torch in memory.
_RANKS_PER_CORE = 4
_LAUNCHER_SECONDS = 2.0
_MONITOR_SECONDS = 0.1  # how often a launcher, ours or torchrun, checks whether a rank has died
_NO_MESSAGE = "To enable traceback see"  # how torch's begins for a rank that left none
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
# What launchers of tasks call a task, its number on its machine, and how many there are.
_OF_TASKS = {
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
}


@dataclass(frozen=True)
class Place:
    """ranks: how many the whole job has. device_type: "cpu" (gloo) or that of accelerators, such as
    "cuda" (NCCL). joining: the ranks exist already. max_restarts: how often ranks that we start are
    started again when one has died."""

    ranks: int
    device_type: str
    joining: bool
    max_restarts: int = 0


def find_place(ranks: int | None, device: str, max_restarts: int | None = None) -> Place:
    """Return where to run `ranks` ranks on `device`. Start nothing.

    ranks: by default as many as the torchrun that started this process has; without torchrun, one
    per accelerator, or 2 on a CPU.
    device: auto, cpu, or the type of this machine's accelerators, such as cuda.

    Raises BadInput if the ranks cannot run there, or if we cannot restart them.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
    if device not in ("auto", *there):
        raise BadInput(
            f"--device {device}: this machine has {' and '.join(there)}; use one, or auto"
        )
    device_type = there[0] if device == "auto" else device
    devices = torch.accelerator.device_count()
    if ranks is not None and ranks < 1:
        raise BadInput(f"--ranks {ranks}: must be at least 1")

    if max_restarts is not None and max_restarts < 0:
        raise BadInput(f"--max-restarts {max_restarts}: must not be negative")

    joining = _is_joining()
    if joining:
        world = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, world):
            raise BadInput(
                f"--ranks {ranks}: torchrun has started {world}; leave --ranks out under torchrun"
            )
        if max_restarts is not None:
            raise BadInput(
                f"--max-restarts {max_restarts}: torchrun has started the ranks; give it the option"
            )
        if absent := [name for name in _MEETING if name not in os.environ]:
            raise BadInput(
                f"{' and '.join(absent)}: not set, and ranks need them to meet; set MASTER_ADDR to "
                "the machine of rank 0 and MASTER_PORT to a free port of it, or start with torchrun"
            )
        here = ranks_here() or int(os.environ["LOCAL_RANK"]) + 1
    else:
        world = here = ranks if ranks is not None else 2 if device_type == "cpu" else devices
    _check_fits(here, device_type, devices)
    return Place(world, device_type, joining, max_restarts or 0)


def _is_joining() -> bool:
    """Return whether something has started this process as one of several ranks.

    Raises:
        BadInput: something has, but did not say which, or in no numbers.
    """
    for name in (*_TORCHRUN, "LOCAL_WORLD_SIZE"):
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise BadInput(f"{name}={value!r}: must be a number; export it in each task")
    found = [name for name in _TORCHRUN if name in os.environ]
    if len(found) == len(_TORCHRUN):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if rank >= world:
            raise BadInput(f"RANK={rank}: must be below WORLD_SIZE, which is {world}")
        return True
    absent = ", ".join(name for name in _TORCHRUN if name not in found)
    for launcher, variables in _OF_TASKS.items():
        if (count := os.environ.get(variables[-1], "1")) != "1":
            exports = [f"{a}=${b}" for a, b in zip(_TORCHRUN, variables, strict=True)]
            raise BadInput(
                f"{launcher} has started {count} tasks, and {absent} are not set: let each task "
                f"export {' '.join(exports)}, MASTER_ADDR and MASTER_PORT, or let {launcher} start "
                "torchrun, once on each machine"
            )
    if "RANK" in found or "LOCAL_RANK" in found:
        raise BadInput(
            f"{' and '.join(found)} set, but not {absent}: set all, as torchrun does, or none"
        )
    return False


def launch(config: TrainConfig, place: Place, resume: bool) -> None:
    """Train on every rank of `place`; return when all are done. Raise ChildFailedError if a rank
    that it started failed."""
    if place.joining:
        with _leaving_last():
            train(config, place.device_type, resume)
        return
    spec = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=place.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=place.max_restarts,
        monitor_interval=_MONITOR_SECONDS,
    )
    # The launcher never removes its logs, and nobody reads them here.
    with tempfile.TemporaryDirectory() as logs:
        spec.logs_specs = DefaultLogsSpecs(log_dir=logs)
        elastic_launch(spec, _train_started)(config, place.device_type, resume)


def _train_started(config: TrainConfig, device_type: str, resume: bool) -> None:
    """Train on a rank that we started. After it returns, the process waits for the launcher to
    take its result. A launcher that was told to stop, or was killed, never does: so a timer ends
    the process."""
    with _leaving_last():
        train(config, device_type, resume or restarts()[0] > 0)
    sys.stdout.flush()
    leave = threading.Timer(_LAUNCHER_SECONDS, os._exit, (0,))
    leave.daemon = True
    leave.start()


@contextmanager
def _leaving_last() -> Iterator[None]:
    """Delay an error. Where a rank has died, the others fail as well. Launchers name the first
    that they see fail, and it should be the rank that died."""
    try:
        yield
    except Exception:
        time.sleep(3 * _MONITOR_SECONDS)
        raise


def describe_failure(error: ChildFailedError) -> str:
    """Return one line: the rank that failed first and why."""
    rank, failure = error.get_first_failure()
    # Declared a string; where the rank raised, it is a dictionary.
    raised: Any = failure.message
    message = raised["message"] if isinstance(raised, dict) else raised
    if message.startswith(_NO_MESSAGE):
        message = f"exit code {failure.exitcode}, its last words are above"
    return f"rank {rank} failed: {' '.join(message.split()) or f'exit code {failure.exitcode}'}"


def _check_fits(ranks: int, device_type: str, devices: int) -> None:
    if device_type != "cpu":
        if ranks > devices:
            raise BadInput(
                f"--ranks {ranks}: each rank needs a {device_type} device of its own and this "
                f"machine has {devices}"
            )
    elif ranks > (most := _RANKS_PER_CORE * cores()):
        raise BadInput(
            f"--ranks {ranks}: at most {most} on this machine, {_RANKS_PER_CORE} for each of its "
            f"{cores()} cores"
        )
