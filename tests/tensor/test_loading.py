"""The ops of sharded tensors and what wraps torch's checkpoints are loaded before they are needed,
and not by fully_shard()."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from fsdp_overlap import FsdpContext, fully_shard

def is_loaded(name):
    return f"fsdp_overlap.tensor.{name}" in sys.modules

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
model = fully_shard(nn.Linear(4, 4), FsdpContext(init_device_mesh("cpu", (2,))))
weight = model.weight
assert not any(map(is_loaded, ("ops", "creation", "dcp")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "weight.detach()",
        "model.state_dict()",
        "list(model.parameters())",
        "model.load_state_dict({}, strict=False)",
    ],
)
def test_the_first_use_loads_them(use: str) -> None:
    ends = 'assert all(map(is_loaded, ("ops", "creation", "dcp")))'
    subprocess.run([sys.executable, "-c", f"{PROGRAM}\n{use}\n{ends}"], check=True)
