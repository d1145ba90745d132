"""A Llama of transformers with random weights, on FSDP2 or, with --ours, on this library."""

import argparse
import os
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_overlap

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda", help="cpu: on gloo")
parser.add_argument("--hidden", type=int, default=1024)
parser.add_argument("--blocks", type=int, default=8)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--ours", action="store_true")
options = parser.parse_args()
if options.device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
mesh = init_device_mesh(options.device, (dist.get_world_size(),))
config = LlamaConfig(
    hidden_size=options.hidden,
    intermediate_size=11 * options.hidden // 4,
    num_hidden_layers=options.blocks,
    num_attention_heads=options.hidden // 64,
    num_key_value_heads=options.hidden // 128,
    vocab_size=32000,
    use_cache=False,
)
torch.manual_seed(0)
with torch.device(options.device):
    model = LlamaForCausalLM(config)
if options.ours:
    fsdp_overlap.fully_shard_model(model, mesh=mesh)
else:
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
sharded: Any = model
optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, foreach=True)
for _ in range(options.steps):
    began, busy = time.perf_counter(), time.process_time()
    tokens = torch.randint(config.vocab_size, (1, options.length), device=options.device)
    loss = sharded(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    took, busy = time.perf_counter() - began, time.process_time() - busy
    print(f"loss {loss.item():.3f}, {took:.1f} s ({busy:.1f} s of CPUs), peak {peak:.2f} GiB")
dist.destroy_process_group()
