"""Draws a training step of your model on 64 GPUs, which need not be there, as timeline.png.

Put your model and its batch into ``program``, and run it on any machine:

    python docs/examples/timeline.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, find_blocks, fully_shard
from fsdp_overlap.tools.profiling import Report
from fsdp_overlap.tools.profiling.plot import write_png
from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Step, simulate

GPUS = 64


def program() -> Step:
    with torch.device("emulated"):  # tensors with shapes and without memory
        layer = nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True)
        model = nn.TransformerEncoder(layer, num_layers=6)
        batch = torch.empty(1, 4096, 4096)
    ctx = FsdpContext(init_device_mesh("emulated", (GPUS,)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in find_blocks(model):
        fully_shard(block, ctx, mp_policy=policy)
    fully_shard(model, ctx, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    costs = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))
    prediction = simulate(program, GPUS, costs)
    write_png({"prediction": Report((prediction.report,))}, "timeline.png")
    print(f"{prediction.seconds:.3f} s a step, {prediction.reserved / 2**30:.1f} GiB a GPU")
