"""Sharded training equals unsharded training."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from twins import Twins
from zoo import ZOO


def train(name: str, prefetch: int) -> None:
    Twins.of(name, prefetch=prefetch).train(iterations=7 if "dynamic" in name else 3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ZOO)
def test_training_equals_unsharded_training(name: str, world_size: int) -> None:
    run_ranks(train, world_size, name, 1)


@pytest.mark.parametrize("prefetch", [0, 2, 5])
@pytest.mark.parametrize("name", ZOO)
def test_prefetch_changes_nothing(name: str, prefetch: int) -> None:
    run_ranks(train, 2, name, prefetch)
