"""torch's context parallelism: every rank has a part of each sequence, and units are sharded over
the ranks of data and context parallelism together.

On a CPU, attention runs a kernel that torch's context parallelism does not know. `known_attention`
has it run one that it knows, for which a CPU has no code, and lends it that of the CPU's kernel.
What splits sequences, sends keys, values and their gradients around, and merges results is torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import cross_entropy

from fsdp_overlap import FsdpContext, fully_shard
from support.ranks import run_ranks
from support.tensor_parallel import DIM, WORDS, Transformer, whole

ROWS, LENGTH = 2, 8  # rows of one rank of `dp`, tokens of the whole sequence
PADDING = -100  # no target: cross_entropy() does not count it
aten = torch.ops.aten


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention``, which context parallelism sees as one of its kernels."""
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, dropout, is_causal, scale=scale
    )[0]


def efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    compute_log_sum: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, is_causal, attn_mask=bias, scale=scale
    )
    return out, log_sum, *torch.zeros(2, dtype=torch.long)  # a seed and an offset for dropout


def efficient_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout: float,
    needed: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, log_sum, dropout, is_causal, attn_mask=bias, scale=scale
    )
    return *gradients, None


@contextmanager
def known_attention() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
    library.impl("_scaled_dot_product_efficient_attention", efficient_attention, "CPU")
    library.impl(
        "_scaled_dot_product_efficient_attention_backward", efficient_attention_backward, "CPU"
    )
    try:
        yield
    finally:
        del library  # and with it what it registered


class Decoder(Transformer):
    """Its buffer has a row for each place of the sequence, so context parallelism splits it too."""

    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.linspace(-1, 1, LENGTH * DIM).view(LENGTH, DIM))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.temperature


def decoder() -> Decoder:
    torch.manual_seed(7)
    return Decoder()


def shard(model: Decoder, fully_shard: Any, divisor: float | None, **options: Any) -> Decoder:
    for unit in (*model.layers, model):
        fully_shard(unit, **options)
        if divisor is not None:
            unit.set_gradient_divide_factor(divisor)
            unit.set_force_sum_reduction_for_comms(True)  # FSDP2's other ways need NCCL
    return model


def step(
    model: Decoder, grid: DeviceMesh, tokens: torch.Tensor, targets: torch.Tensor, padded: bool
) -> torch.Tensor:
    """Forward and backward of this rank's part of its rows. Returns the loss of all ranks."""
    row, counted = grid["dp"].get_local_rank(), (targets != PADDING).sum()
    tokens, targets = (batch.split(ROWS)[row].clone() for batch in (tokens, targets))
    buffers = [tokens, targets, model.places]
    with context_parallel(grid["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 0]):
        assert tokens.shape == (ROWS, LENGTH // 2)
        scores = model(tokens).flatten(0, 1)
        if padded:
            loss = cross_entropy(scores, targets.flatten(), reduction="sum") / counted
        else:
            loss = cross_entropy(scores, targets.flatten())
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total if padded else total / dist.get_world_size()


def same(actual: Decoder, expected: Decoder) -> None:
    for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            whole(one.grad),
            whole(other.grad),
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )


def train(kind: str, padded: bool) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mesh = {
        "one mesh": lambda: init_device_mesh("cpu", (4,)),
        "flattened": grid["dp", "cp"]._flatten,  # torchtitan's way
        "copies": lambda: grid,
    }[kind]()
    divisor = 1.0 if padded else None
    ours = shard(decoder(), fully_shard, divisor, ctx=FsdpContext(mesh))
    torchs = shard(decoder(), torch_fully_shard, divisor, mesh=mesh)
    twin = decoder()
    models = (ours, torchs, twin)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        tokens, targets = torch.randint(WORDS, (2, 2 * ROWS, LENGTH), generator=generator)
        if padded:
            targets[0, 3:] = targets[3, 1:] = PADDING
        with known_attention():
            loss, torchs_loss = (step(m, grid, tokens, targets, padded) for m in (ours, torchs))
        twin_loss = cross_entropy(twin(tokens).flatten(0, 1), targets.flatten())
        twin_loss.backward()
        torch.testing.assert_close(loss, torchs_loss)
        torch.testing.assert_close(loss, twin_loss.detach())
        same(ours, torchs)
        same(ours, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["one mesh", "flattened", "copies"])
def test_training_equals_fsdp2s_and_that_on_whole_sequences(kind: str) -> None:
    run_ranks(train, 4, kind, False)


def test_with_padding_ranks_sum_their_part_of_the_mean_and_divide_by_one() -> None:
    run_ranks(train, 4, "one mesh", True)
