"""Module trees drawn at random, sharded at random, against an unsharded twin."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_overlap import FsdpContext, fully_shard
from support.random_models import Node, TensorAtomic, trees, units_of
from support.ranks import run_ranks
from support.twins import Twins


def train(node: Node, prefetch: int) -> None:
    def shard(model: TensorAtomic, ctx: FsdpContext) -> None:
        for module in units_of(model.tree):
            fully_shard(module, ctx)
        fully_shard(model, ctx)

    Twins(lambda: TensorAtomic(node), shard, prefetch=prefetch).train(2)


@settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(trees(), st.integers(1, 3), st.integers(0, 2))
def test_random_models_train_as_unsharded(node: Node, world_size: int, prefetch: int) -> None:
    run_ranks(train, world_size, node, prefetch)
