"""FSDP2 on NCCL: "mixed" computes in bfloat16, "offload" keeps parameters on the host, "hsdp"
replicates over half of the ranks."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
ranks = dist.get_world_size()
mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("shard",))
if "hsdp" in sys.argv:
    mesh = init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
options: dict[str, Any] = {"mesh": mesh}
if "mixed" in sys.argv:
    options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
if "offload" in sys.argv:
    options["offload_policy"] = CPUOffloadPolicy()
with torch.device("meta"):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(100, 32), nn.TransformerEncoder(layer, 3), nn.Linear(32, 100)
    )
for each in model[1].layers:
    fully_shard(each, **options)
fully_shard(model, **options)
model.to_empty(device="cpu" if "offload" in sys.argv else "cuda")
for parameter in model.parameters():
    nn.init.normal_(parameter.to_local(), std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
for _ in range(3):
    tokens = torch.randint(100, (2, 8), device="cuda")
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
