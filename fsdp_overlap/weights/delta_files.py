"""Weight deltas in a folder that trainers and receivers share: files of safetensors, which all
ranks write, and a manifest that makes a version complete."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from fsdp_overlap.checkpoint.checksums import crc32
from fsdp_overlap.checkpoint.files import CheckpointError, local_path, refusing
from fsdp_overlap.weights.delta_format import (
    DeltaMessage,
    WeightDelta,
    batches,
    decode,
    encode,
)
from fsdp_overlap.weights.delta_targets import (
    Targets,
    check_base,
    check_deltas,
    tensors_of,
    write,
)
from fsdp_overlap.weights.deltas import OutgoingDeltas, WeightDeltas
from fsdp_overlap.weights.save import UNFINISHED, bytes_of

MANIFEST = "manifest.json"
_FOLDER = "version-"
_VERSION = re.compile(rf"{_FOLDER}([0-9]{{8,}})")


def write_deltas(
    deltas: WeightDeltas,
    folder: str | os.PathLike[str],
    *,
    dense: bool = False,
    version: int | None = None,
    file_bytes: int = 256 << 20,
) -> None:
    """Write what changed since the last version into a folder of its own in ``folder``, from which
    :func:`load_deltas` applies it.

    Each rank writes files of its own, and has what one file holds in memory. The manifest comes
    last, so that receivers never see a part of a version. Call it on every rank that the model lies
    over. Where there are replicas of shards (HSDP), those of the first write.

    Args:
        folder: a folder that all ranks can reach, or its URL, as ``file:///mnt/deltas``. Versions
            stay in it until you remove them.
        dense: as in :meth:`WeightDeltas.changes`, as is ``version``.
        file_bytes: the most that a file should have.

    Raises:
        RuntimeError: a rank could not write, as where the version is in the folder; names it. The
            last version stays that before.
        ValueError: ``version`` is not above the last, or ranks are of different versions.
    """
    begun: list[OutgoingDeltas] = []
    written: dict[str, int] = {}

    def begin() -> tuple[int, int]:
        begun.append(deltas.begin(dense=dense, version=version))
        if is_first:
            newest = max(_complete(local_path(folder)), default=0)
            if newest >= begun[0].version:
                raise FileExistsError(
                    f"{folder} has version {newest}, and {begun[0].version} is to be written: name "
                    "another folder, or give a version= above"
                )
            _path_of(local_path(folder), begun[0].version).mkdir(parents=True, exist_ok=True)
        return begun[0].version, begun[0].base

    def write_files() -> dict[str, int]:
        if not deltas.sends:
            list(outgoing)
            return written
        for number, batch in enumerate(batches(outgoing, file_bytes)):
            file = path / f"rank-{exchange.rank:05d}-{number:05d}.safetensors"
            written[file.name] = 0
            written[file.name] = _write(file, encode(outgoing.version, outgoing.base, batch))
        return written

    exchange = deltas.exchange("write_deltas", with_replicas=True)
    is_first = exchange.rank == 0 and deltas.sends
    versions = sorted(set(exchange.on_all(begin, "begin")))
    if len(versions) > 1:
        numbers = [version for version, _ in versions]
        raise ValueError(
            f"ranks would write versions {numbers}: give them all dense=True and "
            f"version={numbers[-1] + 1}"
        )
    [outgoing] = begun
    path = _path_of(local_path(folder), outgoing.version)
    try:
        files = exchange.on_all(write_files, "write")
        manifest = {
            "version": outgoing.version,
            "base": outgoing.base,
            "files": {name: checksum for each in files for name, checksum in each.items()},
        }
        text = json.dumps(manifest, indent=2).encode() + b"\n"
        exchange.on_all(lambda: _write(path / MANIFEST, [text]) if is_first else 0, "write")
    except BaseException:
        for name in [MANIFEST] * is_first + [*written]:
            (path / name).unlink(missing_ok=True)
        raise
    outgoing.commit()


def load_deltas(targets: Targets, folder: str | os.PathLike[str], version: int = 0) -> int:
    """Bring ``targets``, which are of ``version``, to the newest complete version in ``folder``.

    Everything is read and checked before the first value is written: checksums of files, names,
    shapes and dtypes. Of large files pages are read as they are needed.

    Args:
        targets: an unsharded module, whose tensors have the names of its state dict, or tensors by
            name. Their dtype is that of :class:`WeightDeltas`.
        folder: where :func:`write_deltas` writes.
        version: what the last call returned, 0 at first.

    Returns:
        The version that the targets are of now. It is ``version`` if there is none above.

    Raises:
        CheckpointError: a file is missing, cut off or damaged; names it.
        TypeError: a target is sharded.
        ValueError: as :func:`apply_deltas`; or versions between are missing.
    """
    tensors = tensors_of(targets)
    messages = _messages_after(local_path(folder), version)
    for message in messages:
        check_deltas(tensors, list(message), is_dense=message.base == 0)
    for message in messages:
        for delta in message:
            write(tensors, delta)
        version = message.version
    return version


def read_deltas(path: str | os.PathLike[str]) -> DeltaMessage:
    """Return the message in the folder ``path`` of one version, whose values are read as they are
    used.

    Raises:
        CheckpointError: a file is missing, cut off or damaged; names it.
    """
    folder = local_path(path)
    manifest = _read_manifest(folder)
    deltas: list[WeightDelta] = []
    for name, checksum in manifest["files"].items():
        deltas += _read_file(folder / name, checksum)
    return DeltaMessage(manifest["version"], manifest["base"], deltas)


def _path_of(folder: Path, version: int) -> Path:
    return folder / f"{_FOLDER}{version:08d}"


def _messages_after(folder: Path, version: int) -> list[DeltaMessage]:
    """Return the messages that lead from ``version`` to the newest in ``folder``, in order."""
    found = _complete(folder)
    newest = max(found, default=version)
    if newest < version:
        raise ValueError(f"{folder} has versions up to {newest}, and the weights are of {version}")
    messages: list[DeltaMessage] = []
    while newest != version:
        if newest < version or newest not in found:
            check_base(messages[-1], version)
        messages.append(read_deltas(_path_of(folder, newest)))
        newest = messages[-1].base or version
    return messages[::-1]


def _complete(folder: Path) -> set[int]:
    """Return the complete versions in ``folder``."""
    names = (path.parent.name for path in folder.glob(f"{_FOLDER}*/{MANIFEST}"))
    return {int(found[1]) for name in names if (found := _VERSION.fullmatch(name))}


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        text = path.read_text()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    with refusing(str(path)):
        manifest: dict[str, Any] = json.loads(text)
        version, base, files = (manifest[key] for key in ("version", "base", "files"))
        if _path_of(folder.parent, version).name != folder.name or not 0 <= base < version:
            raise ValueError(f"it is of version {version} against {base}")
        if any(os.path.basename(name) != name for name in files):
            raise ValueError("it names files outside of its folder")
    return manifest


def _write(path: Path, parts: list[Any]) -> int:
    """Write a file that gets its name when it is on the disk, and return its checksum."""
    unfinished = path.with_name(path.name + UNFINISHED)
    checksum = 0
    try:
        with unfinished.open("wb") as out:
            for part in parts:
                out.write(part)
                checksum = crc32(part, checksum)
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return checksum


def _read_file(path: Path, checksum: int) -> list[WeightDelta]:
    with refusing(str(path)):
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            raise CheckpointError(str(error.strerror)) from None
        content = torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
        if crc32(bytes_of(content)) != checksum:
            raise ValueError(f"its {nbytes:,} bytes have another checksum than in the manifest")
        return decode(content)
