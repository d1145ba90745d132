"""FSDP2 on NCCL. Arguments choose what it uses: `python train_fsdp2.py mixed offload`."""

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WIDTH = 16
MESHES = {"hsdp": ((2, 2), ("replicate", "shard")), "tp": ((2, 2), ("shard", "tp"))}
chosen = set(sys.argv[1:])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.final = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[1 if "stray" in chosen else 0 :]:
            if "fails" in chosen and layer is self.layers[2]:
                chosen.remove("fails")
                raise FloatingPointError
            if "fails-backward" in chosen and layer is self.layers[2]:
                x.register_hook(fail)
            x = checkpoint(layer, x, use_reentrant=False) if "checkpoints" in chosen else layer(x)
        x = self.final(x)
        return x if "chunks" in chosen else self.head(x)


def fail(grad: torch.Tensor) -> None:
    chosen.discard("fails-backward")
    raise FloatingPointError


def shard() -> Any:
    """Build the model, sharded as the arguments say."""
    sizes, names = next(
        (MESHES[name] for name in MESHES if name in chosen), ((dist.get_world_size(),), ("shard",))
    )
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)
    model: Any = Model()
    if "tp" in chosen:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    options: dict[str, Any] = {"mesh": mesh["shard"] if "tp" in chosen else mesh}
    if "mixed" in chosen:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if "half" in chosen:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    if "offload" in chosen:
        options["offload_policy"] = CPUOffloadPolicy()
    else:
        model.cuda()
    for name, value in {"kept": False, "resharded": 2}.items():
        if name in chosen:
            options["reshard_after_forward"] = value
    for layer in model.layers:
        fully_shard(layer, **options)
    if "chunks" in chosen:
        fully_shard([model.final, model.head], **options)
    fully_shard(model, **options)
    return model


def set_up(model: Any) -> None:
    """Set what FSDP2 has methods for."""
    layers = list(model.layers)
    if "prefetch" in chosen:
        for layer, *after in zip(layers, layers[1:], layers[2:], strict=False):
            layer.set_modules_to_forward_prefetch(after)
        for layer, *after in zip(layers[::-1], layers[-2::-1], layers[-3::-1], strict=False):
            layer.set_modules_to_backward_prefetch(after)
    if "buffers" in chosen:
        model.set_reduce_scatter_max_input_buffers(2)
    if "hook" in chosen:
        for module in (model, *layers):
            module.set_all_reduce_hook(lambda grad: grad.mul_(0.5), stream=side)
    if "asynchronous" in chosen:
        for module in (model, *layers):
            module._set_unshard_async_op(True)


def backward(model: Any, x: torch.Tensor) -> None:
    if "chunks" not in chosen:
        model(x).float().square().mean().backward()
        return
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    for chunk in leaf.chunk(2):
        model.head(chunk).float().square().mean().backward()
    hidden.backward(leaf.grad)


def step(model: Any, optimizer: torch.optim.Optimizer, batches: int) -> None:
    for index in range(batches):
        is_last = index == batches - 1
        if "partial" in chosen:
            model.set_requires_all_reduce(is_last)
        elif "deferred" in chosen:
            model.set_is_last_backward(is_last)
        else:
            model.set_requires_gradient_sync(is_last)
        if "ahead" in chosen:
            for layer in model.layers:
                layer.unshard(async_op=True)
        if "now" in chosen:
            for layer in model.layers:
                layer.unshard()
        backward(model, torch.randn(8, 4, WIDTH, device="cuda"))
    if "tp" not in chosen:  # some parameters lie on one mesh, some on two
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if "event" in chosen:
        model.set_post_optim_event(torch.cuda.current_stream().record_event())


warnings.filterwarnings("ignore")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
side = torch.cuda.Stream()
model = shard()
set_up(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    try:
        step(model, optimizer, batches=2 if chosen & {"accumulate", "partial", "deferred"} else 1)
    except FloatingPointError:
        model.reset_iter_state()
with torch.no_grad():
    model(torch.randn(8, 4, WIDTH, device="cuda"))
dist.destroy_process_group()
