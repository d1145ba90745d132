"""What programs for GPUs do to begin, on the emulated device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap.tools.races import find_races


def begin_with_a_mesh() -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("hosts", "ranks"))
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor, group=mesh.get_group("hosts"))
    assert dist.get_world_size() == 4


def name_a_device_by_its_number() -> None:
    tensor = torch.empty(4, device=torch.cuda.current_device())
    assert tensor.device == torch.device("cuda", 0)
    assert torch.zeros(4, device=0).device == tensor.device


def test_a_mesh_may_begin_torch_distributed() -> None:
    assert not find_races(begin_with_a_mesh, ranks=4)


def test_a_number_is_a_device() -> None:
    assert not find_races(name_a_device_by_its_number)
