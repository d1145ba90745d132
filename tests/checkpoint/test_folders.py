"""Folders of checkpoints and weights: what paths and URLs mean, and folders of links."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_overlap.checkpoint import (
    CheckpointError,
    SafeFileSystemReader,
    SafeFileSystemWriter,
    read_metadata,
)
from fsdp_overlap.checkpoint.files import local_path
from fsdp_overlap.tools.cli import main


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("file:///a/b", "/a/b"),
        ("FILE://localhost/a/b", "/a/b"),
        ("file:/a/b", "/a/b"),
        ("file:///a%20b/50%25#1?x", "/a b/50%#1?x"),
        (Path("file:///a/b%20c"), "/a/b c"),
        (PurePosixPath("file://localhost/a/b"), "/a/b"),
        ("a/b", "a/b"),
        ("/a%20b", "/a%20b"),
        ("./file:/a", "file:/a"),
        ("file:", "file:"),
        ("C:/a", "C:/a"),
        ("step:1/a", "step:1/a"),
    ],
)
def test_what_a_path_means(given: str | os.PathLike[str], meant: str) -> None:
    assert str(local_path(given)) == meant


@pytest.mark.parametrize(
    "given", ["s3://bucket/a", Path("s3://bucket/a"), "file://other/a", "hf://datasets/a"]
)
def test_folders_of_no_machine_are_refused(given: str | os.PathLike[str], tmp_path: Path) -> None:
    says = rf"{os.fspath(given)}: not a folder on this machine; give one, such as .* file:///mnt/step-1"
    for kind in (SafeFileSystemReader, SafeFileSystemWriter, read_metadata):
        with pytest.raises(ValueError, match=says):
            kind(given)
    writer = SafeFileSystemWriter(tmp_path)
    with pytest.raises(ValueError, match=says):
        dcp.save({"x": torch.ones(1)}, checkpoint_id=given, storage_writer=writer, no_dist=True)


def test_checkpoints_are_where_their_url_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    first, second = (tmp_path / name for name in ("step 1", "step 2"))
    state = {"weight": torch.arange(4.0)}
    writer = SafeFileSystemWriter(path=first.as_uri())
    dcp.save(state, storage_writer=writer, no_dist=True)
    dcp.save(state, checkpoint_id=second.as_uri(), storage_writer=writer, no_dist=True)
    for folder in (first, second):
        for reader in (SafeFileSystemReader(folder.as_uri()), SafeFileSystemReader(folder)):
            loaded = {"weight": torch.zeros(4)}
            dcp.load(loaded, storage_reader=reader, no_dist=True)
            assert loaded["weight"].tolist() == [0, 1, 2, 3]
    loaded = {"weight": torch.zeros(4)}
    reader = SafeFileSystemReader("elsewhere")
    dcp.load(loaded, checkpoint_id=first.as_uri(), storage_reader=reader, no_dist=True)
    assert loaded["weight"].tolist() == [0, 1, 2, 3]
    assert list(read_metadata(first.as_uri()).state_dict_metadata) == ["weight"]

    weights = tmp_path / "weights.pt"
    command = ["export", first.as_uri(), weights.as_uri()]
    assert run(monkeypatch, *command) == 0
    assert torch.load(weights)["weight"].tolist() == [0, 1, 2, 3]
    assert run(monkeypatch, "train", "--out", "s3://bucket/run") == 2
    assert "s3:/bucket/run: not a folder on this machine" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["fsdp-overlap", *arguments])
    try:
        return main.run()
    except SystemExit as end:
        return end.code


def test_a_folder_of_links_says_what_to_do(tmp_path: Path) -> None:
    """As in a cache of the Hugging Face Hub."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "a snapshot"
    state = {"weight": torch.arange(4.0)}
    dcp.save(state, storage_writer=SafeFileSystemWriter(blobs), no_dist=True)
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..", "blobs", path.name))
    says = rf"but a link, .* cp -rL '{snapshot}' FOLDER"
    with pytest.raises(CheckpointError, match=says):
        read_metadata(snapshot)
    with pytest.raises(CheckpointException, match=says):
        dcp.load(state, storage_reader=SafeFileSystemReader(snapshot), no_dist=True)
    shutil.copytree(snapshot, tmp_path / "copy")  # follows links, as cp -L
    dcp.load(state, storage_reader=SafeFileSystemReader(tmp_path / "copy"), no_dist=True)
