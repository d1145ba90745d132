"""A genuine checkpoint, ways to tamper with it, and what a refusal must leave alone."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import resource
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)
from torch.distributed.tensor import DTensor

from fsdp_overlap.checkpoint import (
    CheckpointError,
    SafeFileSystemReader,
    SafeFileSystemWriter,
)

DATA = "__0_0.distcp"
SHA = ".metadata.sha256"
TERABYTE = 1 << 40
MAX_MEMORY = 256 << 20  # bytes beside what is there before a load
MAX_SECONDS = 10.0  # some milliseconds, on an idle machine


def original() -> dict[str, Any]:
    """Return of every entry kind one, or two."""
    return {
        "weight": torch.arange(24, dtype=torch.float32).view(6, 4),
        "bias": torch.arange(4, dtype=torch.bfloat16),
        "list": [torch.arange(3), torch.tensor(2.5, dtype=torch.float64)],
        "step": 7,
        "name": "a run",
    }


def target() -> dict[str, Any]:
    state = original()
    for tensor in tensors(state):
        tensor.fill_(1)
    return state | {"step": 0, "name": ""}


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [state["weight"], state["bias"], *state["list"]]


def write(folder: Path) -> Path:
    dcp.save(original(), storage_writer=SafeFileSystemWriter(folder), no_dist=True)
    return folder


def load(folder: Path, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=SafeFileSystemReader(folder), no_dist=True)


# ---- what a refusal must leave alone ----


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Fail what asks for more than MAX_MEMORY, whether it uses it or not."""
    if not Path("/proc/self/statm").exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def disk(folder: Path) -> dict[str, tuple[int, ...]]:
    found = {path: path.lstat() for path in folder.parent.rglob("*")}
    return {
        str(path): (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
        for path, status in found.items()
    }


def check_failures(refusal: CheckpointException, match: str = "") -> None:
    for error, _ in refusal.failures.values():
        assert type(error) is CheckpointError, repr(error)
        assert re.search(match, str(error)), str(error)
        assert len(str(error)) < 2000


def expect_refusal(folder: Path, match: str, state: dict[str, Any] | None = None) -> None:
    state = target() if state is None else state
    before, values = disk(folder), copy.deepcopy(state)
    start = time.monotonic()
    with little_memory(), pytest.raises(CheckpointException) as caught:
        load(folder, state)
    assert time.monotonic() - start < MAX_SECONDS
    check_failures(caught.value, match)
    assert disk(folder) == before
    assert state.keys() == values.keys()
    assert_same(state, values)


def assert_same(first: Any, second: Any) -> None:
    """Equal to the bit, and of the same types all the way down."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert first.shape == second.shape
        if isinstance(first, DTensor):
            first, second = first.to_local(), second.to_local()
        first, second = first.detach().contiguous(), second.detach().contiguous()
        assert torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for pair in zip(first, second, strict=True):
            assert_same(*pair)
    else:
        assert first == second


# ---- how checkpoints are tampered with ----


Change = Callable[[Path], None]


def metadata_bytes(folder: Path, data: bytes) -> None:
    (folder / ".metadata").write_bytes(data)
    (folder / ".metadata.sha256").unlink(missing_ok=True)  # as who attacks would


def edit(change: Callable[[Metadata], Any]) -> Change:
    def tamper(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        metadata_bytes(folder, pickle.dumps(metadata))

    return tamper


def index_of(metadata: Metadata, fqn: str) -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == fqn)


def info_of(metadata: Metadata, fqn: str) -> Any:
    return metadata.storage_data[index_of(metadata, fqn)]


def entry_of(folder: Path, fqn: str) -> bytes:
    info = info_of(pickle.loads((folder / ".metadata").read_bytes()), fqn)
    return (folder / info.relative_path).read_bytes()[info.offset :][: info.length]


def put(folder: Path, fqn: str, data: bytes) -> None:
    """``data`` as the entry of ``fqn``."""

    def move(metadata: Metadata) -> None:
        info = info_of(metadata, fqn)
        path = folder / info.relative_path
        info.offset, info.length = path.stat().st_size, len(data)
        with path.open("ab") as file:
            file.write(data)

    edit(move)(folder)


def records_of(entry: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(entry)) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(f"archive/{name}", content)
    return data.getvalue()


def records(fqn: str, **changed: bytes | None) -> Change:
    """Return the entry with some of its records replaced, removed or added; ``_`` stands for a
    dot."""

    def tamper(folder: Path) -> None:
        found: dict[str, Any] = records_of(entry_of(folder, fqn))
        found |= {name.replace("_", "."): content for name, content in changed.items()}
        put(folder, fqn, zipped({k: v for k, v in found.items() if v is not None}))

    return tamper


def saved(value: Any) -> Callable[[str], Change]:
    """Return ``value`` as torch.save writes it, in place of another."""

    def at(fqn: str) -> Change:
        def tamper(folder: Path) -> None:
            data = io.BytesIO()
            torch.save(value() if callable(value) else value, data)
            put(folder, fqn, data.getvalue())

        return tamper

    return at


def pickled(data: bytes) -> Callable[[str], Change]:
    return lambda fqn: records(fqn, data_pkl=data)


def replaced(old: bytes, new: bytes, fqn: str) -> Change:
    """Return the pickle of an entry with ``new`` where ``old`` was."""

    def tamper(folder: Path) -> None:
        data = records_of(entry_of(folder, fqn))["data.pkl"]
        assert data.count(old) == 1
        records(fqn, data_pkl=data.replace(old, new))(folder)

    return tamper


# ---- pickles, by hand ----


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


TUPLES = b")q\x00" + b"h\x00\x86q\x00" * 60
"""Each twice in the next: few bytes, 2**60 paths."""

NESTED = b")" + b"\x85" * 100_000
"""A tuple deeper than any stack."""


def lists(levels: int) -> bytes:
    """Return the same of lists."""
    code = b"]q\x00"
    for level in range(1, levels):
        code = b"]q%c(%bh%ce" % (level, code, level - 1)
    return code


def laughs() -> tuple[Any, ...]:
    value: tuple[Any, ...] = ()
    for _ in range(60):
        value = (value, value)
    return value


class Call:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


def of_bytes(dtype: torch.dtype, *size: int) -> torch.Tensor:
    numel = torch.Size(size).numel() * dtype.itemsize
    return torch.randint(0, 256, (numel,), dtype=torch.uint8).view(dtype).view(size)
