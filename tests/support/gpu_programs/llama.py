"""Llama under FSDP2, in bfloat16. It is built on the device that is given:
"meta", "cuda" or "cpu"."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, HEADS, KEYS, INNER, VOCABULARY, BLOCKS, TOKENS = 4096, 32, 8, 14336, 32000, 3, 2048


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        keys = KEYS * WIDTH // HEADS
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, keys, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def of_heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        def rotate(heads: torch.Tensor) -> torch.Tensor:
            one, other = heads.chunk(2, -1)
            turned = torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
            return turned.type_as(heads)

        query, key = rotate(of_heads(self.query(x))), rotate(of_heads(self.key(x)))
        value = of_heads(self.value(x))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        inner = self.norms[1](x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        self.register_buffer("frequencies", torch.empty(half), persistent=False)
        self.reset_frequencies()

    def reset_frequencies(self) -> None:
        half = len(self.frequencies)
        self.frequencies.copy_(1e4 ** (-torch.arange(half) / half))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(places, self.frequencies)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def train(where: str, steps: int = 10) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device(where):
        model = Llama()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if where == "meta":
        model.to_empty(device="cuda")
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)
        model.reset_frequencies()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        tokens = torch.randint(VOCABULARY, (1, TOKENS)).cuda(non_blocking=True)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        if not loss.isfinite():
            raise SystemExit(f"the loss of step {step} is {loss.item()}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1])
