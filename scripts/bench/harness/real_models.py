"""The shapes of real models, as units of parameters."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_overlap.layout import ParamSpec

Shapes = list[tuple[int, ...]]


def llama(width: int, hidden: int) -> Shapes:
    attention: Shapes = [(width, width), (1024, width), (1024, width), (width, width)]
    return [*attention, (hidden, width), (hidden, width), (width, hidden)]


_MLA: Shapes = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]

# Blocks, vocabulary, width, shapes of a block.
MODELS: dict[str, tuple[int, int, int, Shapes]] = {
    "GPT-2 XL": (48, 50257, 1600, [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)]),
    "Llama-3 8B": (32, 128256, 4096, llama(4096, 14336)),
    "Llama-3 70B": (80, 128256, 8192, llama(8192, 28672)),
    "Llama-3 405B": (126, 128256, 16384, llama(16384, 53248)),
    "DeepSeek-V3": (58, 129280, 7168, _MLA + [(2048, 7168)] * 512 + [(7168, 2048)] * 256),
    "DeepSeek-V3, stacked": (
        58,
        129280,
        7168,
        [*_MLA, (256, 2048, 7168), (256, 2048, 7168), (256, 7168, 2048)],
    ),
}


def units_of(model: str) -> list[list[ParamSpec]]:
    """One unit a block, and the root with embedding, last norm and output head."""
    blocks, vocabulary, width, shapes = MODELS[model]
    dtype = torch.bfloat16
    block = [ParamSpec("norm1.weight", (width,), dtype)]
    block += [ParamSpec(f"w{i}.weight", shape, dtype) for i, shape in enumerate(shapes)]
    block += [ParamSpec("norm2.weight", (width,), dtype)]
    root = [
        ParamSpec("embedding.weight", (vocabulary, width), dtype, is_embedding=True),
        ParamSpec("norm.weight", (width,), dtype),
        ParamSpec("output.weight", (vocabulary, width), dtype),
    ]
    return [block] * blocks + [root]


class Unit(nn.Module):
    """Parameters of these shapes; nobody computes here."""

    def __init__(self, specs: list[ParamSpec]) -> None:
        super().__init__()
        for number, spec in enumerate(specs):
            self.register_parameter(f"w{number}", nn.Parameter(torch.empty(spec.shape)))


def on_meta(model: str, blocks: int | None = None) -> Unit:
    """A model on the meta device, or its first blocks: the root, with each block as a child."""
    *inner, root = units_of(model)
    with torch.device("meta"):
        made = Unit(root)
        for number, block in enumerate(inner[:blocks]):
            made.add_module(f"blocks_{number}", Unit(block))
    return made
