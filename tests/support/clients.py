"""Other people's training programs in ranks, and whether two libraries trained alike."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn

import fsdp_overlap
from fsdp_overlap import RaggedDTensor
from support.examples import EXAMPLES


@contextlib.contextmanager
def example(name: str) -> Iterator[Any]:
    """An example program, in a rank that looks as if torchrun had started it."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
    }
    # Clients leave variables behind by which they know each other. These ranks talk by gloo, so
    # that programs must not find GPUs.
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        sys.path.insert(0, str(EXAMPLES))
        yield importlib.import_module(name)


def forget_accelerators() -> None:
    """Of one process accelerate expects one configuration."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def check_alike(ours: nn.Module, theirs: nn.Module) -> None:
    values, expected = whole(ours), whole(theirs)
    assert values.keys() == expected.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def check_whose(ours: nn.Module, theirs: nn.Module) -> None:
    """Each has its units where the other has them, and is of its library alone."""
    units = [
        [name for name, module in model.named_modules() if isinstance(module, cls)]
        for model, cls in ((ours, fsdp_overlap.FSDPModule), (theirs, fsdp2.FSDPModule))
    ]
    assert units[0] == units[1] != []
    assert not any(isinstance(module, fsdp_overlap.FSDPModule) for module in theirs.modules())
    assert all(isinstance(parameter, RaggedDTensor) for parameter in ours.parameters())
    assert not any(isinstance(parameter, RaggedDTensor) for parameter in theirs.parameters())
