"""Captures a step in a CUDA graph, and replays it. With "wrong", what it reads is written on a side
stream meanwhile."""

import sys

import torch
from torch import nn

model = nn.Linear(16, 16).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
x = torch.zeros(4, 16, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())


def step() -> None:
    optimizer.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    optimizer.step()


with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    step()
for _ in range(3):
    if "wrong" in sys.argv:
        with torch.cuda.stream(side):
            x.copy_(torch.randn(4, 16, device="cuda"))
    else:
        x.copy_(torch.randn(4, 16, device="cuda"))
    graph.replay()
torch.cuda.synchronize()
