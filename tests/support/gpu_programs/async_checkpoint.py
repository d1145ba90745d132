"""Copies weights to pinned memory on a side stream, and writes them from a thread. With "wrong",
the thread does not wait for the copies. "dcp" lets torch.distributed.checkpoint do it."""

import sys
import tempfile
import threading

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
side, copied = torch.cuda.Stream(), torch.cuda.Event()
host = {name: torch.empty(p.shape, pin_memory=True) for name, p in model.state_dict().items()}


def write(folder: str) -> None:
    if "wrong" not in sys.argv:
        copied.synchronize()
    torch.save(host, f"{folder}/weights.pt")


def save(folder: str) -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for name, parameter in model.state_dict().items():
            host[name].copy_(parameter, non_blocking=True)
    copied.record(side)
    writer = threading.Thread(target=write, args=(folder,))
    writer.start()
    torch.cuda.current_stream().wait_event(copied)
    writer.join()


with tempfile.TemporaryDirectory() as folder:
    for step in range(3):
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "dcp" in sys.argv:
            dcp.async_save(model.state_dict(), checkpoint_id=f"{folder}/{step}").result()
        else:
            save(folder)
    if "dcp" not in sys.argv:
        model.load_state_dict(torch.load(f"{folder}/weights.pt", map_location="cuda"))
