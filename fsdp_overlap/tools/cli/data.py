"""Text as bytes: reading it, splitting it, cutting training sequences from it."""

import math
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsdp_overlap.tools.cli.output import BadInput

# More than a default run sees, and little enough to be read in a moment.
STDLIB_BYTES = 4 << 20
_MAX_BYTES_OF_A_PIECE = 64 << 10
_NOT_SOURCE = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Text:
    """Training and validation bytes, each a uint8 tensor `[n]`, and where they come from in
    words."""

    train: Tensor
    validation: Tensor
    origin: str


def load_text(data: Path | None, seq_len: int) -> Text:
    """Return the text at `data` (a file, or every file under a folder in order of name; None for
    the standard library's sources), split the same way each time. Raise BadInput if there is none
    or too little for `seq_len`."""
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        text = _read(_files(root, only_sources=True), STDLIB_BYTES)
        origin = "the standard library's sources"
    else:
        try:
            text = _read(_files(data) if data.is_dir() else [data])
        except OSError as error:
            raise BadInput(f"--data {data}: {error.strerror}") from None
        if not text:
            raise BadInput(f"--data {data} holds no text; give a file or a folder that does")
        origin = str(data)
    train, validation = split_text(text)
    # Each part must hold a sequence and the byte after it.
    if len(validation) <= seq_len:
        raise BadInput(
            f"--seq-len {seq_len} is too long for {len(text):,} bytes of text; a tenth of them, "
            "for validation, must hold a sequence and a byte"
        )
    return Text(train, validation, origin)


def split_text(text: bytes) -> tuple[Tensor, Tensor]:
    """Return the bytes for training and those for validation, each a uint8 tensor `[n]`. Every
    tenth piece is for validation; pieces are small, so that they sample all of the text."""
    rounds = math.ceil(len(text) / (10 * _MAX_BYTES_OF_A_PIECE))
    size = max(1, len(text) // max(1, 10 * rounds))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    train = b"".join(piece for i, piece in enumerate(pieces) if i % 10 != 9)
    validation = b"".join(pieces[9::10])
    return _as_tensor(train), _as_tensor(validation)


def sample_batch(
    text: Tensor, batch_size: int, seq_len: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return random sequences and their next bytes, both int64 `[batch_size, seq_len]`."""
    starts = torch.randint(len(text) - seq_len, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(seq_len + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Move `tensor` from the host's memory to `device` without making the host wait: an
    accelerator copies from pinned memory while the host goes on."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def unigram_entropy(text: Tensor) -> float:
    """Return the nats per byte of the best model that knows nothing but how often each byte occurs
    in `text`, uint8 `[n]`."""
    counts = torch.bincount(text.long(), minlength=256).double()
    p = counts[counts > 0] / len(text)
    return -(p * p.log()).sum().item()


def bits(nats: float) -> float:
    return nats / math.log(2)


def _files(folder: Path, only_sources: bool = False) -> Iterator[Path]:
    """Return the files under `folder` that are not hidden, in order of name; only Python sources if
    `only_sources`."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if not path.is_symlink() and not (only_sources and path.name in _NOT_SOURCE):
                yield from _files(path, only_sources)
        elif path.is_file() and (path.suffix == ".py" or not only_sources):
            yield path


def _read(files: Iterable[Path], limit: int | None = None) -> bytes:
    """Return the files joined, up to `limit` bytes. Files with a zero byte are not text and left
    out."""
    pieces: list[bytes] = []
    size = 0
    for path in files:
        piece = path.read_bytes()
        if b"\0" in piece:
            continue
        pieces.append(piece)
        size += len(piece)
        if limit is not None and size >= limit:
            break
    return b"".join(pieces)[:limit]


def _as_tensor(text: bytes) -> Tensor:
    if not text:  # frombuffer refuses an empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
