"""Sharded training equals unsharded training."""

from __future__ import annotations

from itertools import product

import pytest

from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import ZOO


def train(name: str, prefetch: int) -> None:
    Twins.of(name, prefetch=prefetch).train(iterations=7 if "dynamic" in name else 3)


# "layers" trains so in test_modes, which counts full buffers too. On four ranks all train in
# test_hsdp.
@pytest.mark.sampled(8)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in ZOO if name != "layers"])
def test_training_equals_unsharded_training(name: str, world_size: int) -> None:
    run_ranks(train, world_size, name, 1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "prefetch"),
    [*product(ZOO, (0,)), *product(("nested units", "deep tree", "dynamic order"), (2, 5))],
)
def test_prefetch_changes_nothing(name: str, prefetch: int) -> None:
    run_ranks(train, 2, name, prefetch)
