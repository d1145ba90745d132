"""One rank of `fsdp-overlap train`."""

import contextlib
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_overlap.tools.cli.checkpoints import Checkpoints, how_to_go_on
from fsdp_overlap.tools.cli.config import TrainConfig
from fsdp_overlap.tools.cli.data import load_text
from fsdp_overlap.tools.cli.job import restarts
from fsdp_overlap.tools.cli.output import BadInput
from fsdp_overlap.tools.cli.process_group import process_group
from fsdp_overlap.tools.cli.run_folder import TRACES_AT_STAGE_3, RunFolder, trace_path
from fsdp_overlap.tools.cli.run_log import RunLog
from fsdp_overlap.tools.cli.trainer import Trainer

T = TypeVar("T")
# How long other machines may take to see a new folder: they may cache that it was not there.
_SEEN_SECONDS = 60.0


def train(config: TrainConfig, device_type: str, resume: bool) -> None:
    """Train as `config` says, on "cpu" or on accelerators such as "cuda". With `resume`, go on
    from the latest checkpoint of the run, if it has one. Collective: called on every rank, with the
    environment that torchrun sets. Where ranks differ in folder, batch size or `resume`, rank 0's
    count. Rank 0 alone prints and writes, except for checkpoints and traces."""
    with process_group(device_type) as device:
        # Under torchrun each rank names a folder by the time, and looks for a begun run by itself.
        out, batch_size, resume = _of_rank_0((config.out, config.batch_size, resume))
        config = replace(config, out=out, batch_size=batch_size)
        folder = RunFolder(config.out) if dist.get_rank() == 0 else None
        dist.barrier()  # nobody looks for checkpoints before the folder is this run's alone
        check_all_see(config.out, _SEEN_SECONDS)
        try:
            _run(config, device, resume, folder)
        except Exception as error:
            done, most = restarts()
            if done == most and (advice := how_to_go_on(config.out)) is not None:
                error.add_note(advice)  # shown with the traceback, as under torchrun
            raise


def _run(config: TrainConfig, device: torch.device, resume: bool, folder: RunFolder | None) -> None:
    text = load_text(config.data, config.seq_len)
    trainer = Trainer(config, text, device)
    checkpoints = Checkpoints(config.out / "checkpoints", config.keep)
    latest = _of_rank_0(checkpoints.latest())  # on a shared disk others may still see an older one
    if resume and latest is not None:
        checkpoints.load(latest, trainer)
    else:
        trainer.load_weights()
    log = None if folder is None else RunLog(config, text, trainer, folder)
    with log or contextlib.nullcontext():
        is_finished = _train(config, trainer, checkpoints, log)
    if not is_finished:
        return
    if folder is not None:
        folder.clear_traces()
    rank = dist.get_rank()
    trainer.profile_steps(trace_path(config.out, rank), config.zero_stage)
    counted = str(trainer.context.stats)
    if config.zero_stage < 3:  # which needs something to compare with
        trainer.profile_steps(trace_path(config.out, rank, TRACES_AT_STAGE_3), 3)
    if log is not None:
        log.conclude(counted)
    dist.barrier()  # all end together, as the launcher expects


def _of_rank_0(value: T) -> T:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def check_all_see(folder: Path, seconds: float) -> None:
    """Raise BadInput, on every rank, if one does not see `folder` within `seconds`. Collective."""
    end = time.monotonic() + seconds
    while not (is_seen := folder.is_dir()) and time.monotonic() < end:
        time.sleep(0.1)
    machines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, None if is_seen else socket.gethostname())
    blind = sorted({machine for machine in machines if machine is not None})
    if blind:
        raise BadInput(
            f"--out {folder}: {', '.join(blind)} cannot see this folder of rank 0's; give one that "
            "all machines share, with its whole path"
        )


def _train(
    config: TrainConfig, trainer: Trainer, checkpoints: Checkpoints, log: RunLog | None
) -> bool:
    """Train until all steps are done, and return True; or until somebody asks to stop: False."""
    stop = StopRequest()
    while trainer.steps_done < config.steps:
        stop.begin_step()
        metrics = trainer.advance()
        stops = stop.end_step()
        step = trainer.steps_done
        if log is not None:
            log.show(metrics)
        if stops or step % config.save_every == 0 or step == config.steps:
            trainer.release_unsharded()
            saved = checkpoints.save(step, trainer)
            if stops and log is not None:
                log.stopped(saved)
        if stops:
            return False
    return True


class StopRequest:
    """Tells all ranks when any of them gets SIGTERM or Ctrl-C.

    Ranks agree once a step, by a collective of one number that runs beside the step. It runs on the
    CPU, because reading a number from a GPU would make the host wait.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def begin_step(self) -> None:
        """Start to tell the other ranks; collective."""
        self._flag = torch.tensor(int(self._asked))
        self._work = dist.all_reduce(
            self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def end_step(self) -> bool:
        """Return whether any rank was asked to stop before this step; the same on every rank."""
        assert self._work is not None
        self._work.wait()
        return bool(self._flag)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
