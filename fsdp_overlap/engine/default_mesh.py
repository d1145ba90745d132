"""The mesh of a context that was given none."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def default_mesh() -> DeviceMesh:
    """A mesh of one dimension over all ranks.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "FsdpContext needs process groups: call torch.distributed.init_process_group() "
            "first, under torchrun, or pass a mesh"
        )
    return init_device_mesh(_device_type(), (dist.get_world_size(),))


def _device_type() -> str:
    """The device type of the default process group: the accelerator's, if there is one and the
    group has a backend other than gloo for it, and otherwise the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return "cpu"
    # The text is like "cpu:gloo,cuda:nccl".
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return "cpu" if backends.get(found.type, "gloo") == "gloo" else found.type
