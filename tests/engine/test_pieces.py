"""The first unit travels in pieces, and the last reductions are issued as gradients arrive."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_overlap.comm import comm_streams
from fsdp_overlap.comm.comm_streams import HostWorkHandle
from fsdp_overlap.engine import grads
from fsdp_overlap.engine.unit import unit_of
from fsdp_overlap.layout import ParamSpec
from fsdp_overlap.layout import plan as planner
from fsdp_overlap.layout.plan import MAX_PIECES, MIN_SHARD_BYTES, in_pieces
from fsdp_overlap.optim import AdamW
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.recorded import GATHER, REDUCE, Entry, Recorded, layer, position
from support.twins import Twins
from support.zoo import VOCABULARY, ZOO, shard_layers

# So that units of a few hundred bytes travel in pieces.
TINY = patch.object(planner, "MIN_SHARD_BYTES", 1)


def specs_of(sizes: Sequence[int], frozen: Sequence[int] = ()) -> list[ParamSpec]:
    return [
        ParamSpec(f"p{index}", (size,), torch.float32, requires_grad=index not in frozen)
        for index, size in enumerate(sizes)
    ]


@given(st.lists(st.integers(1, 1 << 21), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_pieces_follow_each_other_and_are_few(
    sizes: list[int], world_size: int, data: st.DataObject
) -> None:
    frozen = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    specs = specs_of(sizes, list(frozen))
    divided = in_pieces(specs, world_size)
    assert [spec.fqn for spec in divided] == [spec.fqn for spec in specs]
    numbers = [spec.piece for spec in divided if spec.requires_grad]
    assert all(before <= after for before, after in pairwise(numbers))
    assert max(numbers, default=0) <= MAX_PIECES
    assert all(spec.piece == 0 for spec in divided if not spec.requires_grad)
    total = sum(4 * spec.numel for spec in divided if spec.requires_grad)
    if total < 2 * MIN_SHARD_BYTES * world_size:
        assert divided == specs


def test_a_block_of_a_transformer_begins_with_a_quarter() -> None:
    square = 1 << 20
    specs = specs_of([1024, 3 * square, square, 1024, 4 * square, 4 * square])
    assert [spec.piece for spec in in_pieces(specs, 2)] == [1, 1, 2, 2, 2, 3]
    assert in_pieces(specs, 1024) == specs  # a rank has too little of each piece


def train(name: str) -> None:
    with TINY:
        twins = Twins.of(name, optimizer=AdamW if "frozen" in name else torch.optim.AdamW)
    twins.train(iterations=7 if "dynamic" in name else 3)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ZOO)
def test_training_in_pieces_equals_unsharded_training(name: str) -> None:
    run_ranks(train, 2, name)


def piece(number: int) -> str:
    return f"{layer(0)} [float32, piece {number}]"


PASSED = Entry("compute", "has passed", "backward", "down")


def as_gradients_arrive() -> None:
    with TINY:
        recorded = Recorded()
    first = recorded.model.layers[0]

    def note(_: torch.Tensor) -> None:
        recorded.log.append(PASSED)

    first.up.register_forward_hook(lambda module, args, output: output.register_hook(note) and None)
    forward, backward = recorded.passes()
    passed = backward.index(PASSED)
    issued = [position(backward, "enqueue", piece(number), REDUCE) for number in (4, 3, 2, 1)]
    assert issued == sorted(issued)
    assert position(backward, "enqueue", layer(1), REDUCE) < issued[0]
    assert issued[1] < passed < issued[2]
    # Forward gathers the pieces at once.
    position(forward, "enqueue", layer(0), GATHER)


def test_pieces_are_reduced_as_their_gradients_arrive() -> None:
    run_on_fake_group(as_gradients_arrive, 2)


class Repeating(nn.Module):
    """A block that runs the same layers several times, each in a reentrant checkpoint, and the last
    time without one if it is ``mixed``."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed
        self.norm, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(self.up(x).relu())
        return down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for _ in range(3):
            x = x + checkpoint(self._layers, x, use_reentrant=True)
        return x + self._layers(x) if self.mixed else x


class Repeated(nn.Module):
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(Repeating(mixed) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for each in self.layers:
            x = each(x)
        scores: torch.Tensor = self.head(x)
        return scores


class Arrived(HostWorkHandle):
    """Has always arrived when the host asks."""

    def done(self) -> bool:
        self.wait()
        return True


def with_checkpoints_within(mixed: bool, arrives: bool) -> int:
    """Returns how many param groups were reduced."""
    with TINY:
        twins = Twins(partial(Repeated, mixed), shard_layers)
    large = patch.object(grads, "LARGE_BYTES", 1)
    with (
        large,
        patch.object(comm_streams, "HostWorkHandle", Arrived if arrives else HostWorkHandle),
    ):
        twins.train(2)
    return twins.ctx.stats.reduce_scatters // 2


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_piece_waits_for_all_checkpoints_that_add_to_it(mixed: bool, arrives: bool) -> None:
    # The first layer in pieces, the second and the root. All pieces again for what is late.
    expected = 4 + 2 + 4 * mixed
    assert run_ranks(with_checkpoints_within, 2, mixed, arrives) == [expected, expected]


def sizes_without_a_context() -> list[int]:
    with TINY:
        twins = Twins.of("without a context")
    units = (unit_of(module) for module in twins.model.modules())
    return [len(unit.param_groups) for unit in units if unit is not None]


def test_units_without_a_context_are_whole() -> None:
    assert run_on_fake_group(sizes_without_a_context, 2) == [1, 1, 1, 1]
