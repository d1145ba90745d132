"""A transformer as users of tensor parallelism write it, and how they parallelize it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_overlap import FsdpContext, RaggedDTensor, fully_shard
from fsdp_overlap.optim import AdamW, clip_grad_norm_
from support.held import held_of

# Not even over two ranks: so are the embedding and the head.
WORDS = 11
DIM, HEADS = 8, 4
ROWS, LENGTH = 2, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(DIM, DIM) for _ in range(3))
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # This rank's heads.
        q, k, v = (
            w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, 2 * DIM)
        self.w2 = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.gelu(self.w1(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """Tokens ``[rows, LENGTH]`` to scores ``[rows, LENGTH, WORDS]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, WORDS)
        self.temperature = nn.Parameter(torch.ones(WORDS))  # which nobody parallelizes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.temperature


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Return tensor and sequence parallelism over ``mesh``."""
    gathered: Any = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "norm1": SequenceParallel(),
                "attention": gathered,
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(),
                "feed_forward": gathered,
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    return model


def batches(count: int, copies: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token and targets of all data-parallel ranks, ``[copies * ROWS, LENGTH]`` each."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, copies * ROWS, LENGTH)
    return [
        tuple(torch.randint(WORDS, shape, generator=generator))  # type: ignore[misc]
        for _ in range(count)
    ]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


def plain(seed: int = 7, dtype: torch.dtype = torch.float64) -> Transformer:
    torch.manual_seed(seed)
    return Transformer().to(dtype)


def shard(model: Transformer, ctx: FsdpContext, **options: Any) -> Transformer:
    for layer in model.layers:
        fully_shard(layer, ctx, **options)
    return fully_shard(model, ctx, **options)


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(actual: nn.Module, expected: nn.Module, what: str, of: Any = lambda p: p) -> None:
    """Each rank compares what it holds of ranges; to put them together takes longer than a step."""
    for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        mine, theirs = of(one), of(other)
        if isinstance(mine, RaggedDTensor) and not isinstance(theirs, DTensor):
            assert isinstance(theirs, torch.Tensor)
            theirs = held_of(theirs.detach(), mine)
            mine = mine.detach().to_local().flatten()
        close(mine, theirs, f"{what} of {name}")


def same_together(actual: nn.Module, expected: nn.Module) -> None:
    for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        close(one, other, name)


def close(actual: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    torch.testing.assert_close(
        whole(actual),
        whole(expected),
        rtol=1e-9,
        atol=1e-11,
        msg=lambda text: f"{what}: {text}",
    )


def grad(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


def mine(mesh: DeviceMesh, batch: torch.Tensor) -> torch.Tensor:
    """Return the rows of this data-parallel rank."""
    return batch.split(ROWS)[mesh["dp"].get_local_rank()]


def mean_loss(mesh: DeviceMesh, loss: torch.Tensor) -> torch.Tensor:
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh["dp"].get_group())
    return mean / mesh["dp"].size()


def train(
    mesh: DeviceMesh, model: nn.Module, twin: nn.Module, optimizer: Any, steps: int = 2
) -> None:
    """``model`` on this rank's rows and its unsharded ``twin`` on all, compared at every step."""
    mine_steps, twin_steps = optimizer(model.parameters()), optimizer(twin.parameters())
    for tokens, targets in batches(steps, mesh["dp"].size()):
        loss = loss_of(model, mine(mesh, tokens), mine(mesh, targets))
        loss.backward()
        twin_loss = loss_of(twin, tokens, targets)
        twin_loss.backward()
        torch.testing.assert_close(mean_loss(mesh, loss), twin_loss.detach())
        same(model, twin, "gradient", grad)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
        same(model, twin, "clipped gradient", grad)
        for each in (mine_steps, twin_steps):
            each.step()
            each.zero_grad()
        same(model, twin, "value")
    same_together(model, twin)


def adamw(parameters: Any) -> Any:
    return AdamW(parameters, lr=0.05)
