"""A decoder sharded by this library. Arguments name the layout ("flat", "block-atomic",
"tensor-atomic", "per-tensor"), and what else differs: "hsdp", "tensor-parallel", "mixed",
"offload", "quantized", "muon", "accumulate", "checkpoint", "zero1", "zero2"."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import (
    BlockAtomic,
    CPUOffloadPolicy,
    Flat,
    FsdpContext,
    MixedPrecisionPolicy,
    PerTensor,
    QuantizedCommPolicy,
    TensorAtomic,
    fully_shard,
)
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_

GIVEN = set(sys.argv[1:])
LAYOUTS = {
    "flat": Flat(),
    "block-atomic": BlockAtomic(rows=4),
    "tensor-atomic": TensorAtomic(),
    "per-tensor": PerTensor(),
}
WORDS, WIDTH, HEADS = 128, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "checkpoint" in GIVEN:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            w(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


PLAN: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
PLAN |= {name: RowwiseParallel() for name in ("o", "down")}

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("cpu:gloo,cuda:nccl")
ranks = dist.get_world_size()
torch.manual_seed(0)
model: Any = nn.Sequential(
    nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, WORDS)
)
if "offload" not in GIVEN:
    model.cuda()
if "tensor-parallel" in GIVEN:
    world = init_device_mesh("cuda", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model[1:-1]:
        parallelize_module(block, world["tp"], PLAN)
    mesh = world["dp"]
elif "hsdp" in GIVEN:
    mesh = init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
else:
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("shard",))
ctx = FsdpContext(mesh, layout=next((LAYOUTS[name] for name in GIVEN if name in LAYOUTS), Flat()))
options: dict[str, Any] = {}
if "mixed" in GIVEN:
    options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
if "offload" in GIVEN:
    options["offload_policy"] = CPUOffloadPolicy()
if "quantized" in GIVEN:
    options["comm_policy"] = QuantizedCommPolicy(torch.float8_e4m3fn, torch.float8_e5m2)
for block in model[1:-1]:
    fully_shard(block, ctx, **options)
sharded: Any = fully_shard(model, ctx, **options)
for stage in (1, 2):
    if f"zero{stage}" in GIVEN:
        sharded.set_zero_stage(stage)
parameters = list(model.parameters())
optimizer: Any
if "muon" in GIVEN:
    groups: list[dict[str, Any]] = [
        {"params": [each for each in parameters if each.dim() == 2]},
        {"params": [each for each in parameters if each.dim() != 2], "algorithm": "adamw"},
    ]
    optimizer = Muon(groups, lr=1e-3)
else:
    optimizer = AdamW(parameters, lr=1e-3)
for _ in range(4):
    for part in range(2 if "accumulate" in GIVEN else 1):
        sharded.set_is_last_backward(part == 1 or "accumulate" not in GIVEN)
        tokens = torch.randint(WORDS, (2, 16)).pin_memory().to(local, non_blocking=True)
        scores = model(tokens)
        loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())
        loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ctx.start_param_sync()
print(f"loss {loss.item():.3f}; {ctx.stats}")
dist.destroy_process_group()
