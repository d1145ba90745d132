"""Models with fewer blocks. Each block adds the same to a step's time and memory, so that short
models tell what long ones take."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from torch import nn

from fsdp_overlap.fully_shard import find_blocks


class Run(NamedTuple):
    """Equal blocks that follow each other in a list, from ``start`` on."""

    modules: nn.ModuleList
    start: int
    length: int


def longest_run(model: nn.Module) -> Run | None:
    """The most blocks in a row whose parameters have the same names and shapes, if a list has
    them."""
    blocks = set(find_blocks(model))
    runs = []
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList):
            start = 0
            for is_like, alike in groupby(modules, _looks):
                members = list(alike)
                if is_like and blocks.issuperset(members):
                    runs.append(Run(modules, start, len(members)))
                start += len(members)
    return max(runs, key=lambda run: run.length, default=None)


def shorten(model: nn.Module, blocks: int) -> None:
    """Leaves so many blocks of the longest run.

    Raises:
        ValueError: there are fewer.
    """
    run = longest_run(model)
    if run is None or run.length < blocks:
        raise ValueError(f"{type(model).__name__} has no {blocks} equal blocks in a list")
    del run.modules[run.start + blocks : run.start + run.length]


def _looks(module: nn.Module) -> tuple[object, ...]:
    shapes = [(name, parameter.shape) for name, parameter in module.named_parameters()]
    return (type(module), *shapes) if shapes else ()
