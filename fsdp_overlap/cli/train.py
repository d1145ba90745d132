"""One rank of `fsdp-overlap train`."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from fsdp_overlap.cli.checkpoints import Checkpoints
from fsdp_overlap.cli.config import TrainConfig
from fsdp_overlap.cli.data import load_text
from fsdp_overlap.cli.run_folder import RunFolder, trace_path
from fsdp_overlap.cli.run_log import RunLog
from fsdp_overlap.cli.stopping import StopRequest
from fsdp_overlap.cli.system import cores
from fsdp_overlap.cli.trainer import Trainer


def train(config: TrainConfig, device_type: str, resume: bool) -> None:
    """Trains as `config` says, on "cpu" with gloo or "cuda" with NCCL; `resume`: from the latest
    checkpoint of the run, if it has one. Collective: called on every rank, with the environment
    that torchrun sets. Rank 0 alone prints and writes, but for checkpoints."""
    with _process_group(device_type) as device:
        config = _agreed(config)
        folder = RunFolder(config.out) if dist.get_rank() == 0 else None
        dist.barrier()  # nobody looks for checkpoints before the folder is this run's alone
        text = load_text(config.data, config.seq_len)
        trainer = Trainer(config, text, device)
        checkpoints = Checkpoints(config.out / "checkpoints", config.keep)
        if resume and (latest := checkpoints.latest()) is not None:
            checkpoints.load(latest, trainer)
        log = None if folder is None else RunLog(config, text, trainer, folder)
        with log or contextlib.nullcontext():
            is_finished = _train(config, trainer, checkpoints, log)
        if not is_finished:
            return
        if folder is not None:
            folder.clear_traces()
        trainer.profile_steps(trace_path(config.out, dist.get_rank()))
        if log is not None:
            log.conclude()
        dist.barrier()  # all end together, as the launcher expects


def _agreed(config: TrainConfig) -> TrainConfig:
    """With rank 0's folder: under torchrun each rank names its own, by the time."""
    out = [config.out]
    dist.broadcast_object_list(out)
    return replace(config, out=out[0])


def _train(
    config: TrainConfig, trainer: Trainer, checkpoints: Checkpoints, log: RunLog | None
) -> bool:
    """Whether all steps are done, which they are unless somebody asks to stop."""
    stop = StopRequest()
    while trainer.steps_done < config.steps:
        stop.begin_step()
        metrics = trainer.advance()
        stops = stop.end_step()
        step = trainer.steps_done
        if log is not None:
            log.show(metrics)
        if stops or step % config.save_every == 0 or step == config.steps:
            saved = checkpoints.save(step, trainer)
            if stops and log is not None:
                log.stopped(saved)
        if stops:
            return False
    return True


@contextlib.contextmanager
def _process_group(device_type: str) -> Iterator[torch.device]:
    """The default process group, and this rank's device, from the environment that torchrun
    sets."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()
