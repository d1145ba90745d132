"""Trains, and computes the norm of the weights on a side stream. With "wrong", the side stream does
not wait for the optimizer."""

import sys

import torch
from torch import nn

device = torch.device("cuda")
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
side = torch.cuda.Stream()
norm = torch.zeros((), device=device)

for _ in range(4):
    x, y = torch.randn(16, 32, device=device), torch.randn(16, 1, device=device)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.step()
    optimizer.zero_grad()
    if "wrong" not in sys.argv:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        norm.copy_(sum(p.square().sum() for p in model.parameters()))
torch.cuda.synchronize()
print(f"loss {loss.item():.3f}, norm {norm.item():.3f}")
