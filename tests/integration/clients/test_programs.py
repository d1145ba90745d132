"""The manifest of public programs that are compared, and the command that compares one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest

import programs

MANIFEST = programs.load(Path(programs.__file__).with_name("programs.toml"))


@pytest.mark.parametrize("name", MANIFEST)
def test_each_program_is_pinned(name: str) -> None:
    program = MANIFEST[name]
    assert program.command
    assert program.license
    assert program.uses
    if program.repository:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", program.repository)
        assert re.fullmatch(r"[0-9a-f]{40}", program.commit)
        assert program.paths
    else:
        assert program.command.startswith("-m ")


@pytest.mark.parametrize("name", ["my-muon-fsdp2", "trl-sft"])
def test_a_program_is_compared_as_its_manifest_says(name: str, tmp_path: Path) -> None:
    program = MANIFEST[name]
    ran = subprocess.CompletedProcess([], 0, "ours: Equal to the bit")
    with patch.object(subprocess, "run", return_value=ran) as run:
        assert programs.compare(program, tmp_path, {}, "fsdp-overlap compare")
    command = run.call_args.args[0]
    assert command[:4] == ["fsdp-overlap", "compare", "--ranks", "2"]
    assert ("--emulate-gpus" in command) == (program.device == "cuda")
    script = command[command.index("--") + 1 :]
    if name == "trl-sft":
        assert command[command.index("--") - 1] == "-m"
        assert script[0] == "trl.scripts.sft"
    else:
        assert script == ["mac_gloo_validation.py"]
