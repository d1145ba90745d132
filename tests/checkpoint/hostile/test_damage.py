"""Checkpoints that lie: refused by name, and nothing is touched."""

from __future__ import annotations

import codecs
import copy
import io
import os
import pickle
import shutil
import struct
import time
import warnings
import zipfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from fsdp_overlap.checkpoint import (
    SafeFileSystemWriter,
)
from support.tampering import (
    DATA,
    MAX_SECONDS,
    NESTED,
    SHA,
    TERABYTE,
    TUPLES,
    Call,
    Change,
    assert_same,
    edit,
    entry_of,
    expect_refusal,
    index_of,
    info_of,
    laughs,
    lists,
    little_memory,
    load,
    metadata_bytes,
    named,
    number,
    of_bytes,
    original,
    pickled,
    put,
    records,
    records_of,
    replaced,
    saved,
    target,
    text,
    write,
    zipped,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


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


def raw(code: bytes) -> Change:
    return lambda folder: metadata_bytes(folder, code)


def set_item(name: str, value: Callable[[], Any]) -> Change:
    return edit(lambda m: setattr(m, name, value()))


ENCODED = named("_codecs", "encode") + b"h\x00h\x01\x86R"
ARRAY = named("numpy._core.multiarray", "_reconstruct") + (
    named("numpy", "ndarray") + b"K\x00\x85h\x02\x87R"
)
MORE = "its values claim more bytes than it has"


def many(value: bytes, state: bytes) -> bytes:
    """A thousand times the same code, in a list. The memo has 64 KiB of text at 0, as bytes at 2,
    and numpy's dtype of bytes at 3."""
    dtype = named("numpy", "dtype") + text("u1") + b"\x89\x88\x87R"
    dtype += b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    start = text("x" * (1 << 16)) + b"q\x00" + text("latin1") + b"q\x01"
    return b"](" + start + ENCODED + b"q\x02" + dtype + b"q\x03" + (value + state) * 1000 + b"e."


DAMAGE: dict[str, tuple[Change, str]] = {
    # Files.
    "no metadata": (unlinked(".metadata"), r"\.metadata: No such file or directory; a complete"),
    "no data": (unlinked(DATA), rf"{DATA}: No such file or directory; a complete checkpoint has"),
    "no folder": (shutil.rmtree, "No such file or directory"),
    "empty metadata": (raw(b""), "metadata is damaged: the pickle ends early"),
    "empty data": (cut(DATA, 0), "has 0 bytes of the [0-9,]+ that were written"),
    "half of the metadata": (
        all_of(cut(".metadata", 0.5), unlinked(SHA)),
        r"metadata is damaged: .*pickle (exhausted|ends early)",
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
    "a dtype that cannot be copied": (
        with_dtype(torch.qint8),
        "torch cannot copy tensors of torch.qint8",
    ),
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
    "an empty value": (lambda folder: put(folder, "name", b""), "'name' is damaged: .*not a zip"),
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
    "a path of a thousand steps": (path_of_list(*["x"] * 1000), "a path of more than 100 steps"),
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
    "laughs in a set": (raw(b"\x8f(" + TUPLES + b"\x90."), "opcode EMPTY_SET, .* is refused"),
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
        "a Metadata was expected",
    ),
    # Pickles.
    **{
        f"{name}, in {place}": (put_there(code), match)
        for place, put_there in (("metadata", raw), ("a value", lambda code: pickled(code)("name")))
        for name, code, match in (
            ("a string of a terabyte", b"\x8e" + struct.pack("<Q", TERABYTE), "ends early"),
            ("a text of a terabyte", b"\x8d" + struct.pack("<Q", TERABYTE), "ends early"),
            ("a string of 2**64", b"\x8e" + b"\xff" * 8, "damaged: .*maximum size"),
            ("a frame of a terabyte", b"\x95" + struct.pack("<Q", TERABYTE), "ends early"),
            ("a number of a gigabyte", b"\x8b\xff\xff\xff\x3f.", "opcode LONG4, .* is refused"),
            (
                "an array of a terabyte",
                b"\x96" + struct.pack("<Q", TERABYTE),
                "opcode BYTEARRAY8, ",
            ),
            ("no end", b"N", "the pickle ends early"),
            ("an empty stack", b".", "takes a value that is not there"),
            ("a tuple of nothing", b"N\x86.", "takes a value that is not there"),
            ("values under a mark", b"N(\x85.", "takes a value that is not there"),
            ("a mark too many", b"(N.", "damaged: .* on the stack"),
            ("a mark too few", b"Nt.", "takes a value that is not there"),
            ("a value too many", b"NN.", "values are left on the stack"),
            ("a memo of nothing", b"h\x05.", "damaged: .*(index 5|not there)"),
            ("no opcode", b"\xff.", "opcode 0xff, .* is refused"),
            ("text that is none", b"X\x01\x00\x00\x00\xff.", "damaged: .*utf-8"),
            ("an unhashable key", b"}]Ns.", "damaged: TypeError: unhashable"),
            ("an odd dict", b"}(Nu.", "damaged: "),
            ("a number's items", b"K\x01Na.", "damaged: .*'int' object has no"),
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
    "fewer steps": (
        replaced(b"K\x04K\x01\x86", b"K\x04\x85", "weight"),
        "a tensor of 2 dimensions with 1 strides",
    ),
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
        "a str was expected, not a int",
    ),
    "a long torch.Size": (
        pickled(named("torch", "Size") + b"(" + b"K\x01" * 100 + b"t\x85R.")("name"),
        "no shape",
    ),
    "a set of laughs": (
        pickled(named("__builtin__", "set") + b"](" + TUPLES + b"e\x85R.")("name"),
        "a key is no string",
    ),
    "an array of a size": (
        saved(lambda: Call(bytearray, 1 << 40))("name"),
        "a bytearray made of a int",
    ),
    "the same text as bytes": (pickled(many(ENCODED, b""))("name"), MORE),
    "the same bytes in files": (
        pickled(many(named("_io", "BytesIO") + b")\x81", b"h\x02K\x00N\x87b"))("name"),
        MORE,
    ),
    "the same bytes as arrays of bytes": (
        pickled(many(named("__builtin__", "bytearray") + b"h\x02\x85R", b""))("name"),
        MORE,
    ),
    "the same bytes as arrays": (
        pickled(many(ARRAY, b"(K\x01" + number(1 << 16) + b"\x85h\x03\x89h\x02tb"))("name"),
        MORE,
    ),
    "the same items in sets": (
        pickled(
            (b"](" + named("__builtin__", "set") + b"q\x01](")
            + b"".join(b"M" + struct.pack("<H", n) for n in range(1000))
            + (b"e\x85q\x02R" + b"h\x01h\x02R" * 1000 + b"e.")
        )("name"),
        MORE,
    ),
    "an array of more": (
        pickled(many(ARRAY, b"(K\x01" + number(1 << 40) + b"\x85h\x03\x89h\x02tb"))("name"),
        "an array whose shape does not fit its bytes",
    ),
    "an array of objects": (
        saved(lambda: np.array([None], dtype=object))("name"),
        "dtype 'O8' of numpy is none of plain",
    ),
    "a number of objects": (
        saved(lambda: Call(np.float64(1).__reduce__()[0], np.dtype("O"), b"x" * 8))("name"),
        "dtype 'O8' of numpy is none of plain",
    ),
    "two numbers as one": (
        saved(lambda: Call(np.float64(1).__reduce__()[0], np.dtype("i4"), b"x" * 8))("name"),
        "damaged: too many values",
    ),
    "bytes by another codec": (
        saved(lambda: Call(codecs.encode, "x", "rot13"))("name"),
        "encoding",
    ),
    "a time of nothing": (
        saved(lambda: Call(datetime, None))("name"),
        "a datetime made of a NoneType",
    ),
    "a time that is none": (saved(lambda: Call(datetime, b"x" * 10))("name"), "damaged: "),
    "a path of numbers": (saved(lambda: Call(PurePosixPath, 3))("name"), "made of a int"),
    "a range of laughs": (saved(lambda: Call(range, laughs()))("name"), "made of a tuple"),
    "a slice of laughs": (saved(lambda: Call(slice, laughs()))("name"), "made of a tuple"),
    "a large range": (saved(range(1 << 100))("name"), "of more than 64 bits"),
    "a frozen set in a set": (saved({frozenset({1})})("name"), "a key is no string"),
}


@pytest.mark.sampled(2)
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
        lambda value: value == [{1, 2}] * 1001,
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_costs_nothing_is_loaded(name: str, folder: Path) -> None:
    tamper, right = HARMLESS[name]
    tamper(folder)
    state, start = target(), time.monotonic()
    with little_memory():
        load(folder, state)
    assert time.monotonic() - start < MAX_SECONDS
    fine = right(state.pop("name"))  # shown, laughs would take all memory
    assert fine
    expected = original()
    del expected["name"]
    assert_same(state, expected)
