"""Checkpoints that try to run code: refused by name, and nothing is touched."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from support.tampering import (
    TUPLES,
    Call,
    Change,
    edit,
    expect_refusal,
    metadata_bytes,
    named,
    pickled,
    put,
    target,
    text,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


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
        r"test_code.Made' is refused",
    ),
    "NEWOBJ_EX": (
        lambda c: named(__name__, "Made") + text(str(c)) + b"\x85}\x92.",
        r"test_code.Made' is refused",
    ),
    "BUILD": (
        lambda c: named(__name__, "Rebuilt") + b")\x81" + text(str(c)) + b"b.",
        r"test_code.Rebuilt' is refused",
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
        "a persistent id, .* is refused|is damaged: too many values",
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
    "a name that is no string": (TUPLES + text("x") + b"\x93.", "STACK_GLOBAL requires str"),
    "a name without end": (b"c" + b"x" * 100_000 + b"\n.", "'x{200}' is refused"),
    "a long name": (b"c" + b"x" * 10_000 + b"\ny\n.", "'x{200}' is refused"),
    "a codec": (
        named("torch.serialization", "_get_layout") + b"C\x01x" + text("rot13") + b"\x86R.",
        "_get_layout' is refused|a Metadata was expected",
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
