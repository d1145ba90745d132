"""``requires_grad`` that changes between a forward and its backward, as that of adapters which are
switched off for a reference, counts as without sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from fsdp_overlap.layout import Flat, LayoutRule
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import VOCABULARY, WIDTH


class Layer(nn.Module):
    """A frozen product, and two adapters of which one or none is used."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH)) for _ in range(2)
        )
        self.used: int | None = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return x + torch.tanh(y if self.used is None else y + self.adapters[self.used](x))


class Model(nn.Module):
    def __init__(self, wrap: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.wrap = wrap

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).requires_grad_()  # for reentrant checkpoints
        for layer in self.layers:
            if self.wrap:
                x = checkpoint(layer, x, use_reentrant=self.wrap == "reentrant")
            else:
                x = layer(x)
        return self.head(x)


def use(model: Any, adapter: int | None, toggles: bool = True) -> None:
    for layer in model.layers:
        layer.used = adapter
        for index, each in enumerate(layer.adapters):
            if toggles:
                each.requires_grad_(index == adapter)


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    use(model, None)
    yield
    use(model, 0)


def apart(scores: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (scores - other - 1).square().mean()


Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def policy_first(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens)
    with switched_off(model), torch.no_grad():
        other = model(tokens)
    return apart(scores, other)


def reference_with_a_graph(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens)
    with switched_off(model):
        other = model(tokens)
    return apart(scores, other)


def reference_first(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with switched_off(model), torch.no_grad():
        other = model(tokens)
    return apart(model(tokens), other)


def reference_in_evaluation(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens)
    with switched_off(model), torch.inference_mode():
        other = model.eval()(tokens)
    model.train()
    return apart(scores, other.clone())


def toggled_without_a_forward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens)
    with switched_off(model):
        pass
    return scores.square().mean()


def toggled_by_attribute(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens)
    mine = [each for layer in model.layers for each in layer.adapters[0].parameters()]
    for parameter in mine:
        parameter.requires_grad = False
    with torch.no_grad():
        other = model(tokens[:, :2])
    for parameter in mine:
        parameter.requires_grad = True
    return apart(scores, other.mean())


def frozen_and_left_so(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    use(model, 0)
    scores = model(tokens)
    model.layers[1].requires_grad_(False)
    model.layers[2].adapters[0][1].bias.requires_grad_(False)
    return scores.square().mean()


def frozen_with_a_forward_between(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    use(model, 0)
    scores = model(tokens)
    model.layers[0].requires_grad_(False)
    with torch.no_grad():
        other = model(tokens)
    return apart(scores, other)


def thawed_after_forward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    use(model, None)
    scores = model(tokens)
    use(model, 1)
    return scores.square().mean()


def two_adapters(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    use(model, 0)
    first = model(tokens)
    use(model, 1)
    second = model(tokens)
    use(model, 0)
    return apart(first, second)


def two_policies_and_a_reference(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    chosen = model(tokens)
    with switched_off(model), torch.no_grad():
        other = model(tokens)
    rejected = model(tokens.flip(0))
    return apart(chosen, other) + rejected.square().mean()


LOSSES = [
    policy_first,
    reference_with_a_graph,
    reference_first,
    reference_in_evaluation,
    toggled_without_a_forward,
    toggled_by_attribute,
    frozen_and_left_so,
    frozen_with_a_forward_between,
    thawed_after_forward,
    two_adapters,
    two_policies_and_a_reference,
]


# A checkpoint runs again as the model is in backward.
CHECKPOINTED = [
    loss
    for loss in LOSSES
    if loss in (policy_first, reference_first, reference_in_evaluation, toggled_without_a_forward)
]


class Toggled(Twins):
    loss: Loss

    def losses(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss(self.model, self.mine(tokens)), self.twin_loss(tokens, targets)

    def twin_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.loss(self.twin, rows) for rows in tokens.chunk(self.world)]).mean()


def shard(model: Any, ctx: FsdpContext, **options: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, ctx, **options)
    fully_shard(model, ctx, **options)


def train(layout: LayoutRule, wrap: str, prefetch: int, reshard: Any) -> None:
    for loss in CHECKPOINTED if wrap else LOSSES:
        build, options = partial(Model, wrap), {"reshard_after_forward": reshard}
        twins = Toggled(build, partial(shard, **options), layout=layout, prefetch=prefetch)
        twins.loss = loss
        try:
            for tokens, targets in twins.batches(3):
                twins.backward(tokens, targets)
                twins.check_gradients()
                twins.backward(tokens, targets)  # accumulates
                twins.check_gradients()
                twins.step()
            twins.check_parameters()
        except Exception as error:
            raise AssertionError(f"{loss.__name__}: {error}") from error


@pytest.mark.sampled(16)
@pytest.mark.parametrize("layout", [Flat(), PerTensor()], ids=["ranges", "rows"])
@pytest.mark.parametrize(
    ("wrap", "prefetch", "reshard"),
    [
        ("", 1, None),
        ("", 0, True),
        ("", 2, False),
        ("reentrant", 1, None),
        ("not reentrant", 1, None),
    ],
)
def test_gradients_are_those_of_unsharded_training(
    layout: LayoutRule, wrap: str, prefetch: int, reshard: Any
) -> None:
    run_ranks(train, 2, layout, wrap, prefetch, reshard)
