"""Checkpoints that attack, lie or are damaged: refused by name, and nothing is touched."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import re
import resource
import shutil
import struct
import tempfile
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from zoo import Model, shard_layers

from fsdp_overlap import FsdpContext
from fsdp_overlap.checkpoint import (
    CheckpointError,
    SafeFileSystemReader,
    SafeFileSystemWriter,
    read_metadata,
)

TERABYTE = 1 << 40
MOST_MEMORY = 256 << 20  # bytes beside what is there before a load
MOST_SECONDS = 10.0  # some milliseconds, on an idle machine

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def original() -> dict[str, Any]:
    """Of every entry kind one, or two."""
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


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("genuine"))


@pytest.fixture
def space(genuine: Path) -> Path:
    """For one of hundreds of tests: as tmp_path, in less time."""
    return Path(tempfile.mkdtemp(dir=genuine.parent))


@pytest.fixture
def folder(space: Path, genuine: Path) -> Path:
    return Path(shutil.copytree(genuine, space / "checkpoint"))


@pytest.fixture
def canary(space: Path) -> Path:
    """What a payload makes once it runs."""
    return space / "canary"


# ---- what a refusal must leave alone ----


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Fails what asks for more than MOST_MEMORY, whether it uses it or not."""
    if not Path("/proc/self/statm").exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_MEMORY
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
    assert time.monotonic() - start < MOST_SECONDS
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
    """The entry with some of its records replaced, removed or added; ``_`` stands for a dot."""

    def tamper(folder: Path) -> None:
        found: dict[str, Any] = records_of(entry_of(folder, fqn))
        found |= {name.replace("_", "."): content for name, content in changed.items()}
        put(folder, fqn, zipped({k: v for k, v in found.items() if v is not None}))

    return tamper


def saved(value: Any) -> Callable[[str], Change]:
    """``value`` as torch.save writes it, in place of another."""

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
    """The pickle of an entry with ``new`` where ``old`` was."""

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
    """The same of lists."""
    code = b"]q\x00"
    for level in range(1, levels):
        code = b"]q%c(%bh%ce" % (level, code, level - 1)
    return code


def laughs() -> tuple[Any, ...]:
    value: tuple[Any, ...] = ()
    for _ in range(60):
        value = (value, value)
    return value


# ---- attacks ----


class Made:
    def __new__(cls, path: str, **_: Any) -> Made:
        Path(path).touch()
        return super().__new__(cls)


class Rebuilt:
    def __setstate__(self, path: str) -> None:
        Path(path).touch()


def touch(canary: Path) -> bytes:
    return text(f"touch {canary}")


SYSTEM = named("os", "system")
LIVE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "REDUCE": (lambda c: SYSTEM + touch(c) + b"\x85R.", "'os.system' is refused"),
    "STACK_GLOBAL": (
        lambda c: b"\x80\x04" + text("os") + text("system") + b"\x93" + touch(c) + b"\x85R.",
        "'os.system' is refused",
    ),
    "a dotted name": (
        lambda c: (
            b"\x80\x04"
            + text("torch.serialization")
            + text("os.system")
            + b"\x93"
            + touch(c)
            + b"\x85R."
        ),
        "'torch.serialization.os.system' is refused",
    ),
    "NEWOBJ": (
        lambda c: named(__name__, "Made") + text(str(c)) + b"\x85\x81.",
        r"unsafe_checkpoints.Made' is refused",
    ),
    "NEWOBJ_EX": (
        lambda c: named(__name__, "Made") + text(str(c)) + b"\x85}\x92.",
        r"unsafe_checkpoints.Made' is refused",
    ),
    "BUILD": (
        lambda c: named(__name__, "Rebuilt") + b")\x81" + text(str(c)) + b"b.",
        r"unsafe_checkpoints.Rebuilt' is refused",
    ),
    "INST": (lambda c: b"(" + touch(c) + b"ios\nsystem\n.", "opcode INST, .* is refused"),
    "OBJ": (lambda c: b"(" + SYSTEM + touch(c) + b"o.", "'os.system' is refused"),
    "eval": (
        lambda c: named("builtins", "eval") + text(f"open({str(c)!r}, 'w')") + b"\x85R.",
        "'builtins.eval' is refused",
    ),
    "eval, as Python 2 called it": (
        lambda c: named("__builtin__", "eval") + text(f"open({str(c)!r}, 'w')") + b"\x85R.",
        "'__builtin__.eval' is refused",
    ),
    "getattr": (
        lambda c: (
            named("builtins", "getattr")
            + (named("builtins", "__import__") + text("os") + b"\x85R")
            + (text("system") + b"\x86R")
            + (touch(c) + b"\x85R.")
        ),
        "'builtins.getattr' is refused",
    ),
    "torch.save": (
        lambda c: named("torch", "save") + b"K\x01" + text(str(c)) + b"\x86R.",
        "'torch.save' is refused",
    ),
    "torch.from_file": (
        lambda c: named("torch", "from_file") + text(str(c)) + b"\x88K\x08\x87R.",
        "'torch.from_file' is refused",
    ),
    "deep inside": (
        lambda c: b"](}" + text("a") + b"(K\x01" + SYSTEM + touch(c) + b"\x85Rtse.",
        "'os.system' is refused",
    ),
}
DORMANT: dict[str, tuple[bytes, str]] = {
    "EXT1": (b"\x82\x01.", "opcode EXT1, .* is refused"),
    "EXT2": (b"\x83\x01\x00.", "opcode EXT2, .* is refused"),
    "EXT4": (b"\x84\x01\x00\x00\x00.", "opcode EXT4, .* is refused"),
    "PERSID": (b"Pos.system\n.", "opcode PERSID, .* is refused"),
    "BINPERSID": (
        text("os.system") + b"Q.",
        "BINPERSID, .* is refused|is damaged: too many values",
    ),
    "torch.load": (named("torch", "load") + text("x") + b"\x85R.", "'torch.load' is refused"),
    "torch.hub": (
        named("torch.hub", "load") + text("x") + b"\x85R.",
        "'torch.hub.load' is refused",
    ),
    "torch.compile": (named("torch", "compile") + b"N\x85R.", "'torch.compile' is refused"),
    "a setting of torch": (
        named("torch", "set_default_dtype") + named("torch", "float64") + b"\x85R.",
        "'torch.set_default_dtype' is refused",
    ),
    "a function's attributes": (  # which BUILD sets, and every later load would see
        named("torch._utils", "_rebuild_parameter") + b"N}" + text("__code__") + b"Ns\x86b.",
        "_rebuild_parameter' is refused|a Record was expected",
    ),
    "a class's attributes": (
        named("torch", "Size") + b"}" + text("numel") + b"Nsb.",
        "a Record was expected",
    ),
    "a dtype that is called": (
        named("torch", "float32") + b")R.",
        "something that is no class is called",
    ),
    "a name that is no string": (TUPLES + text("x") + b"\x93.", "a name is no string"),
    "a name without end": (
        b"c" + b"x" * 100_000 + b"\n.",
        "no newline found when trying to read",
    ),
    "a long name": (b"c" + b"x" * 10_000 + b"\ny\n.", "'x{200}' is refused"),
    "a codec": (
        named("torch.serialization", "_get_layout") + b"C\x01x" + text("rot13") + b"\x86R.",
        "_get_layout' is refused|damaged: TypeError",
    ),
}
ATTACKS = {name: (code, match) for name, (code, match) in LIVE.items()} | {
    name: (lambda _, code=code: code, match) for name, (code, match) in DORMANT.items()
}
PLACES: dict[str, Callable[[bytes], Change]] = {
    "metadata": lambda code: lambda folder: metadata_bytes(folder, code),
    "tensor": lambda code: pickled(code)("weight"),
    "other value": lambda code: pickled(code)("name"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ATTACKS)
def test_code_is_refused_by_name(name: str, place: str, folder: Path, canary: Path) -> None:
    code, match = ATTACKS[name]
    PLACES[place](code(canary))(folder)
    expect_refusal(folder, match)
    assert not canary.exists()


@pytest.mark.parametrize("place", ["metadata", "other value"])
@pytest.mark.parametrize("name", LIVE)
def test_the_attacks_are_real(name: str, place: str, folder: Path, canary: Path) -> None:
    """torch's own reader runs them."""
    PLACES[place](LIVE[name][0](canary))(folder)
    with contextlib.suppress(Exception, CheckpointException):
        dcp.load(target(), checkpoint_id=folder, no_dist=True)
    assert canary.exists()


class Call:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


def test_code_in_the_old_format_is_refused(folder: Path, canary: Path) -> None:
    data = io.BytesIO()
    torch.save(Call(Path.touch, canary), data, _use_new_zipfile_serialization=False)
    put(folder, "name", data.getvalue())
    expect_refusal(folder, "'name' is damaged: .*not a zip file")
    assert not canary.exists()
    dcp.load(target(), checkpoint_id=folder, no_dist=True)
    assert canary.exists()


def test_code_inside_genuine_metadata_is_refused(folder: Path, canary: Path) -> None:
    edit(lambda m: setattr(m, "planner_data", Call(os.mkdir, str(canary))))(folder)
    expect_refusal(folder, "'posix.mkdir' is refused")
    assert not canary.exists()


# ---- lies and damage ----


def reshape(size: list[int], *chunks: tuple[list[int], list[int]]) -> Change:
    def change(metadata: Metadata) -> None:
        item = metadata.state_dict_metadata["weight"]
        item.size = torch.Size(size)
        item.chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in chunks or [([0] * len(size), size)]
        ]

    return edit(change)


def with_dtype(dtype: Any) -> Change:
    return edit(lambda m: setattr(m.state_dict_metadata["weight"].properties, "dtype", dtype))


def at(fqn: str, **changed: Any) -> Change:
    """The place of an entry."""
    return edit(lambda m: info_of(m, fqn).__dict__.update(changed))


def path_of_list(*path: Any) -> Change:
    def change(metadata: Metadata) -> None:
        fqn = ".".join(map(str, path))
        for kept in (metadata.state_dict_metadata, metadata.planner_data):
            kept[fqn] = kept.pop("name")
        metadata.planner_data[fqn] = path
        index = index_of(metadata, "name")
        metadata.storage_data[MetadataIndex(fqn)] = metadata.storage_data.pop(index)

    return edit(change)


def unlinked(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def cut(name: str, part: float) -> Change:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * part))


def instead(name: str, make: Callable[[Path], Any]) -> Change:
    def tamper(folder: Path) -> None:
        (folder / name).rename(folder.parent / "moved")
        make(folder / name)

    return tamper


def all_of(*changes: Change) -> Change:
    def tamper(folder: Path) -> None:
        for change in changes:
            change(folder)

    return tamper


def to_moved(path: Path) -> None:
    path.symlink_to(path.parent.parent / "moved")


def sparse_entry(fqn: str) -> Change:
    def tamper(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        info = info_of(metadata, fqn)
        with (folder / info.relative_path).open("ab") as file:
            start = file.tell()
            file.truncate(start + TERABYTE)
        at(fqn, offset=start, length=TERABYTE)(folder)

    return tamper


def sparse_metadata(folder: Path) -> None:
    metadata_bytes(folder, b"\x80\x04\x8e" + struct.pack("<Q", TERABYTE - 11))
    os.truncate(folder / ".metadata", TERABYTE)


def directory(at: int, new: bytes, record: str = "data/0", fqn: str = "weight") -> Change:
    """``new`` in an entry's zip directory, ``at`` bytes from where it tells of a record."""

    def tamper(folder: Path) -> None:
        data = bytearray(zipped(records_of(entry_of(folder, fqn))))
        start = data.rindex(f"archive/{record}".encode()) - 46
        assert data[start : start + 4] == b"PK\x01\x02"
        data[start + at : start + at + len(new)] = new
        put(folder, fqn, bytes(data))

    return tamper


def compressed(data: bytes) -> Change:
    def tamper(folder: Path) -> None:
        found = records_of(entry_of(folder, "name")) | {"data/0": data}
        put(folder, "name", zipped(found, zipfile.ZIP_DEFLATED))

    return tamper


def same_record_often(folder: Path) -> None:
    """A zip bomb without compression: all of its records are one."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in records_of(entry_of(folder, "name")).items():
            archive.writestr(f"archive/{name}", content)
        archive.writestr("archive/data/0", bytes(1 << 20))
        for number in range(5000):
            again = copy.copy(archive.infolist()[-1])
            again.filename = f"archive/data/{number + 1}"
            archive.filelist.append(again)
    put(folder, "name", data.getvalue())


def two_records_of_one_name(folder: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for content in (b"N.", b"K\x01."):
            archive.writestr("archive/data.pkl", content)
    put(folder, "name", data.getvalue())


def swap_entries(metadata: Metadata) -> None:
    """Each the other's, so that all bytes are genuine."""
    weight, bias = index_of(metadata, "weight"), index_of(metadata, "bias")
    data = metadata.storage_data
    data[weight], data[bias] = data[bias], data[weight]


def as_other_value(metadata: Metadata) -> None:
    """The tensor's entry becomes that of an other value, and is a tensor or not."""
    metadata.state_dict_metadata["weight"] = BytesStorageMetadata()
    info = metadata.storage_data.pop(index_of(metadata, "weight"))
    metadata.storage_data[MetadataIndex("weight")] = info


METADATA = b"\x80\x04" + named("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81"
DATA = "__0_0.distcp"
SHA = ".metadata.sha256"


def raw(code: bytes) -> Change:
    return lambda folder: metadata_bytes(folder, code)


def set_item(name: str, value: Callable[[], Any]) -> Change:
    return edit(lambda m: setattr(m, name, value()))


DAMAGE: dict[str, tuple[Change, str]] = {
    # Files.
    "no metadata": (unlinked(".metadata"), r"\.metadata: No such file or directory; a complete"),
    "no data": (unlinked(DATA), rf"{DATA}: No such file or directory; a complete checkpoint has"),
    "no folder": (shutil.rmtree, "No such file or directory"),
    "empty metadata": (raw(b""), "metadata is damaged: 1 bytes are claimed where 0 are left"),
    "empty data": (cut(DATA, 0), "has 0 bytes of the [0-9,]+ that were written"),
    "half of the metadata": (
        all_of(cut(".metadata", 0.5), unlinked(SHA)),
        r"metadata is damaged: .* (are left|not enough data)",
    ),
    "half of the data": (cut(DATA, 0.5), "has [0-9,]+ bytes of the [0-9,]+ that were written"),
    "half of a checksum": (cut(SHA, 0.5), r"its checksum is not that in \.metadata\.sha256"),
    "no checksum": (cut(SHA, 0), r"its checksum is not that in \.metadata\.sha256"),
    "a checksum of a terabyte": (
        lambda folder: os.truncate(folder / SHA, TERABYTE),
        r"\.metadata\.sha256 is no checksum",
    ),
    "text for metadata": (raw(b"not a pickle at all"), "metadata(: opcode| is damaged)"),
    "more after the metadata": (
        lambda folder: metadata_bytes(folder, (folder / ".metadata").read_bytes() + b"N."),
        "metadata is damaged: 2 bytes are left after the end",
    ),
    "a link to metadata": (instead(".metadata", to_moved), "metadata is not a regular file"),
    "a link to data": (instead(DATA, to_moved), f"{DATA} is not a regular file"),
    "a link to a checksum": (instead(SHA, to_moved), "sha256 is not a regular file"),
    "a link to nothing": (
        instead(SHA, lambda path: path.symlink_to("nothing")),
        "sha256 is not a regular file",
    ),
    "a pipe for metadata": (instead(".metadata", os.mkfifo), "metadata is not a regular file"),
    "a pipe for data": (instead(DATA, os.mkfifo), f"{DATA} is not a regular file"),
    "a pipe for a checksum": (instead(SHA, os.mkfifo), "sha256 is not a regular file"),
    "a folder for metadata": (instead(".metadata", Path.mkdir), "metadata is not a regular file"),
    "a folder for data": (instead(DATA, Path.mkdir), f"{DATA} is not a regular file"),
    # Paths.
    **{
        f"path {path!r}": (
            at("weight", relative_path=path),
            "file .* is not in the checkpoint's fo",
        )
        for path in (
            *("/etc/passwd", "../moved", "inside/x", "./" + DATA, DATA + "/", "..", ".", ""),
            *("\0", "..\\x", "C:\\x"),
        )
    },
    "a path of bytes": (at("weight", relative_path=b"x"), "a str was expected, not a bytes"),
    "a path that no file has": (
        at("weight", relative_path="x" * 5000),
        "file 'x{255}' is not in the ch",
    ),
    "a path that is no text": (at("weight", relative_path="\ud800"), "surrogates not allowed"),
    "transformed entries": (at("weight", transform_descriptors=["zstd"]), "are transformed"),
    # Sizes in the metadata.
    "a tensor of a terabyte": (
        reshape([TERABYTE // 16, 4]),
        "'weight' claims 1,099,.* bytes of an entry",
    ),
    "a chunk of a terabyte": (
        reshape([6, 4], ([0, 0], [TERABYTE, 4])),
        "reaches beyond the tensor of",
    ),
    "a chunk before the start": (reshape([6, 4], ([-1, 0], [6, 4])), "no number of elements"),
    "a negative size": (reshape([-6, -4]), "no number of elements"),
    "a size beyond 64 bits": (
        edit(lambda m: setattr(m.state_dict_metadata["weight"], "size", (1 << 70,))),
        "1,180,591,620,717,411,303,424 is no number of elements",
    ),
    "half of a tensor": (reshape([6, 4], ([0, 0], [3, 4])), "do not cover .* exactly once"),
    "overlapping chunks": (
        reshape([6, 4], ([0, 0], [4, 4]), ([2, 0], [2, 4])),
        "do not cover .* exactly once",
    ),
    "no chunks": (
        edit(lambda m: m.state_dict_metadata["weight"].chunks.clear()),
        "do not cover .* exactly once",
    ),
    "a chunk twice": (
        reshape([6, 4], ([0, 0], [6, 4]), ([0, 0], [6, 4])),
        "do not cover .* exactly once",
    ),
    "other dimensions": (reshape([6, 4], ([0], [24])), "chunk .* of a tensor of"),
    "a thousand dimensions": (reshape([1] * 1000), "no shape"),
    "cut along many dimensions": (
        reshape([2] * 40, ([0] * 40, [1] * 40)),
        "is cut along 40 dimensions",
    ),
    "numbers that are none": (
        edit(lambda m: setattr(m.state_dict_metadata["weight"], "size", (6.0, True))),
        "a float is no number of elements",
    ),
    "another dtype": (with_dtype(torch.int32), "it is not the tensor of torch.int32"),
    "a wider dtype": (with_dtype(torch.complex128), "it is not the tensor of torch.complex128"),
    "a dtype that cannot be copied": (with_dtype(torch.qint8), "torch.qint8 is refused"),
    "a dtype that cannot be converted": (
        all_of(
            with_dtype(torch.float4_e2m1fn_x2),
            saved(lambda: of_bytes(torch.float4_e2m1fn_x2, 6, 4))("weight"),
        ),
        "'weight' is of torch.float4_e2m1fn_x2 in this .* torch cannot copy into torch.float32",
    ),
    "no dtype": (with_dtype("torch.float32"), "a tensor without a dtype"),
    # Entries in the metadata.
    "an entry beyond the file": (at("weight", offset=TERABYTE), f"{DATA}' has [0-9,]+ bytes of"),
    "an entry before the file": (at("weight", offset=-1), "no number of elements"),
    "an entry of a terabyte": (
        at("weight", length=TERABYTE),
        "'weight', 96 bytes, has an entry of",
    ),
    "a sparse tensor": (sparse_entry("weight"), "'weight', 96 bytes, has an entry of 1,099,"),
    "a sparse value": (sparse_entry("name"), "claims 1,099,.* bytes, and from .* on is a hole"),
    "sparse metadata": (sparse_metadata, "claims 1,099,.* bytes, and from .* on is a hole"),
    "an empty entry": (at("weight", length=0), "'weight' claims 96 bytes of an entry of 0"),
    "a short entry": (at("weight", length=100), "'weight' is damaged: .*not a zip file"),
    "overlapping entries": (
        edit(lambda m: info_of(m, "weight").__dict__.update(info_of(m, "bias").__dict__)),
        "entries of .* overlap",
    ),
    "a missing entry": (
        edit(lambda m: m.storage_data.pop(index_of(m, "weight"))),
        r"'weight' has no entry at torch.Size\(\[0, 0\]\)",
    ),
    "an entry of nothing": (
        edit(lambda m: m.state_dict_metadata.pop("weight")),
        r"entries of unknown values: \['weight'\]|'weight' has the path of another key",
    ),
    "swapped entries": (edit(swap_entries), "it is not the tensor of"),
    "a tensor that became another value": (edit(as_other_value), "'weight' is no tensor in this"),
    # Paths in the state dict.
    "a list of a trillion": (path_of_list("list", TERABYTE), "lists of 1,099,"),
    "a negative index": (path_of_list("list", -1), "'list.-1' has a negative index"),
    "the path of another": (
        edit(lambda m: m.planner_data.update(weight=("bias",))),
        "'weight' has the path of another key",
    ),
    "a path of a thousand steps": (path_of_list(*["x"] * 1000), "a key has a path that is none"),
    "a path of laughs": (
        edit(lambda m: m.planner_data.update(weight=(laughs(),))),
        "a key has a path that is none",
    ),
    "a path that is none": (
        edit(lambda m: m.planner_data.update(weight="weight")),
        "a tuple was expected, not a str",
    ),
    # Structure of the metadata.
    "laughs for tensors": (
        set_item("state_dict_metadata", laughs),
        "a dict was expected, not a tu",
    ),
    "laughs for a size": (
        edit(lambda m: setattr(m.state_dict_metadata["weight"], "size", laughs())),
        "a tuple is no number of elements",
    ),
    "laughs for a file": (at("weight", relative_path=laughs()), "a str was expected, not a tuple"),
    "laughs for transforms": (at("weight", transform_descriptors=laughs()), "are transformed"),
    "laughs in an object that is a key": (
        raw(
            METADATA
            + (b"}(" + text("state_dict_metadata") + b"}" + text("storage_data") + b"}")
            + (text("planner_data") + b"}" + METADATA[2:] + TUPLES + b"b)s" + b"ub.")
        ),
        "a str was expected, not a Record",
    ),
    "laughs for a key": (raw(b"}" + TUPLES + b"Ns."), "a key is no string"),
    "laughs in a set": (raw(b"\x8f(" + TUPLES + b"\x90."), "a key is no string"),
    "a deep key": (raw(b"}" + NESTED + b"Ns."), "a key is no string"),
    "numbers of one hash": (
        raw(b"}(" + number(((1 << 61) - 1) << 20) + b"Nu."),
        "a key is no string",
    ),
    "a number for metadata": (raw(b"K\x01."), "a Metadata was expected"),
    "empty metadata object": (raw(METADATA + b"."), "'state_dict_metadata'"),
    "other state": (raw(METADATA + b"]b."), "a dict was expected, not a list"),
    "a dict for a tensor": (
        edit(lambda m: m.state_dict_metadata.update(weight={})),
        "a TensorStorageMetadata was expected",
    ),
    "the class for an object": (
        edit(lambda m: m.state_dict_metadata.update(weight=TensorStorageMetadata)),
        "a TensorStorageMetadata was expected",
    ),
    "a thousand arguments": (
        raw(named("pathlib", "PosixPath") + b"(" + b"N" * 1000 + b"tR."),
        "a call with 1,000 arguments",
    ),
    # Pickles.
    **{
        f"{name}, in {place}": (put_there(code), match)
        for place, put_there in (("metadata", raw), ("a value", lambda code: pickled(code)("name")))
        for name, code, match in (
            ("a string of a terabyte", b"\x8e" + struct.pack("<Q", TERABYTE), "1,099,.* claimed"),
            ("a text of a terabyte", b"\x8d" + struct.pack("<Q", TERABYTE), "1,099,.* claimed"),
            ("a string of 2**64", b"\x8e" + b"\xff" * 8, "damaged: .*sys.maxsize"),
            ("a frame of a terabyte", b"\x95" + struct.pack("<Q", TERABYTE), "1,099,.* claimed"),
            ("a number of a gigabyte", b"\x8b\xff\xff\xff\x3f.", "1,073,.* bytes are claimed"),
            ("an array of a terabyte", b"\x96" + struct.pack("<Q", TERABYTE), "1,099,.* claimed"),
            ("no end", b"N", "1 bytes are claimed where 0 are left"),
            ("an empty stack", b".", "a value is missing on the stack"),
            ("a tuple of nothing", b"N\x86.", "a value is missing on the stack"),
            ("values under a mark", b"N(\x85.", "a value is missing on the stack"),
            ("a mark too many", b"(N.", "damaged: .* on the stack"),
            ("a mark too few", b"Nt.", "a mark is missing"),
            ("a value too many", b"NN.", "values are left on the stack"),
            ("a memo of nothing", b"h\x05.", "damaged: KeyError: 5"),
            ("no opcode", b"\xff.", "damaged: .* opcode"),
            ("text that is none", b"X\x01\x00\x00\x00\xff.", "damaged: .*utf-8"),
            ("an unhashable key", b"}]Ns.", "damaged: TypeError: unhashable"),
            ("an odd dict", b"}(Nu.", "damaged: "),
            ("a number's items", b"K\x01Na.", "a list was expected"),
            ("POP", b"N0.", "opcode POP, .* is refused"),
            ("DUP", b"N2.", "opcode DUP, .* is refused"),
        )
    },
    # Zip files.
    "no zip file": (lambda folder: put(folder, "weight", bytes(2000)), "not a zip file"),
    "compressed": (compressed(bytes(100 << 20)), "its records claim more bytes than its"),
    "hardly compressed": (compressed(os.urandom(100)), "record 'archive/data.pkl' is compressed"),
    "a record of 4 GiB": (directory(20, b"\xf0\xff\xff\xff" * 2), "its records claim more bytes"),
    "a record of other sizes": (directory(24, b"\xf0\xff\xff\xff"), "claim more bytes|compressed"),
    "a record elsewhere": (directory(42, b"\xff\xff\xff\x7f"), "'archive/data/0' lies outside"),
    "a record at another's place": (directory(42, bytes(4)), "checksum of record 'archive/data/0'"),
    "another checksum": (directory(16, bytes(4)), "checksum of record 'archive/data/0' does not"),
    "of a later version": (directory(6, b"\xff\xff"), "damaged: NotImplementedError"),
    "a name that is no text": (
        all_of(directory(8, b"\x00\x08"), directory(46, b"\xff")),
        "damaged: .*(utf-8|storage that is not in the file)",
    ),
    "one record, often": (same_record_often, "its records claim more bytes"),
    "one name, twice": (two_records_of_one_name, "two records of one name"),
    "no pickle": (records("weight", data_pkl=None), "torch.save writes one data.pkl"),
    "no storage": (records("weight", **{"data/0": None}), "a storage that is not in the file"),
    "a short storage": (
        records("weight", **{"data/0": bytes(4)}),
        "a storage of 4 bytes claims 24 elements of torch.float32",
    ),
    "big-endian": (records("weight", byteorder=b"big"), "the byte order of another kind"),
    # Tensors.
    "a storage of a terabyte": (
        replaced(b"K\x18tq", number(TERABYTE) + b"tq", "weight"),
        "a storage of 96 bytes claims 1,099,",
    ),
    "a storage of fewer": (replaced(b"K\x18tq", b"K\x17tq", "weight"), "claims 23 elements"),
    "a storage of -24": (replaced(b"K\x18tq", number(-24) + b"tq", "weight"), "no number of ele"),
    "a storage of laughs": (pickled(TUPLES + b"Q.")("weight"), "damaged: not enough values"),
    "a storage with another name": (
        replaced(text("0"), text("../../0"), "weight"),
        "a storage that is not in the file",
    ),
    "a storage named by laughs": (replaced(text("0"), TUPLES, "weight"), "a storage that is none"),
    "another storage class": (
        replaced(named("torch", "FloatStorage"), named("torch", "Size"), "weight"),
        "a storage that is none",
    ),
    "rows beyond the storage": (
        replaced(b"K\x06K\x04\x86", number(TERABYTE) + b"K\x04\x86", "weight"),
        "does not fit its storage",
    ),
    "steps beyond the storage": (
        replaced(b"K\x04K\x01\x86", number(TERABYTE) + b"K\x01\x86", "weight"),
        "does not fit its storage",
    ),
    "steps backwards": (
        replaced(b"K\x04K\x01\x86", b"K\x04" + number(-1) + b"\x86", "weight"),
        "no number of elements",
    ),
    "fewer steps": (replaced(b"K\x04K\x01\x86", b"K\x04\x85", "weight"), "a tensor that is none"),
    "another tensor": (saved(lambda: torch.zeros(4, 6))("weight"), r"the shape \(4, 6\), not"),
    "no tensor": (saved("text")("weight"), "it is not the tensor of torch.float32"),
    "a sparse tensor's class": (
        saved(lambda: torch.eye(64).to_sparse())("weight"),
        "'torch._utils._rebuild_sparse_tensor' is refused",
    ),
    "a lazy conjugate": (
        saved(lambda: torch.full((6, 4), 1j).conj())("weight"),
        "conjugates or negates is refused",
    ),
    # Other values.
    "a list in itself": (pickled(b"]q\x00h\x00a.")("name"), "nested deeper than 100"),
    "a deep list": (pickled(b"]" * 5000 + b"a" * 4999 + b".")("name"), "nested deeper than 100"),
    "a deep tuple": (pickled(NESTED + b".")("name"), "nested deeper than 100"),
    "a function": (pickled(named("torch", "Size") + b".")("name"), "no value of a checkpoint"),
    "no device": (
        pickled(named("torch", "device") + text("os") + b"\x85R.")("name"),
        "damaged: RuntimeError",
    ),
    "a device by number": (
        pickled(named("torch", "device") + b"K\x01\x85R.")("name"),
        "a device that is none",
    ),
    "a long torch.Size": (
        pickled(named("torch", "Size") + b"(" + b"K\x01" * 100 + b"t\x85R.")("name"),
        "no shape",
    ),
    "a set of laughs": (
        pickled(named("__builtin__", "set") + b"](" + TUPLES + b"e\x85R.")("name"),
        "a key is no string",
    ),
    "a frozenset": (saved(frozenset())("name"), "'__builtin__.frozenset' is refused"),
    "an array": (saved(lambda: Call(bytearray, 3))("name"), "'__builtin__.bytearray' is refused"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_lies_and_damage_are_refused(name: str, folder: Path) -> None:
    tamper, match = DAMAGE[name]
    tamper(folder)
    expect_refusal(folder, match)


def test_a_directory_as_large_as_a_tensor_is_refused(tmp_path: Path) -> None:
    """Of a tensor that takes so much anyway; a hole in its file does not."""
    size, folder = 64 << 20, tmp_path / "checkpoint"
    state = {"weight": torch.ones(size, dtype=torch.uint8)}
    dcp.save(state, storage_writer=SafeFileSystemWriter(folder), no_dist=True)
    os.truncate(folder / DATA, 0)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, size, 0, 0)
    with (folder / DATA).open("r+b") as file:
        file.seek(size + 1000)
        file.write(end)
    at("weight", offset=0, length=size + 1000 + len(end))(folder)
    expect_refusal(folder, "its directory claims 67,108,864 bytes", state)


def test_many_chunks_are_checked_in_no_time(tmp_path: Path) -> None:
    """All of them side by side along every dimension but one."""
    folder, rows = write(tmp_path / "checkpoint"), 10_000
    chunks = [([row, 0], [1, 1 << 20]) for row in range(rows)]
    chunks[-1] = chunks[0]
    reshape([rows, 1 << 20], *chunks)(folder)
    expect_refusal(folder, "do not cover .* exactly once")


def views_of_one_storage() -> list[torch.Tensor]:
    base = torch.arange(2 << 20)
    return [base[i:] for i in range(1000)]


def same_views(value: Any) -> bool:
    places = {view.untyped_storage().data_ptr() for view in value}
    return len(places) == 1 and [int(view[0]) for view in value] == list(range(1000))


def same_lists(value: Any) -> bool:
    for _ in range(59):
        first, value = value
        if first is not value:
            return False
    return bool(value == [])


HARMLESS: dict[str, tuple[Change, Callable[[Any], bool]]] = {
    "an empty tensor of many": (
        all_of(
            saved(lambda: torch.zeros(0, 5, 7))("name"),
            replaced(b"K\x00K\x05K\x07\x87", b"K\x00" + number(1 << 62) * 2 + b"\x87", "name"),
        ),
        lambda value: value.shape == (0, 1 << 62, 1 << 62),
    ),
    "a record said to be encrypted": (
        directory(8, b"\x01\x00", "data.pkl", "name"),
        lambda value: value == "a run",
    ),
    "a memo of four billion": (
        pickled(text("here") + b"r\xff\xff\xff\xff.")("name"),
        lambda value: value == "here",
    ),
    "laughs": (pickled(lists(60) + b".")("name"), same_lists),
    "a thousand views of one storage": (saved(views_of_one_storage)("name"), same_views),
    "one list in a thousand sets": (
        pickled(
            (b"](" + named("__builtin__", "set") + b"q\x01](K\x01K\x02e\x85q\x02R")
            + (b"h\x01h\x02R" * 1000 + b"e.")
        )("name"),
        lambda value: value == [{1, 2}] + [set()] * 1000,
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_costs_nothing_is_loaded(name: str, folder: Path) -> None:
    tamper, right = HARMLESS[name]
    tamper(folder)
    state, start = target(), time.monotonic()
    with little_memory():
        load(folder, state)
    assert time.monotonic() - start < MOST_SECONDS
    fine = right(state.pop("name"))  # shown, laughs would take all memory
    assert fine
    expected = original()
    del expected["name"]
    assert_same(state, expected)


# ---- any damage ----


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, int | None, float]:
    """A file, and a bit to flip or none, and where, in parts of the file."""
    name = draw(st.sampled_from([".metadata", SHA, DATA]))
    bit = draw(st.none() | st.integers(0, 7))
    return name, bit, draw(st.floats(0, 1, exclude_max=True))


def do(damage: tuple[str, int | None, float], folder: Path) -> None:
    name, bit, part = damage
    data = bytearray((folder / name).read_bytes())
    position = int(part * len(data))
    if bit is None:
        del data[position:]
    else:
        data[position] ^= 1 << bit
    (folder / name).write_bytes(data)


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(damages())
def test_whatever_is_flipped_or_cut_is_refused_or_does_not_matter(
    genuine: Path, tmp_path: Path, damage: tuple[str, int | None, float]
) -> None:
    folder = Path(shutil.copytree(genuine, tmp_path / "checkpoint", dirs_exist_ok=True))
    do(damage, folder)
    state = target()
    try:
        load(folder, state)
    except CheckpointException as error:
        check_failures(error)
        assert_same(state, target())
    else:
        assert_same(state, original())


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(damages().filter(lambda damage: damage[0] != SHA), min_size=1, max_size=3))
def test_without_a_checksum_the_metadata_may_lie_but_not_surprise(
    genuine: Path, tmp_path: Path, several: list[tuple[str, int | None, float]]
) -> None:
    """What is refused is refused as planned, and nothing is touched: where other names, numbers or
    shapes make sense as well, it is torch's planner that refuses."""
    folder = Path(shutil.copytree(genuine, tmp_path / "checkpoint", dirs_exist_ok=True))
    (folder / SHA).unlink()
    for damage in several:
        with contextlib.suppress(IndexError):  # nothing is left of that file
            do(damage, folder)
    state = target()
    try:
        load(folder, state)
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            assert type(failure) is CheckpointError or re.search(
                "Missing key in checkpoint|Size mismatch between saved|Invalid checkpoint metadata",
                str(failure),
            ), repr(failure)
        assert_same(state, target())


# ---- ranks ----


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Model()
    shard_layers(model, FsdpContext())
    return model


def save_model(folder: str) -> None:
    state = {"model": build(1).state_dict()}
    dcp.save(state, storage_writer=SafeFileSystemWriter(folder))


def refuse_on_all_ranks(folder: str) -> list[str]:
    model = build(2)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"model": model.state_dict()}, storage_reader=SafeFileSystemReader(folder))
    after = [parameter.to_local() for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
    failures = caught.value.failures
    assert {type(error) for error, _ in failures.values()} == {CheckpointError}
    return [f"{rank}: {error}" for rank, (error, _) in failures.items()]


def test_one_damaged_file_is_refused_by_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run_ranks(save_model, 2, str(folder))
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    header = data.index(b"archive/data/0") - 30
    name, padding = struct.unpack("<2H", data[header + 26 : header + 30])
    data[header + 30 + name + padding] ^= 1
    file.write_bytes(data)
    first, second = run_ranks(refuse_on_all_ranks, 2, str(folder))
    assert first == second
    assert len(first) == 1
    assert re.match(r"1: .*/__1_0.distcp, 'model\..*' is damaged: the checksum of rec", first[0])


def test_one_missing_file_is_refused_by_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run_ranks(save_model, 2, str(folder))
    (folder / "__1_0.distcp").unlink()
    for failures in run_ranks(refuse_on_all_ranks, 2, str(folder)):
        assert [re.sub("No such.*", "", line) for line in failures] == [
            f"{rank}: {folder}/.metadata: {folder}/__1_0.distcp: " for rank in range(2)
        ]


# ---- genuine checkpoints ----

DTYPES = """uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
complex32 complex64 complex128 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz
float8_e8m0fnu float4_e2m1fn_x2""".split()


def of_bytes(dtype: torch.dtype, *size: int) -> torch.Tensor:
    numel = torch.Size(size).numel() * dtype.itemsize
    return torch.randint(0, 256, (numel,), dtype=torch.uint8).view(dtype).view(size)


def everything() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(8, 6)
    shared = torch.randn(5)
    return {
        "dtypes": {name: of_bytes(getattr(torch, name), 3, 5) for name in DTYPES},
        "bool": torch.rand(9) > 0.5,
        "0-dim": torch.tensor(1.5),
        "0-dim view": base[3, 4],
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 3, dtype=torch.int64),
        "empty columns": torch.empty(3, 0),
        "transposed": base.t(),
        "every other": base[::2, 1::3],
        "expanded": shared.expand(4, 5),
        "a row of a transposed": base.t()[:1],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "shared": [shared, shared[2:], shared.view(5, 1)],
        "parameter": nn.Parameter(torch.randn(3)),
        "empty before": [[], torch.ones(2)],
        "numbers": [0, 1, -1, 255, 256, -(1 << 31), 1 << 31, 1 << 100, -(1 << 100)],
        "number": -12,
        "large": 1 << 1000,
        "floats": [0.0, -0.0, 1.5, float("inf"), 1e-300],
        "complex": 1 - 2j,
        "text": "a text, \u00e4\U0001f600\n",
        "none": None,
        "bools": [True, False],
        "nested": [1, (2.0, ["x", (None, ())], {3})],
        "dicts": {"a": {"b": [{"c": 1}, {"d": []}]}, "5": {"e": 2}},
        "ordered": OrderedDict(z=1, a=(1, OrderedDict(y=2))),
        "tuple with dicts": ({"a": [1], 2: None, (1, "x"): 3, 1.5: 4}, {}),
        "tuple with tensors": (torch.ones(3), shared, base.t()),
        "sets": {1, "x", None, (2, 3)},
        "empty set": (set(),),
        "size": torch.Size([3, 4]),
        "sizes": (torch.Size([]),),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "devices": (torch.device("cuda", 1), torch.device("meta")),
    }


def blank(value: Any) -> Any:
    """Of the same structure as DCP sees it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.nbytes, dtype=torch.uint8).view(value.dtype).view(value.shape)
    if isinstance(value, dict):
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, list) and any(isinstance(i, (dict, list, torch.Tensor)) for i in value):
        return [blank(item) for item in value]
    return None


def load_both(folder: Path, make: Callable[[], dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
    loaded = []
    for reader in (dcp.FileSystemReader(folder), SafeFileSystemReader(folder)):
        state = make()
        planner = DefaultLoadPlanner(**kwargs)
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())
        loaded.append(state)
    assert_same(*loaded)
    return loaded[1]


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, SafeFileSystemWriter])
def test_genuine_checkpoints_load_as_by_torch(writer: Any, tmp_path: Path) -> None:
    state = everything()
    dcp.save(state, storage_writer=writer(tmp_path), no_dist=True)
    loaded = load_both(tmp_path, lambda: blank(everything()))
    del state["parameter"], loaded["parameter"]
    assert_same(loaded, state)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_files_loads(threads: int, tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=threads > 1, thread_count=threads)
    dcp.save(everything(), storage_writer=writer, no_dist=True)
    load_both(tmp_path, lambda: blank(everything()))


def test_state_dicts_that_are_not_flattened_load_as_by_torch(tmp_path: Path) -> None:
    """Each of their dicts is one value, with tensors inside."""
    state = everything()
    del state["parameter"], state["shared"][1:]
    dcp.save(
        {"all": state, "plain": torch.ones(3)},
        storage_writer=dcp.FileSystemWriter(tmp_path),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    loaded = load_both(
        tmp_path,
        lambda: {"all": None, "plain": torch.zeros(3)},
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    assert_same(loaded["all"], state)
    first, second = loaded["all"]["shared"][0], loaded["all"]["tuple with tensors"][1]
    assert first.data_ptr() == second.data_ptr()


def test_a_state_dict_made_from_the_checkpoint_is_that_of_torch(tmp_path: Path) -> None:
    dcp.save(everything(), storage_writer=SafeFileSystemWriter(tmp_path), no_dist=True)
    loaded = [
        _load_state_dict_from_keys(storage_reader=reader)
        for reader in (dcp.FileSystemReader(tmp_path), SafeFileSystemReader(tmp_path))
    ]
    assert_same(*loaded)
    assert loaded[0]["empty before"][1].tolist() == [1, 1]


def test_metadata_is_that_of_torch(genuine: Path) -> None:
    ours, theirs = read_metadata(genuine), dcp.FileSystemReader(genuine).read_metadata()
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, item in ours.state_dict_metadata.items():
        other = theirs.state_dict_metadata[name]
        assert type(item) is type(other)
        if isinstance(item, TensorStorageMetadata):
            assert item.properties.dtype == other.properties.dtype
            assert (item.size, item.chunks) == (other.size, other.chunks)


def sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = [torch.arange(35.0).view(7, 5), torch.arange(12).view(3, 4), torch.ones(1, 2)]
    state: dict[str, Any] = {
        f"{number}, {placement}": distribute_tensor(value, mesh, [placement])
        for number, value in enumerate(values)
        for placement in (Shard(0), Shard(1), Replicate())
    }
    torch.manual_seed(0)
    fsdp2 = Model()
    for layer in fsdp2.layers:
        torch_fully_shard(layer)
    torch_fully_shard(fsdp2)
    return state | {"fsdp2": fsdp2.state_dict(), "plain": torch.arange(3), "rank": 3}


def blank_sharded() -> dict[str, Any]:
    state = sharded()
    for value in [*state.values(), *state["fsdp2"].values()]:
        if isinstance(value, torch.Tensor):
            value.zero_()
    return state | {"rank": None}


def load_sharded(folder: str) -> None:
    dcp.save(sharded(), checkpoint_id=folder)
    assert_same(load_both(Path(folder), blank_sharded), sharded())


def test_sharded_tensors_of_torch_load_as_by_torch(tmp_path: Path) -> None:
    run_ranks(load_sharded, 2, str(tmp_path))
