"""A model of experts that are divided among ranks, and its training beside an undivided twin."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_overlap import FsdpContext, RaggedDTensor, fully_shard
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.optim import AdamW, clip_grad_norm_
from support.twins import same

EXPERTS = 4
WIDTH = 6
ROWS = 8


class Experts(nn.Module):
    """``weight[e]`` for each of this rank's experts, of ``EXPERTS`` in all, plain or a DTensor of
    all. Token ``i`` goes to expert ``i % EXPERTS``: each rank of ``group`` sends every other one
    those of its experts."""

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return through_experts(x, self.weight, self.group)


def through_experts(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    tokens = x.view(-1, EXPERTS, WIDTH).transpose(0, 1)  # [expert, token, width]
    if group is None:
        return torch.tanh(tokens @ weight).transpose(0, 1).reshape(x.shape)
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    ranks, local = group.size(), weight.shape[0]
    sent = tokens.contiguous().flatten()
    received = exchange(sent, group).view(ranks, local, -1, WIDTH)
    done = torch.tanh(received.transpose(0, 1).flatten(1, 2) @ weight)
    back = done.view(local, ranks, -1, WIDTH).transpose(0, 1).contiguous().flatten()
    returned = exchange(back, group).view(EXPERTS, -1, WIDTH)
    return returned.transpose(0, 1).reshape(x.shape)


def exchange(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return ``all_to_all`` of equal parts, through which gradients flow."""
    sizes = [values.numel() // group.size()] * group.size()
    exchanged = all_to_all_single_autograd(values, sizes, sizes, group)
    assert isinstance(exchanged, torch.Tensor)
    return exchanged


class Layer(nn.Module):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.dense(x))


class Moe(nn.Sequential):
    """Two layers whose experts are divided among the ranks of ``ep``, if there are any: as plain
    tensors, or as DTensors, which know how many there are in all."""

    def __init__(self, ep: DeviceMesh | None, with_dtensors: bool = False) -> None:
        torch.manual_seed(11)
        layers = []
        group = None if ep is None else ep.get_group()
        for _ in range(2):
            weight = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.double) / WIDTH**0.5
            if ep is not None and with_dtensors:
                weight = distribute_tensor(weight, ep, [Shard(0)], src_data_rank=None)
            elif group is not None:
                weight = weight.chunk(group.size())[group.rank()].clone()
            layers.append(Layer(Experts(weight, group)))
        super().__init__(*layers)
        self.double()


def meshes() -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Return of all four ranks: the whole, the one that experts are sharded over, the one that they
    are divided among."""
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
    return whole, grid["shard"], grid["ep"]


def shard(model: Moe, whole: DeviceMesh, shards: DeviceMesh, ctx: FsdpContext) -> None:
    for layer in model:
        fully_shard(layer.experts, ctx, mesh=shards)
        layer.experts.set_gradient_divide_factor(whole.size())
        fully_shard(layer, ctx)
    fully_shard(model, ctx)


def train(layout_is_whole: bool, with_dtensors: bool) -> None:
    whole, shards, ep = meshes()
    model, twin = Moe(ep, with_dtensors), Moe(None)
    ctx = FsdpContext(whole, layout=TensorAtomic()) if layout_is_whole else FsdpContext(whole)
    if layout_is_whole:
        experts = [layer.experts for layer in model]
        ctx.plan_layout([*experts, *model, model], meshes=dict.fromkeys(experts, shards))
    shard(model, whole, shards, ctx)
    optimizer = AdamW(model.parameters(), lr=0.05)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randn(4, ROWS, WIDTH, generator=generator, dtype=torch.double)
        loss = model(x[dist.get_rank()]).square().mean()
        loss.backward()
        torch.stack([twin(rows).square().mean() for rows in x]).mean().backward()
        compare(model, twin, ep, of_gradients=True)
        # Of plain experts nobody can tell that other ranks have others.
        clipped = nn.Module.parameters if with_dtensors else expert_free
        norm = clip_grad_norm_(clipped(model), 0.1)
        expected = nn.utils.clip_grad_norm_(clipped(twin), 0.1)
        torch.testing.assert_close(norm, expected)
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
        compare(model, twin, ep, of_gradients=False)
        assert ctx.stats.current_full_buffers == ctx.stats.current_reduce_inputs == 0


def expert_free(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "experts" not in name]


def compare(model: nn.Module, twin: nn.Module, ep: DeviceMesh, of_gradients: bool) -> None:
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        actual, expected = (parameter.grad, other.grad) if of_gradients else (parameter, other)
        assert isinstance(actual, RaggedDTensor)
        assert expected is not None
        expected = expected.detach()
        if "experts" in name and actual.device_mesh.ndim == 1:  # this rank's, by themselves
            expected = expected.chunk(ep.size())[ep.get_local_rank()]
        same(actual.full_tensor().detach(), expected, name)
