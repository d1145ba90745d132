"""Trains a regression with FSDP2, parameters on the host, each stepped within the backward."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

DEVICE = "cuda"
WIDTH, DEPTH, BATCH, STEPS = 32, 3, 8, 3


def main() -> None:
    mesh = init_device_mesh(DEVICE, (4,))
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)),
        nn.Linear(WIDTH, 1),
    )
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        (model(x).squeeze(-1) - x.sum(-1)).square().mean().backward()


main()
