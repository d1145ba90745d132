"""FullyShardedDataParallel, the first FSDP of torch. "mixed" computes in bfloat16, "offload" keeps
parameters on the host, "hybrid" replicates, "original" keeps the parameters' own names."""

import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
options: dict[str, Any] = {"use_orig_params": "original" in sys.argv}
if "mixed" in sys.argv:
    options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
if "offload" in sys.argv:
    options["cpu_offload"] = CPUOffload(offload_params=True)
if "hybrid" in sys.argv:
    options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    options["device_mesh"] = init_device_mesh("cuda", (2, dist.get_world_size() // 2))
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
model = nn.Sequential(nn.Embedding(100, 32), nn.TransformerEncoder(layer, 3), nn.Linear(32, 100))
wrapped = FullyShardedDataParallel(
    model,
    device_id=local,
    auto_wrap_policy=partial(
        transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
    ),
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    limit_all_gathers=True,
    **options,
)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
for _ in range(4):
    tokens = torch.randint(100, (2, 8)).to(local)
    loss = nn.functional.cross_entropy(wrapped(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    wrapped.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
