"""``docs/fsdp2.md`` has a row for every public feature of the FSDP2 that is installed, and its
example runs."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _fully_shard as module_of_fsdp2

import fsdp_overlap
from support.pages import TESTS, named_tests_in, rows_of
from support.ranks import run_ranks
from support.zoo import Model

PAGE = (TESTS.parent / "docs" / "fsdp2.md").read_text()
ROWS = rows_of(PAGE)
FEATURES = " ".join(row[0] for row in ROWS)

VERBS = [name for name in vars(fsdp2.FSDPModule) if not name.startswith("_")]
ARGUMENTS = [name for name in inspect.signature(fsdp2.fully_shard).parameters if name != "module"]
EXPORTED = [name for name in module_of_fsdp2.__all__ if hasattr(fsdp2, name)]
POLICY = list(inspect.signature(fsdp2.MixedPrecisionPolicy).parameters)


@pytest.mark.parametrize("name", [*VERBS, *ARGUMENTS, *POLICY])
def test_every_verb_and_argument_has_a_row(name: str) -> None:
    assert re.search(rf"\b{name}\b", FEATURES), name


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_has_a_row(name: str) -> None:
    wanted = {"MixedPrecisionPolicy": "mp_policy", "OffloadPolicy": "offload_policy"}.get(
        name, name
    )
    assert re.search(rf"\b{wanted}\b", FEATURES), name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_rows_say_one_of_four_things_and_name_tests_that_exist(row: list[str]) -> None:
    assert row[1] in ("same", "better", "different", "refused")
    named_tests_in(row[-1])


REFUSED = {name for row in ROWS if row[1] == "refused" for name in re.findall(r"`(\w+)`", row[0])}


@pytest.mark.parametrize("name", VERBS)
def test_what_is_not_refused_is_there(name: str) -> None:
    theirs, ours = getattr(fsdp2.FSDPModule, name), getattr(fsdp_overlap.FSDPModule, name)
    is_inherited = name == "set_reduce_scatter_divide_factor"  # it calls a verb that is ours
    assert (ours is theirs) == is_inherited
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize("name", [name for name in EXPORTED if name not in REFUSED])
def test_names_that_are_imported_are_there(name: str) -> None:
    assert hasattr(fsdp_overlap, name)


def migrate() -> None:
    """Both sides of the page's ten lines run, and train alike."""
    example = re.search(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    lines = example[1].splitlines()
    mesh = init_device_mesh("cpu", (2,))
    losses = []
    for side in "-+":
        torch.manual_seed(0)
        scope: dict[str, Any] = {"torch": torch, "model": Model().float(), "mesh": mesh}
        exec("\n".join(line[1:] for line in lines if line[:1] in (side, " ")), scope)
        assert (
            type(scope["model"])
            .__mro__[1]
            .__module__.startswith("torch" if side == "-" else "fsdp_overlap")
        )
        tokens = torch.arange(6).view(2, 3) + dist.get_rank()
        for _ in range(3):
            loss = scope["model"](tokens).float().square().mean()
            loss.backward()
            scope["optimizer"].step()
            scope["optimizer"].zero_grad()
            losses.append(loss.item())
    before, after = losses[:3], losses[3:]
    assert before[0] == after[0]
    assert before == pytest.approx(after, rel=0.02)


@pytest.mark.slow
def test_the_ten_lines_of_a_migration_run_before_and_after() -> None:
    run_ranks(migrate, 2)
