"""The tutorial's programs and commands run, and print what its page says they print."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_overlap.engine.unit import unit_of
from support.pages import ROOT
from support.program import Program
from support.ranks import run_ranks

DOCS = ROOT / "docs"
PAGE = DOCS / "tutorial.md"
SECONDS = 60.0  # for one command
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def blocks() -> Iterator[tuple[str, str]]:
    """Language and text of each block on the page, in order."""
    text = PAGE.read_text()
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert 2 * len(found) == text.count("```")
    yield from found


def write(folder: Path, code: str) -> None:
    """Adds a block to the file that its first line names."""
    name, _, rest = code.partition("\n")
    with (folder / name.removeprefix("# ")).open("a") as file:
        file.write(rest)


def run(folder: Path, command: str) -> str:
    """What ``command`` prints, but for what it sends to a file."""
    words = shlex.split(command)
    if words[0] == "paste":
        return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout
    file = words.pop() if words[-2] in (">", "tee") else None
    is_shown = file is None or words[-1] == "tee"
    words = words[: next((k for k, word in enumerate(words) if word in "|>"), len(words))]
    name, *arguments = words
    if name == "torchrun":
        script = next(k for k, word in enumerate(arguments) if word.endswith(".py"))
        options, arguments = arguments[:script], arguments[script:]
        process = Program(folder, arguments, options, is_script=True)
    else:
        assert name in ("python", "fsdp-overlap")
        process = Program(folder, arguments, is_script=name == "python")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, (command, err)
    if file is not None:
        (folder / file).write_text(out)
    return out if is_shown else ""


def run_page(folder: Path) -> Iterator[tuple[str, str]]:
    """The page's commands, and what each printed."""
    (folder / "docs").symlink_to(DOCS)
    for language, text in blocks():
        if language == "python":
            write(folder, text)
        elif language == "bash":
            for command in text.splitlines():
                name, *arguments = command.split()
                if name == "mkdir":
                    (folder / arguments[0]).mkdir()
                elif name == "cd":
                    folder = folder / arguments[0]
                else:
                    yield command, run(folder, command)
        else:
            assert language == "text"


def paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]


def assert_same(printed: str, shown: str) -> None:
    """Words are equal. So are numbers, to rounding in the last digit of a loss."""
    lines = [[line.rstrip() for line in text.splitlines()] for text in (printed, shown)]
    words = [[NUMBER.sub("#", line) for line in each] for each in lines]
    assert words[0] == words[1]
    found = [[float(n) for n in NUMBER.findall("\n".join(each))] for each in lines]
    assert found[0] == pytest.approx(found[1], rel=0, abs=2e-4)


def counts_of(table: str) -> list[tuple[str, str]]:
    """The rows of the report's table without what depends on the machine: how many collectives of
    each kind there are in a step."""
    head, *rows = table.splitlines()
    assert head.split() == (
        "in a step of under compute MB hidden in flight ms exposed ms GB/s".split()
    )
    found = [re.search(r"^(.+?)  +rank \d .* of (\d+) ", row) for row in rows]
    return [(row[1], row[2]) for row in found if row]


@pytest.mark.slow
def test_the_page_prints_what_it_says(tmp_path: Path) -> None:
    shown = [text.strip("\n") for language, text in blocks() if language == "text"]
    for command, out in run_page(tmp_path):
        if command.startswith("fsdp-overlap report"):
            [table] = [part for part in paragraphs(out) if part.startswith("in a step")]
            counts = counts_of(table)
            assert counts == counts_of(shown.pop(0))
            assert [int(count) for _, count in counts[:3]] == [5, 3, 5]
            continue
        for part in paragraphs(out):
            assert_same(part, shown.pop(0))
    assert not shown
    assert (tmp_path / "first" / "overlap.html").exists()
    assert (tmp_path / "first" / "timeline.png").exists()


# ---- the picture ----


def held_by_this_rank(folder: str) -> dict[str, list[str]]:
    """What ``HELD`` says of the sharded model, looked up between steps and in the middle of block
    2, in a step like the one before."""
    namespace = runpy.run_path(f"{folder}/model.py")
    model, batch = namespace["Model"](), namespace["batch"]
    shard = _shard_of(folder)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    units = [unit_of(block) for block in model.blocks]
    seen: dict[str, list[str]] = {"parameters": [], "gradients": []}

    def look() -> None:
        for kind in seen:
            seen[kind].append("".join(_held(unit, kind) for unit in units))

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            look()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            look()
            return grad

    model.blocks[1].norm.register_forward_hook(lambda module, args, out: Look.apply(out))
    for _ in range(3):
        for moments in seen.values():
            moments.clear()
        look()
        x, y = batch(dist.get_rank())
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert held / whole == pytest.approx(0.5, abs=0.01)
    return seen


def _shard_of(folder: str) -> Any:
    """The page's ``shard``, without what starts ranks."""
    source = Path(folder, "sharded.py").read_text()
    namespace: dict[str, Any] = {}
    exec("from fsdp_overlap import FsdpContext, fully_shard", namespace)
    exec(source[source.index("def shard(") : source.index("torch.manual_seed")], namespace)
    return namespace["shard"]


def _held(unit: Any, kind: str) -> str:
    [param_group] = unit.param_groups
    if kind == "parameters":
        return "W" if param_group.full.allocated else "h"
    [gradients] = unit.gradients or [None]
    if gradients is None:
        return "-"
    has_some = any(parameter.grad is not None for parameter in param_group.parameters)
    return "W" if gradients.reduce_scatter_input.allocated or has_some else "-"


def test_the_picture_shows_what_ranks_hold(tmp_path: Path) -> None:
    """The picture's halves of gradients are left out: a rank has one from when it has arrived, but
    it is given to the parameters at the end of backward. Block 3's may have arrived already, and
    block 4's may be under way still where the other rank is late."""
    for language, text in blocks():
        if language == "python":
            write(tmp_path, text)
    drawn: Mapping[str, Sequence[str]]
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw" / "tutorial.py"))["HELD"]["sharded"]
    *before, in_backward = [part.replace("h", "-") for part in drawn["gradients"]]
    assert in_backward == "-WW-"
    for seen in run_ranks(held_by_this_rank, 2, str(tmp_path)):
        assert seen["parameters"] == list(drawn["parameters"])
        assert seen["gradients"][:-1] == before
        assert seen["gradients"][-1] in (in_backward, "-W--", "-WWW")
