"""``fsdp2_features.toml`` has a row for every public feature of the FSDP2 that is installed,
``docs/fsdp2_features.md`` is made from it, and the ten lines of ``docs/fsdp2.md`` run."""

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

import fsdp2_features
import fsdp_overlap
from fsdp2_features import Feature
from support.pages import named_tests_in
from support.ranks import run_ranks
from support.zoo import Model

FEATURES = fsdp2_features.read()
NAMED = " ".join(feature.feature for rows in FEATURES.values() for feature in rows)

MOVING = fsdp2_features.PAGE.with_name("fsdp2.md")

VERBS = [name for name in vars(fsdp2.FSDPModule) if not name.startswith("_")]
ARGUMENTS = [name for name in inspect.signature(fsdp2.fully_shard).parameters if name != "module"]
EXPORTED = [name for name in module_of_fsdp2.__all__ if hasattr(fsdp2, name)]
POLICY = list(inspect.signature(fsdp2.MixedPrecisionPolicy).parameters)


@pytest.mark.parametrize("name", [*VERBS, *ARGUMENTS, *POLICY])
def test_every_verb_and_argument_has_a_row(name: str) -> None:
    assert re.search(rf"\b{name}\b", NAMED), name


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_has_a_row(name: str) -> None:
    wanted = {"MixedPrecisionPolicy": "mp_policy", "OffloadPolicy": "offload_policy"}.get(
        name, name
    )
    assert re.search(rf"\b{wanted}\b", NAMED), name


@pytest.mark.parametrize(
    "feature",
    [feature for rows in FEATURES.values() for feature in rows],
    ids=lambda feature: feature.feature,
)
def test_every_feature_names_tests_that_exist(feature: Feature) -> None:
    tests = feature.tests + feature.gpu_tests
    assert len(named_tests_in(feature.row)) == len(tests) > 0


def test_the_page_is_made_from_these_features() -> None:
    is_current = fsdp2_features.PAGE.read_text() == fsdp2_features.page_of(FEATURES)
    assert is_current, f"{fsdp2_features.PAGE.name} is stale: run {fsdp2_features.COMMAND}"


REFUSED = {
    name for feature in FEATURES["refused"] for name in re.findall(r"`(\w+)`", feature.feature)
}


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
    example = re.search(r"```diff\n(.*?)```", MOVING.read_text(), re.DOTALL)
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
