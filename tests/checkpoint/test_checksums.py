"""Checksums of checkpoints: by either library, in every path that reads or writes."""

from __future__ import annotations

import io
import runpy
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import get_crc32_options

from fsdp_overlap.checkpoint import SafeFileSystemReader, SafeFileSystemWriter, checksums, reader
from fsdp_overlap.checkpoint.checksums import BLOCK_BYTES, ChecksumStream, streams_work
from support.tampering import check_failures

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

needs_streams = pytest.mark.skipif(
    not streams_work(), reason="torch's option would reach into other threads"
)
LIBRARIES = ["isal.isal_zlib", "zlib"]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "crc32", pytest.importorskip(request.param).crc32)


def test_isal_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksums.crc32 is pytest.importorskip("isal.isal_zlib").crc32
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert runpy.run_path(checksums.__file__)["crc32"] is zlib.crc32


# ---- reading ----


def state() -> dict[str, object]:
    """A tensor of several parts and a bit, one that is read as strides, and another value."""
    torch.manual_seed(0)
    return {
        "long": torch.randint(0, 256, (3 * BLOCK_BYTES + 5,), dtype=torch.uint8),
        "strided": torch.rand(64, 64).t(),
        "value": (torch.rand(100),),
    }


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("where", ["first part", "middle", "last byte", "strided", "value"])
def test_a_damaged_byte_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, where: str
) -> None:
    monkeypatch.setattr(reader, "_threads", lambda: threads)
    saved = state()
    dcp.save(saved, storage_writer=SafeFileSystemWriter(tmp_path), no_dist=True)
    long, strided, value = saved["long"], saved["strided"], saved["value"][0]
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    sample = {"strided": strided.t().contiguous(), "value": value}.get(where, long)
    position = data.index(bytes(sample.view(-1).view(torch.uint8)[:64].tolist()))
    data[position + {"middle": 2 * BLOCK_BYTES, "last byte": long.numel() - 1}.get(where, 0)] ^= 1
    (tmp_path / "__0_0.distcp").write_bytes(data)

    target = {"long": torch.zeros_like(long), "strided": torch.zeros(64, 64), "value": None}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=SafeFileSystemReader(tmp_path), no_dist=True)
    check_failures(caught.value, "checksum of record 'archive/data/0' does not match")
    assert not target["long"].any()
    assert not target["strided"].any()


# ---- writing ----


@pytest.mark.skipif(torch.__version__ < "2.13", reason="its option reaches into other threads")
def test_this_torch_writes_zips_as_expected() -> None:
    assert streams_work()


@needs_streams
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3 * BLOCK_BYTES),
        torch.empty(0),
        [torch.ones(()), torch.empty(0, 3), torch.rand(7).bfloat16(), {"a": 1}],
        torch.tensor([*b"PK\x07\x08", *[0] * 8, *[9] * 8], dtype=torch.uint8),
    ],
    ids=["long", "empty", "several", "like a descriptor"],
)
def test_what_torch_saves_through_a_stream_is_what_it_saves_itself(value: object) -> None:
    found, expected = io.BytesIO(), io.BytesIO()
    stream = ChecksumStream(found)
    torch.save(value, stream)
    data = found.getvalue()
    stream.close()
    torch.save(value, expected)
    with zipfile.ZipFile(io.BytesIO(data)) as ours, zipfile.ZipFile(expected) as theirs:
        assert ours.testzip() is None
        assert [info.header_offset for info in ours.infolist()] == [
            info.header_offset for info in theirs.infolist()
        ]
        for info in theirs.infolist():
            if not info.filename.endswith("serialization_id"):  # made of torch's own checksums
                assert ours.getinfo(info.filename).CRC == info.CRC
                assert ours.read(info.filename) == theirs.read(info.filename)
    assert descriptors(data) == [info.CRC for info in zipfile.ZipFile(io.BytesIO(data)).infolist()]


def descriptors(data: bytes) -> list[int]:
    """The checksums that stand behind the records of a zip."""
    found = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            names = data[info.header_offset + 26 : info.header_offset + 30]
            behind = info.header_offset + 30 + info.file_size
            behind += int.from_bytes(names[:2], "little") + int.from_bytes(names[2:], "little")
            stands = info.flag_bits & 8
            found.append(int.from_bytes(data[behind + 4 : behind + 8], "little") if stands else 0)
    return found


def test_torchs_own_checksums_are_back_after_a_save(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=SafeFileSystemWriter(tmp_path), no_dist=True)
    assert get_crc32_options()


@needs_streams
def test_and_after_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "crc32", lambda part, start: 1 // 0)
    tensors = {"long": state()["long"]}  # values are tried out before anything is written
    with pytest.raises(CheckpointException, match=r"torch\.save"):
        dcp.save(tensors, storage_writer=SafeFileSystemWriter(tmp_path), no_dist=True)
    assert get_crc32_options()


def test_what_is_no_zip_of_torch_is_refused() -> None:
    stream = ChecksumStream(io.BytesIO())
    with pytest.raises(ValueError, match="what follows in a zip"):
        stream.write(b"no zip")
    stream.close()


@needs_streams
def test_tensors_are_saved_with_checksums_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    monkeypatch.setattr(
        checksums, "crc32", lambda part, start=0: sizes.append(len(part)) or zlib.crc32(part, start)
    )
    for threads in (1, 2):
        sizes.clear()
        path = tmp_path / str(threads)
        writer = SafeFileSystemWriter(path, thread_count=threads)
        dcp.save(state(), storage_writer=writer, no_dist=True)
        assert sizes.count(BLOCK_BYTES) == 3
        loaded = {"long": torch.zeros_like(state()["long"])}
        dcp.load(loaded, storage_reader=SafeFileSystemReader(path), no_dist=True)
        assert torch.equal(loaded["long"], state()["long"])
