"""What the next forward needs first is stepped first, and gathered under the rest of the step."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fsdp_overlap.engine.comm_context import CommContext
from fsdp_overlap.layout import Flat, LayoutRule, TensorAtomic
from fsdp_overlap.optim import AdamW, Muon, adamw, orthogonalization
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.recorded import GATHER, Entry, Recorded
from support.twins import Twins

STEPPED = Entry("compute", "has stepped", "optimizer", "")


def trained(recorded: Recorded, optimizer: torch.optim.Optimizer) -> None:
    recorded.forward().backward()
    optimizer.step()
    optimizer.zero_grad()


def under_adamw() -> None:
    recorded = Recorded()
    optimizer = AdamW(recorded.model.parameters(), prefetch_next_forward=True)
    trained(recorded, optimizer)
    kernel = adamw.fused_adamw_

    def noted(*args: Any, **kwargs: Any) -> None:
        kernel(*args, **kwargs)
        recorded.log.append(STEPPED)

    recorded.forward().backward()
    with patch.object(adamw, "fused_adamw_", noted):
        log = recorded.recorded(optimizer.step)
    gathered = Entry(GATHER, "enqueue", GATHER, "Model")
    assert [each for each in log if each.action != "allocate"] == [STEPPED, gathered, STEPPED]
    hits = recorded.ctx.stats.prefetch_hits
    forward = recorded.recorded(recorded.forward)
    assert gathered not in forward
    assert recorded.ctx.stats.prefetch_hits == hits + 4  # all units


def test_the_first_unit_is_gathered_under_the_step_of_the_others() -> None:
    run_on_fake_group(under_adamw, 2)


def products_under_gathers(layout: LayoutRule) -> bool:
    """Whether products of a step run while the first unit is there."""
    twins = Twins.of(
        "layers", optimizer=Muon, prefetch_next_forward=True, layout=layout, ns_dtype=torch.float64
    )
    first = twins.ctx.units[-1]  # the root
    seen: list[bool] = []
    original = orthogonalization.orthogonalize

    def spy(*args: Any) -> torch.Tensor:
        seen.append(first.is_up_to_date)
        return original(*args)

    for batch in twins.batches(3):
        twins.backward(*batch)
        with patch.object(orthogonalization, "orthogonalize", spy):
            twins.optimizer.step()
        assert first.is_up_to_date
        twins.twin_step()
        twins.check_parameters()
        twins.optimizer.zero_grad()
    return any(seen)


def test_muon_gathers_under_products_where_ranks_share_nothing() -> None:
    assert run_ranks(products_under_gathers, 2, TensorAtomic()) == [True, True]
    assert not any(run_ranks(products_under_gathers, 3, Flat()))


def with_two_optimizers() -> None:
    """Each steps some of the parameters of the first unit, so no step gathers it."""
    twins = Twins.of("layers", optimizer=AdamW, prefetch_next_forward=True)
    halves = [list(model.parameters()) for model in (twins.model, twins.twin)]
    optimizers = [
        AdamW(half[start::2], lr=0.05, prefetch_next_forward=True)
        for half in halves
        for start in (0, 1)
    ]
    for batch in twins.batches(3):
        twins.backward(*batch)
        for optimizer in optimizers:
            optimizer.step()
            assert not any(unit.is_up_to_date for unit in twins.ctx.units)
        for optimizer in optimizers:
            optimizer.zero_grad()
        twins.check_parameters()


def test_a_unit_that_two_optimizers_step_is_gathered_by_forward() -> None:
    run_ranks(with_two_optimizers, 2)


def edited_after_every_second_step() -> None:
    """Weights that are edited after a step are gathered again, and not ahead after the next."""
    twins = Twins.of("layers", optimizer=AdamW, prefetch_next_forward=True)
    found = []
    for index, batch in enumerate(twins.batches(7)):
        twins.backward(*batch)
        twins.step()
        found.append(any(unit.is_up_to_date for unit in twins.ctx.units))
        if index % 4 in (1, 2):
            with torch.no_grad():
                for model in (twins.model, twins.twin):
                    for parameter in model.parameters():
                        parameter.mul_(0.9)
        twins.check_parameters()
    assert found == [True, True, False, False, True, True, False]


def test_edits_after_steps_are_followed_and_end_the_gathers_ahead() -> None:
    run_ranks(edited_after_every_second_step, 2)


def that_fails() -> None:
    twins = Twins.of("layers", optimizer=AdamW, prefetch_next_forward=True)
    first, second = twins.batches(2)
    twins.backward(*first)
    twins.step()
    twins.backward(*second)
    failing = patch.object(CommContext, "gather", side_effect=RuntimeError("the link is down"))
    with failing, pytest.raises(RuntimeError, match="the link is down"):
        twins.optimizer.step()
    twins.twin_step()
    twins.check_parameters()


def test_a_gather_that_fails_leaves_no_step_half_done() -> None:
    run_ranks(that_fails, 2)


def stepped_twice() -> None:
    """What was gathered for a pass that comes later goes when another pass begins."""
    twins = Twins.of("layers", optimizer=AdamW, prefetch_next_forward=True)
    layer = twins.model.layers[1]
    assert isinstance(layer, nn.Module)
    for batch in twins.batches(2):
        twins.backward(*batch)
    twins.optimizer.step()
    twins.optimizer.step()
    root = twins.ctx.units[-1]
    assert root.is_up_to_date
    with torch.no_grad():
        layer(torch.zeros(2, 5, layer.up.in_features, dtype=torch.float64))
    assert not root.is_gathered


def test_what_was_gathered_after_two_steps_goes_if_another_unit_runs() -> None:
    run_ranks(stepped_twice, 2)


def alone_with_what_is_kept() -> None:
    """One rank runs a unit that is kept whole, while the first unit is there for the next pass."""
    twins = Twins.of("layers", optimizer=AdamW, prefetch_next_forward=True)
    layers = twins.model.layers
    for layer in layers:
        layer.set_reshard_after_forward(False)
        layer.set_reshard_after_backward(False)
    for batch in twins.batches(3):
        twins.backward(*batch)
        twins.step()
        twins.ctx.finish_param_sync()
        if twins.rank == 0:
            with torch.no_grad():
                layers[0](torch.zeros(2, 5, layers[0].up.in_features, dtype=torch.float64))
        twins.check_parameters()


def test_one_rank_alone_runs_what_is_kept_after_a_step() -> None:
    run_ranks(alone_with_what_is_kept, 2)
