"""Tensors that leave a unit otherwise than by its output: their backward reads gathered weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from fsdp_overlap.engine import saved_tensors
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.layout import Flat, LayoutRule
from support.fake_group import run_on_fake_group
from support.ranks import RankError, run_ranks
from support.twins import Twins, loss_of
from support.zoo import VOCABULARY, WIDTH


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Packs and unpacks as what leaves parameters where they are, or only counts what is saved."""
    return tensor


class Hidden:
    """A class in which nobody finds tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Block(nn.Module):
    """``kind`` says what leaves it, and how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.kind = kind
        self.kept: Any = None

    def forward(self, x: torch.Tensor, shared: list[torch.Tensor]) -> Any:
        self.kept = None
        h = torch.tanh(self.up(x))
        if self.kind == "before the output":
            self.kept = self.side(h).square().mean()
        y = x + self.down(self.norm(h))
        if self.kind == "after the output":
            self.kept = self.side(y).square().mean()
        elif self.kind == "from the middle":
            self.kept = h.square().mean()
        elif self.kind == "a graph of its own":
            self.kept = self.side(torch.tanh(self.side(y.detach()))).square().mean()
        elif self.kind == "a norm alone":
            self.kept = self.norm(x).square().mean()
        elif self.kind == "a sum alone":
            self.kept = (y.detach() + self.shift).mean()
        elif self.kind == "a checkpoint":
            self.kept = checkpoint(self.side, y, use_reentrant=False).square().mean()
        elif self.kind == "several":
            self.kept = self.side(h).mean() + self.up(y).square().mean()
            shared.append(self.norm(y))
        elif self.kind == "hooks of others":
            with saved_tensors_hooks(same, same):
                self.kept = self.side(torch.tanh(self.side(y))).square().mean()
        elif self.kind in ("a list", "exits"):
            shared.append(self.side(y))
        elif self.kind == "no output":
            self.kept = y
            return None
        elif self.kind == "a class without tensors":
            return Hidden(y)
        elif self.kind == "parts of the output":
            return {"x": y, "others": [self.side(y)]}
        return y


KINDS = [
    "before the output",
    "after the output",
    "from the middle",
    "a graph of its own",
    "a norm alone",
    "a sum alone",
    "a checkpoint",
    "hooks of others",
    "several",
    "a list",
    "exits",
    "no output",
    "a class without tensors",
    "parts of the output",
]


class Model(nn.Module):
    """A block for each kind. Its ``extra`` is what the loss has beside the scores."""

    def __init__(self, kinds: Sequence[str], wrap: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(map(Block, kinds))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.wrap = wrap
        self.extra: Any = 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        shared: list[torch.Tensor] = []
        exits: list[torch.Tensor] = []
        for layer in self.layers:
            y = self.run(layer, x, exits if layer.kind == "exits" else shared)
            if y is None:
                y = layer.kept
            elif isinstance(y, Hidden):
                y = y.tensor
            elif isinstance(y, dict):
                y, (other,) = y["x"], y["others"]
                shared.append(other)
            x = y
        kept = [each.kept for each in self.layers if each.kept is not None]
        self.extra = sum(each.mean() for each in kept)
        self.extra = self.extra + sum(self.head(each).square().mean() for each in exits)
        for each in reversed(shared):
            x = torch.tanh(x + each)
        return self.head(x)

    def run(self, layer: nn.Module, x: torch.Tensor, shared: list[torch.Tensor]) -> Any:
        if self.wrap == "not reentrant":
            return checkpoint(layer, x, shared, use_reentrant=False)
        if self.wrap == "saved on the host":
            with save_on_cpu():
                return layer(x, shared)
        return layer(x, shared)


class Escaping(Twins):
    """The loss has what left the units."""

    def loss(self, model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_of(model(tokens), targets) + model.extra
        return loss

    def losses(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mine = self.loss(self.model, self.mine(tokens), self.mine(targets))
        return mine, self.twin_loss(tokens, targets)

    def twin_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        each = [tokens.chunk(self.world), targets.chunk(self.world)]
        losses = [self.loss(self.twin, *rows) for rows in zip(*each, strict=True)]
        return torch.stack(losses).mean()


def shard(model: Any, ctx: FsdpContext, **options: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, ctx, **options)
    fully_shard(model, ctx, **options)


def train(
    build: Callable[[], nn.Module],
    options: dict[str, Any],
    layout: LayoutRule = Flat(),  # noqa: B008, frozen
) -> None:
    options = {**options}
    prefetch = options.pop("prefetch", 1)
    Escaping(build, partial(shard, **options), layout=layout, prefetch=prefetch).train(3)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"prefetch": 0},
    {"prefetch": 2, "reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"reshard_after_forward": 2, "prefetch": 2},
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_each_way_out_trains_as_without_sharding(kind: str) -> None:
    run_ranks(train, 2, partial(Model, [kind] * 3), {})


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layout", [Flat(), PerTensor()], ids=["ranges", "rows"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_ways_out_train_as_without_sharding(
    options: dict[str, Any], layout: LayoutRule
) -> None:
    if layout == PerTensor() and options.get("reshard_after_forward") == 2:
        pytest.skip("rows keep no part")
    run_ranks(train, 2, partial(Model, KINDS), options, layout)


# A checkpoint around a block that adds to a list does so once more when it runs again.
CHECKPOINTED = [kind for kind in KINDS if kind not in ("a list", "exits", "several")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("wrap", ["not reentrant", "saved on the host"])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_all_ways_out_of_a_checkpoint_train_as_without_sharding(
    options: dict[str, Any], wrap: str
) -> None:
    run_ranks(train, 2, partial(Model, CHECKPOINTED, wrap), options)


class Groups(Model):
    """A checkpoint around two units: when it runs again, the first is freed before its backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)

        def group(x: torch.Tensor, first: int) -> Any:
            kept = []
            for layer in self.layers[first : first + 2]:
                x = layer(x, [])
                kept.append(layer.kept)
            return x, *kept

        self.extra = 0.0
        for first in range(0, len(self.layers), 2):
            reentrant = self.wrap == "reentrant"
            x, *kept = checkpoint(group, x, first, use_reentrant=reentrant)
            self.extra = self.extra + sum(kept)
        return self.head(x)


GROUPED = ["before the output", "after the output", "a norm alone", "a checkpoint"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wrap", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_a_checkpoint_around_several_units(options: dict[str, Any], wrap: str) -> None:
    run_ranks(train, 2, partial(Groups, GROUPED, wrap), options)


WITH_EXTRA = [
    "before the output",
    "after the output",
    "from the middle",
    "a graph of its own",
    "a norm alone",
    "a checkpoint",
    "exits",
    "no output",
]


class ExtrasAlone(Escaping):
    def loss(self, model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        model(tokens)
        extra: torch.Tensor = model.extra
        return extra


def loss_of_extras_alone(prefetch: int) -> None:
    for kind in WITH_EXTRA:
        ExtrasAlone(partial(Model, [kind] * 3), shard, prefetch=prefetch).train(2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_loss_of_what_left_alone(prefetch: int) -> None:
    run_ranks(loss_of_extras_alone, 2, prefetch)


class OfOneRank(Escaping):
    """Only the first rank's loss has what left."""

    def losses(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = []
        for rank, rows in enumerate(zip(tokens.chunk(2), targets.chunk(2), strict=True)):
            loss = self.loss if rank == 0 else self.loss_of_scores
            losses.append(loss(self.twin, *rows))
            if rank == self.rank:
                mine = loss(self.model, *rows)
        return mine, torch.stack(losses).mean()

    def loss_of_scores(
        self, model: Any, tokens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        return loss_of(model(tokens), targets)


class ExtrasOfOneRank(OfOneRank):
    """The first rank's loss has nothing else, and the second's nothing of it."""

    def loss(self, model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        model(tokens)
        extra: torch.Tensor = model.extra
        return extra


def on_one_rank_only() -> None:
    OfOneRank(partial(Model, KINDS), shard).train(3)


def test_one_rank_alone_uses_what_left() -> None:
    run_ranks(on_one_rank_only, 2)


def several_forwards_and_backwards() -> None:
    for kind, order in itertools.product(("after the output", "no output"), ((0, 1), (1, 0))):
        twins = Escaping(partial(Model, [kind] * 3), shard, prefetch=2)
        for _ in range(3):
            pairs = [twins.losses(*batch) for batch in twins.batches(2)]
            for index in order:
                for loss in pairs[index]:
                    loss.backward(retain_graph=True)
            for loss in pairs[order[0]]:
                loss.backward()
            twins.check_gradients()
            twins.step()
        twins.check_parameters()


@pytest.mark.slow
def test_several_forwards_before_a_backward_and_a_graph_that_is_walked_twice() -> None:
    run_ranks(several_forwards_and_backwards, 2)


def starts_late(kind: str) -> None:
    """What was never read early is read so in the fifth forward, which is not tracked."""
    twins = Escaping(partial(Model, ["nothing"] * 3), shard)
    twins.train(4)
    for layer in [*twins.model.layers, *twins.twin.layers]:
        layer.kind = kind
    (tokens, targets), *_ = twins.batches(1)
    loss, _ = twins.losses(tokens, targets)
    with pytest.raises(RuntimeError, match="at version 2147483648; expected"):
        loss.backward()
    twins.ctx.reset()
    twins.optimizer.zero_grad()
    twins.train(5)


def read_after_backward() -> None:
    """What is kept of a forward that is not tracked is read by a backward of its own, after that of
    the loss has freed full buffers."""
    twins = Escaping(partial(Model, ["nothing"] * 3), shard)
    twins.train(4)
    for layer in [*twins.model.layers, *twins.twin.layers]:
        layer.kind = "from the middle"
    tokens, targets = next(twins.batches(1))
    loss_of(twins.model(twins.mine(tokens)), twins.mine(targets)).backward(retain_graph=True)
    for layer in twins.model.layers:
        with pytest.raises(RuntimeError, match="at version 2147483648; expected"):
            layer.kept.backward(retain_graph=True)
    twins.ctx.reset()
    twins.optimizer.zero_grad()
    twins.train(5)


def test_what_backward_has_freed_is_an_error_and_no_wrong_number() -> None:
    run_ranks(read_after_backward, 2)


def hooks_of_others_start_late() -> None:
    """Autograd does not check the versions of what others' hooks hand it, so such units are always
    tracked: a loss that begins late is right."""
    twins = Escaping(partial(Model, ["hooks of others"] * 3), shard)
    with patch.object(Escaping, "loss", lambda _, model, *rows: loss_of(model(rows[0]), rows[1])):
        twins.train(4)
    twins.train(2)


def test_what_leaves_late_through_hooks_of_others_is_right() -> None:
    run_ranks(hooks_of_others_start_late, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["after the output", "a norm alone", "a graph of its own"])
def test_what_leaves_late_is_an_error_and_no_wrong_number(kind: str) -> None:
    run_ranks(starts_late, 2, kind)


def edits_what_was_saved() -> None:
    """Autograd's check of versions holds in forwards that are tracked too."""

    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).exp()
            self.linear(y)
            y2 = y * 2
            y.add_(1)
            return y2

    model = Edits()
    fully_shard(model, FsdpContext())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(2, 4)).sum().backward()


def test_edits_of_what_autograd_saved_are_errors_while_it_is_tracked() -> None:
    run_on_fake_group(edits_what_was_saved, 2)


def stops_tracking() -> None:
    twins = Escaping(partial(Model, ["nothing"] * 3), shard)
    push, tracked = saved_tensors.push_saved_tensors_hooks, []
    for tokens, targets in twins.batches(9):
        with patch.object(saved_tensors, "push_saved_tensors_hooks", side_effect=push) as pushed:
            twins.backward(tokens, targets)
        tracked.append(pushed.call_count)
        twins.step()
    units = len(twins.ctx.units)
    assert tracked == [units, units, 0, units, 0, 0, 0, units, 0]


def test_where_nothing_leaves_few_forwards_are_tracked() -> None:
    run_ranks(stops_tracking, 2)


class Around(nn.Module):
    """Has a unit inside it, and leaves what it computes before and after that."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Block("after the output")
        self.last = nn.Linear(WIDTH, WIDTH)
        self.place, self.kind = place, ""
        self.kept: Any = None

    def forward(self, x: torch.Tensor, shared: list[torch.Tensor]) -> torch.Tensor:
        before = self.first(torch.tanh(self.first(x)))
        h = self.inner(before, shared)
        after = self.last(torch.tanh(self.last(h)))
        both = {"before": before, "after": after, "both": before * after}
        self.kept = both[self.place].square().mean() + self.inner.kept
        return x + h


class Nested(Model):
    def __init__(self) -> None:
        super().__init__(())
        self.layers = nn.ModuleList(map(Around, ("before", "after", "both")))


def shard_nested(model: Any, ctx: FsdpContext) -> None:
    for layer in model.layers:
        fully_shard(layer.inner, ctx)
    shard(model, ctx)


def train_nested(prefetch: int) -> None:
    for twins in (Escaping, ExtrasAlone, OfOneRank, ExtrasOfOneRank):
        twins(Nested, shard_nested, prefetch=prefetch).train(5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_units_within_units(prefetch: int) -> None:
    run_ranks(train_nested, 2, prefetch)


class Compiled(Model):
    def run(self, layer: nn.Module, x: torch.Tensor, shared: list[torch.Tensor]) -> Any:
        if not hasattr(layer, "compiled"):
            layer.compile(backend="aot_eager")
            layer.compiled = True
        return layer(x, shared)


def train_compiled() -> None:
    train(partial(Compiled, ["after the output", "before the output", "a norm alone"]), {})


@pytest.mark.slow
def test_compiled_units() -> None:
    run_ranks(train_compiled, 2, timeout=120)


class Transforms(nn.Module):
    """A forward that uses ``torch.func``, which disables hooks of saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        slope = torch.func.grad(lambda z: z.tanh().sum())(y.detach())
        _, pull_back = torch.func.vjp(self.linear, y)
        return y + slope + pull_back(y)[0]


class TransformingModel(Model):
    def __init__(self) -> None:
        super().__init__(())
        self.layers = nn.ModuleList(Transforms() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def use_transforms() -> None:
    Twins(TransformingModel, shard).train(5)
    with pytest.raises(RuntimeError, match="saved tensor hooks"), save_on_cpu():
        torch.func.grad(torch.sum)(torch.ones(2))  # others' hooks are refused as ever


def test_forwards_may_use_transforms_of_torch_func() -> None:
    run_ranks(use_transforms, 2)


def left_out(owner: Any, name: str) -> None:
    with patch.object(owner, name, lambda *_, **__: None):
        train(partial(Model, ["after the output"] * 3), {})


@pytest.mark.parametrize(
    ("owner", "name"),
    [(saved_tensors.SavedForward, "before_read"), (ParamGroup, "wait")],
    ids=["gather", "wait"],
)
def test_planted_defects_are_found(owner: Any, name: str) -> None:
    with pytest.raises(RankError):
        run_ranks(left_out, 2, owner, name)
