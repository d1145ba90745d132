"""The examples whose ranks run different forwards train as one unsharded model does.

FSDP2 does so where ranks run the same. Where they do not, its collectives do not match: a rank
waits until its timeout, or gloo, which looks at the sizes of what it receives, aborts the process.
NCCL does not look. Where sizes and numbers happen to agree, other weights are trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from support.examples import EXAMPLES, load
from support.held import held_of
from support.ranks import RankError, expect_rank_errors, run_ranks

STEPS = 6
HANG_SECONDS = 5
NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers"
)
NAMES = [
    pytest.param("multimodal", marks=NEEDS_TRANSFORMERS),
    "expert_loop",
    pytest.param("uneven_generation", marks=NEEDS_TRANSFORMERS),
    "uneven_loader",
]

DATA = {
    "multimodal": "batch",
    "expert_loop": "batch",
    "uneven_generation": "sample",
    "uneven_loader": "loader_of",
}
"""The function of each program that gives what a rank trains on. The rank is its last argument."""


# ---- programs, changed ----


class FSDP2Context:
    """What FSDP2 has in place of a context: a mesh. Ranks take no notice of each other."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def uneven(self) -> AbstractContextManager[None]:
        return nullcontext()

    def until_all_done(self, batches: Iterable[Any]) -> Iterator[Any]:
        return iter(batches)


def shard_by_fsdp2(module: nn.Module, ctx: FSDP2Context, conditional: bool = False) -> None:
    fully_shard(module, mesh=ctx.mesh)


def impatient_mesh(device: str, shape: Sequence[int]) -> DeviceMesh:
    """A mesh of all ranks whose collectives fail soon if another rank does not take part."""
    dist.barrier()  # imports take longer
    return DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=HANG_SECONDS)), device)


def load_program(name: str, system: str, are_alike: bool) -> Any:
    """``are_alike``: give all ranks the data of rank 1."""
    program = load(EXAMPLES / f"{name}.py")
    if system == "fsdp2":
        program.FsdpContext, program.fully_shard = FSDP2Context, shard_by_fsdp2
        program.init_device_mesh = impatient_mesh
    if are_alike:
        data = getattr(program, DATA[name])
        setattr(program, DATA[name], lambda *args: data(*args[:-1], 1))
    return program


# ---- the same, unsharded ----


def data_by_rank(program: Any, model: nn.Module) -> Iterator[Sequence[Any]]:
    """Yield for each step what each rank trains on, ``None`` where it has nothing."""
    ranks, data = range(dist.get_world_size()), getattr(program, DATA[program.__name__])
    for step in range(STEPS):
        if program.__name__ == "uneven_loader":
            yield from zip_longest(*map(data, ranks))
        elif program.__name__ == "uneven_generation":
            yield [data(model, step, rank) for rank in ranks]
        else:
            yield [data(step, rank) for rank in ranks]


def run_unsharded(program: Any) -> tuple[nn.Module, list[Any]]:
    """Return what the program's ``run()`` does, from the mean of the losses of all ranks."""
    model, found = program.build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for data in data_by_rank(program, model):
        optimizer.zero_grad()
        for rank, mine in enumerate(data):
            if mine is not None:
                loss = program.loss_of(model, mine)
                (loss / len(data)).backward()
                if rank == dist.get_rank():
                    is_sampled = program.__name__ == "uneven_generation"
                    found.append(mine.tolist() if is_sampled else loss.item())
        optimizer.step()
    return model, found


def check(model: nn.Module, twin: nn.Module, atol: float) -> None:
    """Compare parameters, and the gradients of the last step."""
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        for held, full in ((parameter, other), (parameter.grad, other.grad)):
            assert (held is None) == (full is None), name
            if held is not None:
                expected = held_of(full.detach(), parameter)
                torch.testing.assert_close(
                    held.to_local().flatten(), expected, atol=atol, rtol=1e-7, msg=name
                )


def train(name: str, system: str, are_alike: bool, **constants: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        program = load_program(name, system, are_alike)
        vars(program).update(constants)
        model, found = program.run(STEPS)
        twin, expected = run_unsharded(program)
        if name == "uneven_generation":
            assert found == expected
        else:
            assert found == pytest.approx(expected)
        # transformers normalizes in float32, and AdamW divides small gradients by themselves.
        check(model, twin, atol=1e-5 if name in ("multimodal", "uneven_generation") else 1e-7)
    finally:
        torch.set_default_dtype(torch.float32)


# ---- claims ----


@pytest.mark.sampled(5)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_differ_train_as_unsharded(name: str, world_size: int) -> None:
    run_ranks(train, world_size, name, "fsdp_overlap", False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_fsdp2_trains_as_unsharded_where_ranks_are_alike(name: str) -> None:
    run_ranks(train, 2, name, "fsdp2", True)


def test_fsdp2_trains_other_weights_where_ranks_run_equally_many_experts() -> None:
    """Each token goes to two experts. Those of one token are two on each rank, and others."""
    train_one_token = partial(train, TOKENS=1)
    run_ranks(train_one_token, 2, "expert_loop", "fsdp_overlap", False)
    expect_rank_errors(train_one_token, 2, "expert_loop", "fsdp2", False, match="^AssertionError")


def run_fsdp2(name: str) -> None:
    load_program(name, "fsdp2", False).run(STEPS)


TIMEOUT, ABORT = "[Tt]imed out", r"rank \d: died ----\nexit code -6"
END = {
    "multimodal": ABORT,
    "expert_loop": ABORT,
    "uneven_generation": TIMEOUT,
    "uneven_loader": TIMEOUT,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_fsdp2_does_not_end_where_ranks_differ(name: str) -> None:
    with pytest.raises(RankError, match=END[name]):
        run_ranks(run_fsdp2, 2, name)
