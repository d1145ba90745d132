"""Programs of training on the modelled device, as one rank of several that exist in name only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from fsdp_overlap import FsdpContext
from fsdp_overlap.modelled import ModelledDevice, active, running
from fsdp_overlap.modelled.torch_module import is_available
from fsdp_overlap.optim import AdamW
from support.nccl_like import unseen
from support.twins import loss_of
from support.zoo import VOCABULARY, ZOO

NAMES = ("replicate", "shard")


class Nobody(dist.ProcessGroup):
    """One of several ranks, of which the others do not exist. Lists are gathered as if the others
    held the same, so that ranks agree; else nothing moves. Good for the order of operations, not
    for values."""

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _issue(self, kind: str, writes: Any, reads: Any = ()) -> dist.Work:
        flat = [[t for t in tree_leaves(each) if t.numel()] for each in (reads, writes)]
        # Of each tensor torch itself would say that it is on the host, within its own collectives.
        if is_available() and any(active().is_here(t) for each in flat for t in each):
            active().issue(self, kind, *flat)
        return _finished()

    def _allgather_base(self, output: Any, input: Any, opts: object = None) -> dist.Work:
        return self._issue("all_gather", output, input)

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: object = None
    ) -> dist.Work:
        return self._issue("all_gather", outputs, inputs)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: object = None) -> dist.Work:
        return self._issue("reduce_scatter", output, input)

    def allgather(self, outputs: Any, inputs: Any, opts: object = None) -> dist.Work:
        with unseen():
            for output in outputs[0]:
                if output.shape == inputs[0].shape:
                    output.detach().copy_(inputs[0])
        return self._issue("all_gather", outputs, inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: object = None) -> dist.Work:
        return self._issue("reduce_scatter", outputs, inputs)

    def allreduce(self, tensors: Any, opts: object = None) -> dist.Work:
        return self._issue("all_reduce", tensors)

    def broadcast(self, tensors: Any, opts: object = None) -> dist.Work:
        return self._issue("broadcast", tensors)

    def alltoall_base(self, output: Any, input: Any, *sizes: object) -> dist.Work:
        return self._issue("all_to_all", output, input)

    def barrier(self, opts: object = None) -> dist.Work:
        return _finished()

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: object = None
    ) -> dist.Work:
        return self._issue("reduce_scatter", outputs, inputs)

    # What later releases of torch call some of them.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _finished() -> dist.Work:
    future: Future[list[torch.Tensor]] = Future()
    future.set_result([])
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)
    return work


BACKEND = "nobody"
dist.Backend.register_backend(
    BACKEND,
    lambda store, rank, world_size, timeout: Nobody(rank, world_size),
    devices=["cpu", "modelled"],
)


@contextmanager
def fake_ranks(world_size: int = 4, backend: str = BACKEND) -> Iterator[None]:
    """Makes this process the first of ``world_size`` ranks, of which the others do not exist.
    Within another, that one is gone afterwards."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Program:
    """A model of the zoo on the modelled device, its context and its optimizer."""

    def __init__(
        self,
        name: str = "layers",
        dims: tuple[int, ...] = (4,),
        optimizer: Callable[..., torch.optim.Optimizer] | None = AdamW,
        reduce_dtype: torch.dtype | None = None,
        build: Callable[[], nn.Module] | None = None,
        shard_options: dict[str, Any] | None = None,
        optimizer_options: dict[str, Any] | None = None,
        **context_options: Any,
    ) -> None:
        torch.manual_seed(7)
        mesh = init_device_mesh("modelled", dims, mesh_dim_names=NAMES[-len(dims) :])
        zoo_build, shard = ZOO[name]
        self.model: Any = (build or zoo_build)().to("modelled")
        self.ctx = FsdpContext(mesh, **context_options)
        options = shard_options or {}
        if reduce_dtype is not None:
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        shard(self.model, self.ctx, **options)
        self.optimizer: Any = None
        if optimizer is not None:
            # Muon is for a whole model.
            takes_model = optimizer.__name__ == "Muon"
            what = self.model if takes_model else self.model.parameters()
            self.optimizer = optimizer(what, lr=0.01, **(optimizer_options or {}))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = torch.randint(VOCABULARY, (2, 3, 5), device="modelled")
        return tokens, targets

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        tokens, targets = batch or self.batch()
        return loss_of(self.model(tokens), targets)

    def backward(self, batch: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        self.forward(batch).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.backward()
            self.step()


def run(program: Callable[[], object], **options: Any) -> ModelledDevice:
    """What the model found in ``program``."""
    with running(ModelledDevice(**options)) as device:
        program()
    return device


def trained(steps: int = 3, **options: Any) -> Callable[[], None]:
    """A program that trains so many steps."""
    return partial(_train, steps, options)


def _train(steps: int, options: dict[str, Any]) -> None:
    Program(**options).train(steps)
