"""Linears of bitsandbytes with adapters beside them, quantized on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn

WIDTH = 64

KINDS: dict[str, Any] = {
    f"{bits} in {str(storage).removeprefix('torch.')}{' twice' if twice else ''}": partial(
        bnb.nn.Linear4bit,
        compute_dtype=torch.float32,
        compress_statistics=twice,
        quant_type=bits,
        quant_storage=storage,
    )
    for bits, storage, twice in (
        ("nf4", torch.uint8, False),
        ("nf4", torch.uint8, True),
        ("nf4", torch.bfloat16, False),
        ("fp4", torch.bfloat16, True),
        ("fp4", torch.float32, False),
    )
}
KINDS["int8"] = partial(bnb.nn.Linear8bitLt, has_fp16_weights=False)
KINDS["int8 with outliers"] = partial(bnb.nn.Linear8bitLt, has_fp16_weights=False, threshold=6.0)


def quantized(kind: str) -> nn.Module:
    linear = KINDS[kind](WIDTH, WIDTH, bias=False)
    # Else an evaluation on a CPU with AVX512-BF16 replaces weights for good.
    linear.support_avx512bf16_for_cpu = False
    return linear.to("cpu")  # which quantizes


class Adapted(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.base = quantized(kind)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + self.base(x) + self.up(self.down(x))


def build(kind: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(kind), Adapted(kind))


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what stands in a state dict beside parameters."""
    own = dict(model.named_parameters())
    return {name: value for name, value in model.state_dict().items() if name not in own}


def take_statistics(model: Any, state: dict[str, Any]) -> None:
    """Put what a state dict has beside the bytes where bitsandbytes looks for it, as transformers
    does when it loads. ``load_state_dict()`` of a Linear4bit does not."""
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            prefix = f"{name}.weight."
            own = {key: value for key, value in state.items() if key.startswith(prefix)}
            found = bnb.functional.QuantState.from_dict(own, torch.device("cpu"))
            module.quant_state = module.weight.quant_state = found
