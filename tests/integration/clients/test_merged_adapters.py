"""PEFT merges adapters into sharded weights, and takes them out again, as into whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from fsdp_overlap.layout import BlockAtomic, Flat
from support.ranks import run_ranks

peft: Any = pytest.importorskip("peft")

LINEAR = ["up", "down"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 3, "target_modules": [*LINEAR, "embedding"]}),
    "lora with biases": ("LoraConfig", {"r": 3, "target_modules": LINEAR, "lora_bias": True}),
    "dora": ("LoraConfig", {"r": 3, "target_modules": LINEAR, "use_dora": True}),
    "ia3": ("IA3Config", {"target_modules": LINEAR, "feedforward_modules": ["down"]}),
    "loha": ("LoHaConfig", {"r": 2, "target_modules": LINEAR}),
    "lokr": ("LoKrConfig", {"r": 2, "target_modules": LINEAR}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(9, 13)
        self.down = nn.Linear(13, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 9)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(tokens))


def adapted(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    kind, options = CONFIGS[name]
    model = peft.get_peft_model(Model().to(dtype), getattr(peft, kind)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # adapters begin as zeros
    return model


def merged(layout: Any, dtype: torch.dtype) -> None:
    tokens = torch.arange(11).roll(torch.distributed.get_rank())
    # DTensors of torch 2.11 have no Kronecker product of rows that are cut unevenly.
    is_old = torch.__version__.startswith("2.11") and isinstance(layout, PerTensor)
    for name in (name for name in CONFIGS if name != "lokr" or not is_old):
        for safe in (False, True):
            model, twin = adapted(name, dtype), adapted(name, dtype)
            ctx = FsdpContext(layout=layout)
            for module in (*model.base_model.model.blocks, model):
                fully_shard(module, ctx)

            def check(what: str, model: Any = model, twin: Any = twin, name: str = name) -> None:
                with torch.no_grad():
                    assert torch.equal(model(tokens), twin(tokens)), f"{name}: {what}"
                wanted, found = twin.state_dict(), model.state_dict()
                assert found.keys() == wanted.keys()
                for key, value in found.items():
                    assert torch.equal(value.full_tensor(), wanted[key]), f"{name}: {what}: {key}"

            check("adapted")
            for each in (model, twin):
                each.merge_adapter(safe_merge=safe)
            check("merged")
            for each in (model, twin):
                each.unmerge_adapter()
            check("unmerged")
            for each in (model, twin):
                each.merge_and_unload(safe_merge=safe)
            check("unloaded")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(Flat(), torch.float32), (BlockAtomic(rows=1), torch.bfloat16), (PerTensor(), torch.float32)],
)
def test_merging_gives_the_bits_of_whole_weights(layout: Any, dtype: torch.dtype) -> None:
    run_ranks(merged, 2, layout, dtype, timeout=150)
