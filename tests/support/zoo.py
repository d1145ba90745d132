"""Small models and ways to shard them, for tests that compare with an unsharded twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, fully_shard

VOCABULARY = 13
WIDTH = 6
ROWS = 3
"""Rows of each rank's batch."""


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens ``[rows, length]`` to scores ``[rows, length, VOCABULARY]``."""

    def __init__(self, layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


def shard_layers(model: Any, ctx: FsdpContext, **options: Any) -> None:
    """One unit for each layer, the root takes the rest."""
    for layer in model.layers:
        fully_shard(layer, ctx, **options)
    fully_shard(model, ctx, **options)


@dataclass
class Outputs:
    scores: torch.Tensor
    extra: dict[str, tuple[torch.Tensor, ...]]
    note: str = ""


class ManyOutputs(nn.Module):
    """Takes keyword arguments; returns a dataclass with a dict of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: torch.Tensor, options: dict[str, float]) -> Outputs:
        first = self.a(x) * options["scale"]
        return Outputs(first, {"more": (self.b(x), first.argmax(-1))}, "kept")


class NestedOutputs(Model):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.many = nn.ModuleList(ManyOutputs() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, many in enumerate(self.many):
            out = many(x=x, options={"scale": 0.5})
            assert isinstance(out, Outputs)
            assert out.note == "kept"
            extra, best = out.extra["more"]
            # The last one's `scores` are not used: backward reaches it through `extra` alone.
            x = x + extra + best.unsqueeze(-1) if index else out.scores + extra
        return self.head(self.layers[0](x))


def shard_many(model: NestedOutputs, ctx: FsdpContext) -> None:
    for many in model.many:
        fully_shard(many, ctx)
    shard_layers(model, ctx)


class Nested(nn.Module):
    """A layer around a unit that runs in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = Block()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.inner(self.before(x)))


class NestedUnits(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Nested() for _ in range(3))


def shard_nested(model: NestedUnits, ctx: FsdpContext) -> None:
    for layer in model.layers:
        fully_shard(layer.inner, ctx)
    shard_layers(model, ctx)


class WithoutParameters(Model):
    """Units that own nothing: an activation, and a root whose parameters all lie in inner units."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Tanh()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.activation(self.head(self.embedding(tokens)))


def shard_everything(model: WithoutParameters, ctx: FsdpContext) -> None:
    fully_shard(model.activation, ctx)
    fully_shard(model.embedding, ctx)
    fully_shard(model.head, ctx)
    shard_layers(model, ctx)


class SkipBlock(Block):
    """Adds to a list what its caller uses later: it leaves otherwise than by the output."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)
        self.skips: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.skips.append(self.side(y))
        return y


class Skips(Model):
    """As a U-Net."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(SkipBlock() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        for layer in reversed(self.layers):
            x = torch.tanh(x + layer.skips.pop())
        return self.head(x)


class Tied(Model):
    """Embedding and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class TiedAcrossUnits(Tied):
    """So do two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


def shard_embedding_and_layers(model: TiedAcrossUnits, ctx: FsdpContext) -> None:
    """The root reads the embedding's weight, and the last layer that of the first."""
    fully_shard(model.embedding, ctx)
    shard_layers(model, ctx)


class Frozen(Model):
    """A frozen layer, and one that is frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[2].up.requires_grad_(False)
        self.layers[2].norm.bias.requires_grad_(False)
        self.embedding.requires_grad_(False)


class Unused(Model):
    """A layer that nobody runs, one whose output nobody uses, and a parameter that nobody reads."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.layers[1].spare = nn.Parameter(torch.ones(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        self.layers[2](x)
        return self.head(self.layers[1](self.layers[0](x)))


class UnusedOnSomeRanks(Model):
    """The middle layer's gradient is missing where the batch starts with an even token; so is one
    parameter of the last layer. Every rank runs every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embedding(tokens))
        odd = (tokens[:, :1, None] % 2 == 1).all(0, keepdim=True)
        if odd:
            x = x + self.layers[1](x)
        else:
            self.layers[1](x)
        x = self.layers[2](x)
        return self.head(x * self.layers[2].spare if False else x)


class SkippedOnSomeRanks(Model):
    """A residual stack in which a rank may drop what the middle layer gave."""

    def __init__(self) -> None:
        super().__init__(layers=6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            y = layer(x)
            if index != 3 or tokens[0, 0] % 2:
                x = x + y
        return self.head(x)


class FlattenedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1)


class ViewsEdited(Model):
    """Layers return views, which the model edits in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FlattenedBlock() for _ in range(3))

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        flat = layer(x)
        flat.relu_()
        return flat.view(x.shape)


class SharedLayer(Model):
    """One layer runs several times, in turn with another."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in (0, 1, 0, 0, 1):
            x = self.layers[index](x)
        return self.head(x)


class Checkpointed(Model):
    """Recomputes each layer in backward, called from outside the unit."""

    reentrant = False

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedInside(Model):
    """Recomputes the inside of each layer, from within the unit."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        reentrant = self.reentrant

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = Block()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.block, x, use_reentrant=reentrant)

        self.layers = nn.ModuleList(Inside() for _ in range(3))


class CheckpointedInsideReentrant(CheckpointedInside):
    reentrant = True


class CheckpointedGroups(Model):
    """Recomputes two units at a time."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__(layers=4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for pair in (self.layers[:2], self.layers[2:]):

            def run(x: torch.Tensor, pair: Any = pair) -> torch.Tensor:
                return pair[1](pair[0](x))

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedGroupsReentrant(CheckpointedGroups):
    reentrant = True


class Branches(Model):
    """Two layers beside each other, and a detached path through a third."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        side = self.layers[2](x.detach()).detach()
        return self.head(self.layers[0](x) + self.layers[1](x) + side)


class Buffers(Model):
    """Buffers are not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        for layer in self.layers:
            layer.register_buffer("shift", torch.linspace(0, 1, WIDTH))

    def run(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return layer(x) * self.scale + layer.shift


class Recurrent(Model):
    """``nn.LSTM`` keeps a list of its weights beside its parameters."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.lstm(x)[0]

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = self.Layer()


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum()


class Odd(Model):
    """Parameters of no dimension, of one element and of none, and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].scalar = nn.Parameter(torch.tensor(0.7))
        self.layers[1].one = nn.Parameter(torch.tensor([0.3]))
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.layers[2] = nn.Sequential(Empty(), Block())
        block_forward = Block.forward

        class Scaled(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                factor = self.scalar if hasattr(self, "scalar") else self.one
                return block_forward(self, x) * factor

        for layer in self.layers[:2]:
            layer.__class__ = Scaled

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.table[2]


def shard_odd(model: Odd, ctx: FsdpContext) -> None:
    fully_shard(model.layers[2][0], ctx)
    shard_layers(model, ctx)


class Deep(nn.Module):
    """Sixty modules within each other, every tenth a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        inner: nn.Module = nn.Linear(WIDTH, VOCABULARY)
        for _ in range(60):
            inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
        self.stack = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.stack(self.embedding(tokens))


def shard_deep(model: Deep, ctx: FsdpContext) -> None:
    stack = [module for module in model.modules() if isinstance(module, nn.Sequential)]
    for module in reversed(stack[::10]):
        fully_shard(module, ctx)
    fully_shard(model, ctx)


class Dynamic(Model):
    """Layers run in an order that changes with every iteration; some are skipped."""

    orders = ((0, 1, 2, 3), (3, 1, 0, 2), (0, 2), (3, 2, 1, 0), (3, 2, 1, 0), (1,), (0, 1, 2, 3))

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.iteration = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.orders[self.iteration % len(self.orders)]:
            x = self.layers[index](x)
        self.iteration += 1
        return self.head(x)


def shard_blocks_only(model: Model, ctx: FsdpContext) -> None:
    """No unit encloses the others."""
    for module in (model.embedding, *model.layers, model.head):
        fully_shard(module, ctx)


def shard_root_only(model: nn.Module, ctx: FsdpContext) -> None:
    fully_shard(model, ctx)


def shard_without_context(model: Model, ctx: FsdpContext) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)


Shard = Callable[[Any, FsdpContext], None]

ZOO: dict[str, tuple[Callable[[], nn.Module], Shard]] = {
    "layers": (Model, shard_layers),
    "root only": (Model, shard_root_only),
    "blocks only": (Model, shard_blocks_only),
    "without a context": (Model, shard_without_context),
    "nested units": (NestedUnits, shard_nested),
    "units without parameters": (WithoutParameters, shard_everything),
    "tied parameters": (Tied, shard_layers),
    "parameters tied across units": (TiedAcrossUnits, shard_embedding_and_layers),
    "frozen and partly frozen units": (Frozen, shard_layers),
    "unused parameters": (Unused, shard_layers),
    "unused on some ranks": (UnusedOnSomeRanks, shard_layers),
    "skipped on some ranks": (SkippedOnSomeRanks, shard_layers),
    "views edited in place": (ViewsEdited, shard_layers),
    "a layer that runs several times": (SharedLayer, shard_layers),
    "nested outputs and keyword arguments": (NestedOutputs, shard_many),
    "branches": (Branches, shard_layers),
    "checkpointed": (Checkpointed, shard_layers),
    "checkpointed, reentrant": (CheckpointedReentrant, shard_layers),
    "checkpointed inside": (CheckpointedInside, shard_layers),
    "checkpointed inside, reentrant": (CheckpointedInsideReentrant, shard_layers),
    "checkpointed groups": (CheckpointedGroups, shard_layers),
    "checkpointed groups, reentrant": (CheckpointedGroupsReentrant, shard_layers),
    "skips in a list": (Skips, shard_layers),
    "buffers": (Buffers, shard_layers),
    "recurrent": (Recurrent, shard_layers),
    "odd parameters": (Odd, shard_odd),
    "deep tree": (Deep, shard_deep),
    "dynamic order": (Dynamic, shard_layers),
}
