"""What happens when a step of Muon fails, and that training goes on afterwards."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext
from fsdp_overlap.optim import Muon, exchange, muon, orthogonalization
from support import tensor_parallel
from support.ranks import RankError, expect_rank_errors, run_ranks
from support.tensor_parallel import ROWS, batches, loss_of, parallelize, plain
from support.twins import impatient

EXACT: dict[str, Any] = {"lr": 0.05, "ns_dtype": torch.float64}

# One owner group of four ranks, whose process group serves the comm streams too, or one over two
# dimensions of a mesh.
SHAPES = [(4, 1), (2, 2)]


class Pair:
    """A sharded model and its unsharded twin."""

    def __init__(self, shape: tuple[int, int]) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tp"))
        self.ctx = FsdpContext(mesh["shard"])
        self.model = tensor_parallel.shard(parallelize(plain(), mesh["tp"]), self.ctx)
        self.twin = plain()
        self.optimizer = Muon(self.model, **EXACT)
        self.twin_optimizer = Muon(self.twin, **EXACT)
        self.copies, self.rank = shape[0], dist.get_rank() // shape[1]

    def backward(self) -> None:
        [(tokens, targets)] = batches(1, self.copies)
        rank = self.rank
        loss_of(self.model, tokens.split(ROWS)[rank], targets.split(ROWS)[rank]).backward()
        loss_of(self.twin, tokens, targets).backward()

    def step(self) -> None:
        with patch.object(exchange, "ROUND_ELEMENTS", 60):  # several rounds
            self.optimizer.step()
        self.twin_optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.twin_optimizer.zero_grad()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()
            self.zero_grad()
        tensor_parallel.same(self.model, self.twin, "value")

    def state(self) -> list[torch.Tensor]:
        """All that a checkpoint would hold of this rank."""
        parameters = list(self.model.parameters())
        states = self.optimizer.state.values()
        found = [*parameters, *(each for state in states for each in state.values())]
        return [getattr(each, "_local_tensor", each).detach() for each in found]


def rewind(pair: Pair, saved: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for now, then in zip(pair.state(), saved, strict=True):
            now.copy_(then)


@contextmanager
def failing(where: str, fail: Callable[[], None]) -> Iterator[None]:
    """Calls ``fail`` in a step: after some products, or when all rounds are done, or never."""
    if not where:
        yield
        return
    owner: Any = orthogonalization if where == "products" else muon
    name = "orthogonalize" if where == "products" else "run_rounds"
    original = getattr(owner, name)

    def run(*args: Any) -> Any:
        result = original(*args)
        fail()
        return result

    with patch.object(owner, name, run):
        yield


def raise_planned() -> None:
    raise ArithmeticError("planned")


def fail_and_go_on(shape: tuple[int, int], where: str, who: list[int]) -> Any:
    """Returns what the error said, and how many collectives this rank has issued on each group."""
    pair = Pair(shape)
    with impatient():
        pair.train(1)
        for _ in range(2):
            saved = [each.clone() for each in pair.state()]
            pair.backward()
            try:
                if dist.get_rank() not in who:
                    pair.optimizer.step()
                elif where == "before":
                    raise_planned()
                else:
                    with failing(where, raise_planned):
                        pair.optimizer.step()
                pair.optimizer.step()  # if the other ranks had done the first before one failed
                raise AssertionError("nobody failed")
            except (ArithmeticError, RuntimeError) as error:
                said = str(error)
                pair.ctx.reset()
            rewind(pair, saved)
            pair.zero_grad()
            pair.train(2)
    return said, pair.ctx._groups.collectives_issued()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("where", ["before", "products", "end"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_that_fails_on_one_rank_ends_on_all_and_training_goes_on(
    shape: tuple[int, int], where: str
) -> None:
    found = run_ranks(fail_and_go_on, 4, shape, where, [1])
    assert found[1][0] == "planned"
    before = r"rank 1 called ctx\.reset\(\) after ArithmeticError\('planned'\)"
    within = r"ended: Muon\.step\(\) raised ArithmeticError\('planned'\)"
    for said, issued in found[:1] + found[2:]:
        assert re.search(before if where == "before" else within, said)
        for name, count in issued.items():
            assert all(other.get(name, count) == count for _, other in found), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_that_fails_on_all_ranks_says_why_on_all_and_training_goes_on(
    shape: tuple[int, int],
) -> None:
    for said, _ in run_ranks(fail_and_go_on, 4, shape, "products", [0, 1, 2, 3]):
        assert "planned" in said


def skip_and_go_on(shape: tuple[int, int], steps: int) -> str:
    """One rank leaves a step out, as for a loss that is not finite there. Returns what was said."""
    pair = Pair(shape)
    with impatient():
        pair.train(steps)
        saved = [each.clone() for each in pair.state()]
        pair.backward()
        try:
            if dist.get_rank() != 1:
                pair.optimizer.step()
            pair.optimizer.zero_grad()
            pair.backward()
            raise AssertionError("nobody noticed")
        except RuntimeError as error:
            said = str(error)
            pair.ctx.reset()
        rewind(pair, saved)
        pair.zero_grad()
        pair.train(2)
    return said


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("shape", "steps"), [((4, 1), 1), ((4, 1), 3), ((2, 2), 1), ((2, 2), 3)])
def test_a_step_that_one_rank_leaves_out_is_found_and_training_goes_on(
    shape: tuple[int, int], steps: int
) -> None:
    left_out = r"rank 1 went on without an optimizer's step that this rank has begun with it: call"
    for said in run_ranks(skip_and_go_on, 4, shape, steps, timeout=100):
        assert re.search(left_out, said)


def die_in_a_step(shape: tuple[int, int]) -> None:
    pair = Pair(shape)
    pair.train(1)
    pair.backward()
    with failing("products" if dist.get_rank() == 1 else "", lambda: os._exit(1)):
        pair.optimizer.step()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_that_a_rank_left_in_a_step_say_so(shape: tuple[int, int]) -> None:
    where = r"all_to_all of unit 'Muon' among ranks \[0, 1, 2, 3\] \(group '\w+'\)"
    with pytest.raises(RankError, match=rf"{where} failed: (rank \d ended: )?a rank died") as error:
        run_ranks(die_in_a_step, 4, shape, timeout=20)
    assert "rank 1: died" in str(error.value)


def go_on_without_reset() -> None:
    pair = Pair((2, 2))
    pair.train(1)
    pair.backward()
    with failing("products", raise_planned), pytest.raises((ArithmeticError, RuntimeError)):
        pair.optimizer.step()
    pair.optimizer.step()


def test_without_a_reset_the_next_step_says_what_happened() -> None:
    expect_rank_errors(go_on_without_reset, 4, match=r"ctx\.reset\(\) was not called.*planned")
