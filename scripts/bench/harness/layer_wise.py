"""An optimizer that deals whole matrices to ranks, as Megatron-LM's layer-wise one does."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from harness import optimizers


def layer_wise(
    model: nn.Module, optimize: Callable[[nn.Module], Callable[[], None]] = optimizers.torchs
) -> Callable[[], None]:
    """A step of torch's optimizers, or others, on an unsharded model, of which each rank steps a
    part.

    Matrices are dealt by work, the largest first, to the rank with the least. Then every rank
    sends what it stepped to the others: one broadcast for each rank, all at once, from the very
    memory of the parameters. On gloo this is the fastest form of an all-gather whose parts differ
    in size.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dealt: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for parameter in sorted(model.parameters(), key=lambda p: -_work(p)):
        owner = min(range(ranks), key=loads.__getitem__)
        loads[owner] += _work(parameter)
        dealt[owner].append(parameter)
    flats = [_flatten(parameters) for parameters in dealt]
    step_mine = optimize(nn.ParameterList(dealt[rank]))

    def step() -> None:
        step_mine()
        works = [dist.broadcast(flat, src, async_op=True) for src, flat in enumerate(flats)]
        for work in works:
            work.wait()

    return step


def _work(parameter: torch.Tensor) -> int:
    shorter = min(parameter.shape) if parameter.dim() == 2 else 1
    return parameter.numel() * shorter


def _flatten(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Moves ``parameters`` into one piece of memory, which is returned."""
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view(parameter.shape)
    return flat
