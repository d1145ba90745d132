"""Averages the weights on a side stream. With "wrong", the optimizer changes them meanwhile."""

import copy
import sys

import torch
from torch import nn

torch.set_default_device("cuda")
model = nn.Linear(64, 64)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
side, done = torch.cuda.Stream(priority=-1), torch.cuda.Event()
for _ in range(4):
    model(torch.randn(8, 64)).square().mean().backward()
    if "wrong" not in sys.argv:
        done.wait()
    optimizer.step()
    optimizer.zero_grad()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch._foreach_lerp_(list(average.parameters()), [p.data for p in model.parameters()], 0.01)
        done.record()
