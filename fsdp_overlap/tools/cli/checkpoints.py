"""The checkpoints of a run: each is complete or absent."""

import os
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from fsdp_overlap.checkpoint import (
    CheckpointError,
    SafeFileSystemReader,
    SafeFileSystemWriter,
    ShardedSavePlanner,
)
from fsdp_overlap.tensor.dcp import writing

_PREFIX = "step-"
_UNFINISHED = ".unfinished"  # there is at most one, being written or being removed


def step_of(checkpoint: Path) -> int:
    """Return the step after which `checkpoint` was saved."""
    return int(checkpoint.name.removeprefix(_PREFIX))


class Checkpoints:
    """Folders such as `step-000040` in `folder`. The last `keep` are kept.

    A checkpoint is written under another name and renamed once every byte is on the disk. So a run
    that is killed at any moment leaves only complete checkpoints.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        found = [
            path
            for path in self.folder.glob(_PREFIX + "*")
            if path.name.removeprefix(_PREFIX).isdecimal()
        ]
        return sorted(found, key=step_of)

    def latest(self) -> Path | None:
        return next(reversed(self.all()), None)

    def save(self, step: int, run: Stateful) -> Path:
        """Save `run` after `step` steps; collective. Return the checkpoint's folder.

        Raises CheckpointError, and leaves the earlier checkpoints, if it cannot be written.
        """
        path = self.folder / f"{_PREFIX}{step:06d}"
        unfinished = self.folder / _UNFINISHED
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier()
        writer = SafeFileSystemWriter(unfinished)
        try:
            dcp.save(run.state_dict(), storage_writer=writer, planner=ShardedSavePlanner())
        except CheckpointException as failed:
            if dist.get_rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            # No Exception, so launchers would not tell of it.
            raise CheckpointError(
                f"cannot save step {step}: {_reason(failed)}; {self._kept()}"
            ) from None
        if dist.get_rank() == 0:
            _sync(unfinished)
            unfinished.rename(path)
            _sync(self.folder)
            for old in self.all()[: -self.keep]:
                # A half-removed folder must not look like a checkpoint.
                old.rename(unfinished)
                shutil.rmtree(unfinished)
        dist.barrier()
        return path

    def _kept(self) -> str:
        latest = self.latest()
        return "none was saved before" if latest is None else f"kept: {latest}"

    def load(self, path: Path, run: Stateful) -> None:
        """Load the checkpoint at `path` into `run`; collective.

        Raises CheckpointError, and leaves `run` as it was, if the checkpoint is damaged or of
        another kind of run.
        """
        state = run.state_dict()
        try:
            dcp.load(state, storage_reader=SafeFileSystemReader(path))
        except CheckpointException as failed:
            raise CheckpointError(
                f"cannot resume from {path}: {_reason(failed)}; remove this folder to resume from "
                "the checkpoint before it"
            ) from None
        run.load_state_dict(state)


def _reason(failed: CheckpointException) -> BaseException:
    return next(iter(failed.failures.values()))[0]


def how_to_go_on(run: Path) -> str | None:
    """Return one line on how to resume the run in the folder `run`; None if it has saved
    nothing."""
    if Checkpoints(run / "checkpoints", keep=1).latest() is None:
        return None
    return f"go on with: fsdp-overlap train --resume {run}"


def _sync(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with writing(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
