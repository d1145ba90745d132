"""Keeps activations in pinned memory until backward, with checkpointing and dropout."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

blocks = nn.ModuleList(
    nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
).cuda()
optimizer = torch.optim.AdamW(blocks.parameters())
for _ in range(2):
    x = torch.randn(4, 32, device="cuda:0")
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
