"""Saves after a forward or backward that was interrupted, on each rank in another place."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_overlap import RaggedDTensor, register_fsdp_forward_method
from fsdp_overlap.checkpoint import SafeFileSystemWriter
from fsdp_overlap.comm.process_groups import GroupCache
from fsdp_overlap.weights import export_weights
from support.ranks import run_ranks
from support.twins import Twins, impatient, same

Place = tuple[str, int]
CASES: list[tuple[Place, Place, type[BaseException]]] = [
    (("forward", 0), ("forward", 1), KeyboardInterrupt),
    (("forward", 0), ("forward", 1), ArithmeticError),
    (("forward", 0), ("forward", 2), KeyboardInterrupt),  # the other rank waits for this one
    (("forward", 0), ("forward", 2), ArithmeticError),
    (("forward", 1), ("backward", 1), KeyboardInterrupt),
    (("backward", 2), ("backward", 1), ArithmeticError),
    (("backward", 2), ("backward", 0), KeyboardInterrupt),
    (("backward", 1), ("backward", 1), ArithmeticError),
]
ADVICE = r"call ctx\.reset\(\) on every rank before"


def interrupt(twins: Twins, place: Place, error: type[BaseException]) -> None:
    """Run a step that does not finish. If this rank waited for another, that says what to do."""

    def stop(*_: Any) -> None:
        raise error("planned")

    kind, index = place
    layer = twins.model.layers[index]
    if kind == "forward":
        hook = layer.register_forward_pre_hook(stop)
    else:
        hook = layer.register_full_backward_hook(stop)
    with pytest.raises((error, RuntimeError), match=f"planned|saves, and .*{ADVICE} the next"):
        twins.losses(*next(twins.batches(1)))[0].backward()
    hook.remove()


def save_after_interrupts(folder: Path) -> None:
    for number, (*places, error) in enumerate(CASES):
        twins = Twins.of("layers")
        twins.train(1)
        expected = [parameter.detach().clone() for parameter in twins.twin.parameters()]
        with impatient():
            interrupt(twins, places[twins.rank], error)
            state = twins.model.state_dict()
            assert all(isinstance(value, RaggedDTensor) for value in state.values())
            dcp.save(state, storage_writer=SafeFileSystemWriter(folder / str(number)))
            if places[0][0] == "backward" or error is KeyboardInterrupt:
                # On the groups of what is unfinished.
                with pytest.raises(RuntimeError, match=ADVICE):
                    dict(export_weights(twins.model))
            twins.ctx.reset()
        twins.model.zero_grad()
        for parameter in twins.model.parameters():
            with torch.no_grad():
                parameter.zero_()
        state = twins.model.state_dict()
        dcp.load(state, checkpoint_id=folder / str(number))
        twins.model.load_state_dict(state)
        for parameter, whole in zip(twins.model.parameters(), expected, strict=True):
            same(parameter.detach().full_tensor(), whole, f"case {number}")
        dict(export_weights(twins.model))
        twins.train(1)


@pytest.mark.slow
def test_saves_end_and_are_right_wherever_ranks_were_interrupted(tmp_path: Path) -> None:
    run_ranks(save_after_interrupts, 2, tmp_path, timeout=120)


def go_on_and_save() -> None:
    """All are interrupted in the same place, evaluate or train, and are interrupted again."""
    twins = Twins.of("layers")
    for number in range(4):
        for _ in range(2):
            interrupt(twins, ("forward", number % 3), KeyboardInterrupt)
            check_saved(twins)
        if number % 2:
            twins.train(1)
        with torch.no_grad():
            twins.losses(*next(twins.batches(1)))
        assert all(isinstance(p, RaggedDTensor) for p in twins.model.parameters())
        check_saved(twins)
        twins.check_rest()


def check_saved(twins: Twins) -> None:
    for name, value in twins.model.state_dict().items():
        assert isinstance(value, RaggedDTensor), name
        same(value.full_tensor(), twins.twin.state_dict()[name], name)


def test_forwards_after_an_interrupt_leave_nothing_unsharded() -> None:
    run_ranks(go_on_and_save, 2)


def save_on_other_groups() -> None:
    """All-gathers may be on the group that a save needs, and nothing ends what waits there."""
    twins = Twins.of("layers")
    twins.train(1)
    with patch.object(GroupCache, "can_close", PropertyMock(return_value=False)):
        # A forward that is under way is no interrupted one.
        model: Any = twins.model
        model.saves = lambda: len(model.state_dict())
        register_fsdp_forward_method(model, "saves")
        hook = model.layers[1].register_forward_hook(lambda *_: void(model.state_dict()))
        twins.train(1)
        assert model.saves()
        hook.remove()
        interrupt(twins, ("forward", 1), KeyboardInterrupt)
        with pytest.raises(RuntimeError, match=rf"state_dict\(\) after a forward .*{ADVICE} it"):
            model.state_dict()
        twins.train(1)  # all were interrupted in the same place
        model.state_dict()


def void(_: object) -> None:
    """Return nothing, as a hook that changes no output."""


def test_a_save_that_may_wait_in_vain_says_so_at_once() -> None:
    run_ranks(save_on_other_groups, 2)
