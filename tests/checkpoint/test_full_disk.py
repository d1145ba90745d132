"""Where a disk is full: the error says so and which file, and what is left is no checkpoint."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fsdp_overlap.checkpoint import (
    CheckpointError,
    SafeFileSystemReader,
    SafeFileSystemWriter,
    ShardedSavePlanner,
)
from fsdp_overlap.tensor.dcp import writing
from fsdp_overlap.tools.cli.checkpoints import Checkpoints
from fsdp_overlap.tools.cli.launch import describe_failure
from support.checkpoints import build, state_of, train
from support.ranks import run_ranks

FULL = "File too large"
"""What a file says that may not grow, as a disk does that is full: by real, partial writes."""


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def disk_error(failed: BaseException) -> OSError:
    """The first that a rank has."""
    assert isinstance(failed, dcp.CheckpointException)
    error = next(iter(failed.failures.values()))[0]
    assert isinstance(error, OSError), error
    assert FULL in str(error)
    return error


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_wherever_the_disk_is_full_the_error_says_which_file(tmp_path: Path, threads: int) -> None:
    state: dict[str, Any] = {f"w{i}": torch.rand(60 * i) for i in range(4)} | {"step": 3}
    other, over = tmp_path / "other", tmp_path / "over"
    dcp.save(state, storage_writer=SafeFileSystemWriter(other))
    limits = [*range(0, 1700, 61), *range(1700, 4200, 311)]
    for limit in limits:
        dcp.save(state, storage_writer=SafeFileSystemWriter(over))
        writer = SafeFileSystemWriter(over, thread_count=threads)
        with files_of_at_most(limit), pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(state, storage_writer=writer)
        error = disk_error(caught.value)
        assert Path(error.filename).parent == over
        assert not Path(error.filename).exists()
        assert not list(over.glob(".metadata*"))
        with pytest.raises(dcp.CheckpointException, match="a complete checkpoint has it"):
            dcp.load(state, storage_reader=SafeFileSystemReader(over))
    dcp.load(state, storage_reader=SafeFileSystemReader(other))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("limit", [30, 10_000], ids=["metadata", "checksum"])
def test_the_last_files_too(tmp_path: Path, limit: int) -> None:
    digest = hashlib.file_digest

    def full_from_here(*args: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9, resource.RLIM_INFINITY))
        return digest(*args)

    with (
        files_of_at_most(limit),
        patch("hashlib.file_digest", full_from_here),
        pytest.raises(dcp.CheckpointException) as caught,
    ):
        dcp.save({}, storage_writer=SafeFileSystemWriter(tmp_path))
    assert disk_error(caught.value).filename == str(tmp_path / ".metadata.tmp")
    assert not list(tmp_path.glob(".metadata*"))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_of_torchs_writer_too(tmp_path: Path) -> None:
    for limit in range(0, 1200, 103):
        with files_of_at_most(limit), pytest.raises(dcp.CheckpointException) as caught:
            dcp.save({"w": torch.rand(300)}, checkpoint_id=tmp_path)
        disk_error(caught.value)


class Run:
    def __init__(self) -> None:
        self.model, self.optimizer = build(1)
        train(self.model, self.optimizer, range(1))

    def state_dict(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def _of_ranks(folder: str) -> None:
    run, checkpoints = Run(), Checkpoints(Path(folder), keep=2)
    limit = 3000 if dist.get_rank() else 1 << 40
    with files_of_at_most(limit), pytest.raises(CheckpointError, match="none was saved before"):
        checkpoints.save(1, run)
    saved = checkpoints.save(2, run)
    expected = rf"cannot save step 4: .*{FULL}.*__1_0.distcp'; kept: {saved}"
    with files_of_at_most(limit), pytest.raises(CheckpointError, match=expected):
        checkpoints.save(4, run)
    dist.barrier()
    assert list(Path(folder).iterdir()) == [saved]
    dcp.load(run.state_dict(), storage_reader=SafeFileSystemReader(saved))
    writer = SafeFileSystemWriter(saved)
    with files_of_at_most(limit), pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(run.state_dict(), storage_writer=writer, planner=ShardedSavePlanner())
    assert disk_error(caught.value).filename == str(saved / "__1_0.distcp")
    train(run.model, run.optimizer, range(1, 2))


def test_all_ranks_say_it_and_a_run_keeps_the_checkpoints_before(tmp_path: Path) -> None:
    run_ranks(_of_ranks, 2, str(tmp_path))


def test_errors_that_are_not_of_the_disk_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writing(tmp_path):
        raise KeyError("x")
    with pytest.raises(FileNotFoundError) as caught, writing(tmp_path):
        (tmp_path / "missing").read_bytes()
    assert caught.value.filename == str(tmp_path / "missing")


def test_a_rank_without_last_words_has_an_exit_code(tmp_path: Path) -> None:
    failure = ProcessFailure(local_rank=1, pid=3, exitcode=7, error_file=str(tmp_path / "none"))
    error = ChildFailedError("it", {1: failure})
    assert describe_failure(error) == "rank 1 failed: exit code 7, its last words are above"
