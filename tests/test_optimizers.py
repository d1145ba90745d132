"""torch's optimizers and gradient clipping on sharded parameters. All as without sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from twins import Twins, same
from zoo import ZOO


def optimize(kind: type[torch.optim.Optimizer], options: dict[str, Any], reshard: bool) -> None:
    twins = Twins(*ZOO["frozen and partly frozen units"], optimizer=kind, **options)
    twins.model.set_reshard_after_forward(reshard)
    twins.model.set_reshard_after_backward(reshard)
    for batch in twins.batches(4):
        twins.backward(*batch)
        norms = [
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=options.get("foreach"))
            for model in (twins.model, twins.twin)
        ]
        assert type(norms[0]) is torch.Tensor
        same(norms[0], norms[1], "norm")
        twins.check_gradients()
        twins.step()
        twins.check_parameters()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("form", ["single", "foreach", "fused"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
    ],
)
def test_optimizers(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], form: str, reshard: bool
) -> None:
    forms = {"foreach": form == "foreach"} | ({"fused": True} if form == "fused" else {})
    if form == "fused":
        del forms["foreach"]
    run_ranks(optimize, 2, kind, options | forms, reshard)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf"), 0.0])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_gradient_norms_are_of_the_whole_model(norm_type: float, foreach: bool | None) -> None:
    run_ranks(clip, 3, norm_type, foreach)


def clip(norm_type: float, foreach: bool | None) -> None:
    twins = Twins.of("layers")
    twins.backward(*next(twins.batches(1)))
    for _ in range(2):
        norm, expected = (
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach)
            for model in (twins.model, twins.twin)
        )
        same(norm, expected, "norm")
        twins.check_gradients()
