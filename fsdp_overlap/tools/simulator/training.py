"""The training step that is predicted: a model, how it is sharded, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, QuantizedCommPolicy, fully_shard
from fsdp_overlap.blocks import find_blocks
from fsdp_overlap.features.rows.layout import PerTensor
from fsdp_overlap.layout import Flat, LayoutRule
from fsdp_overlap.optim import AdamW, Muon
from fsdp_overlap.tools.simulator.context_parallel import shared_attention
from fsdp_overlap.tools.simulator.float8 import (
    check_linear_dtype,
    compute_in_float8,
    step_in_float8,
)
from fsdp_overlap.tools.simulator.losses import LOSSES, chunk_loss, loss_of
from fsdp_overlap.tools.simulator.mixture import COMM_BACKENDS, spread_experts
from fsdp_overlap.tools.simulator.models import check_positions, model_of, shorten
from fsdp_overlap.tools.simulator.simulate import Step
from fsdp_overlap.tools.simulator.tensor_parallel import parallelize
from fsdp_overlap.tools.torch_internals import flash_attention, masked_attention

DEVICE = "emulated"
ContextManager = AbstractContextManager[Any]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters()),
    "torch-adamw": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "muon": Muon,
}


_COUNTS = (
    "gpus",
    "replicas",
    "expert_parallel",
    "tensor_parallel",
    "context_parallel",
    "micro_batch_size",
    "sequence",
    "microbatches",
    "blocks_per_unit",
)


class Meshes(NamedTuple):
    """Ranks that shards lie over: ``experts`` for the experts of one rank, ``dense`` for all else.
    ``tokens`` is the group within which tokens travel to their experts; None if they need not.
    ``tensor``: the ranks that share each product; None if there is one. ``context``: those that
    share each sequence."""

    dense: DeviceMesh
    experts: DeviceMesh
    tokens: dist.ProcessGroup | None
    tensor: DeviceMesh | None
    context: dist.ProcessGroup | None


class SimulatedUnit(NamedTuple):
    """Modules that one call shards over ``mesh``. ``divisor`` is what gradients are divided by; 0
    for the number of ranks that they are reduced over."""

    modules: list[nn.Module]
    mesh: DeviceMesh
    divisor: int = 0

    def share(self, shard: Callable[..., Any], **options: Any) -> None:
        shard(self.modules if len(self.modules) > 1 else self.modules[0], **options)
        if self.divisor:
            first: Any = self.modules[0]
            first.set_gradient_divide_factor(self.divisor)


def _select() -> tuple[ContextManager, ContextManager]:
    products = count()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # Of products the first, the third and so on.
        is_kept = operator in KEPT or (operator in PRODUCTS and next(products) % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.linear.default}
KEPT = {flash_attention.default, masked_attention.default}
CHECKPOINTING: dict[str, Callable[[], tuple[ContextManager, ContextManager]]] = {
    "none": noop_context_fn,
    "selective": _select,
    "full": noop_context_fn,
}


@dataclass(frozen=True)
class Training:
    """A step of training of a language model.

    Args:
        model: the name of a model that comes with the library (:func:`known_models`), the path of
            a ``config.json`` of Hugging Face's transformers or of its folder, or
            ``module:function`` for a function that makes a module. The module maps token ids of
            shape ``[batch, sequence]`` to logits, or to what has ``.logits``.
        gpus: devices, one a rank.
        replicas: how many replicas of each shard there are.
        expert_parallel: how many ranks share the experts of a mixture, each with a part of them.
            Only of models of transformers, in which all experts get equally many tokens
            (:func:`spread_experts`).
        expert_parallel_comm_backend: ``"standard"`` sends a token once for each of its experts,
            ``"deepep"`` once for each rank that has some of them.
        tensor_parallel: how many neighboring ranks share the products of a block, and its sequences
            (:func:`parallelize`). They count as one rank for ``micro_batch_size``.
        context_parallel: how many neighboring ranks share each sequence. They count as one rank for
            ``micro_batch_size``.
        micro_batch_size: sequences of a rank in a microbatch.
        sequence: tokens in a sequence, no more than the model has positions.
        microbatches: forwards and backwards before each optimizer step.
        checkpointing: what blocks keep for backward: ``"none"`` keeps all, ``"full"`` their inputs
            alone, ``"selective"`` is as ``selective_ac_option`` says.
        selective_ac_option: ``"op"`` keeps attention's and every second product's output too, as
            torchtitan's default does; a number ``N`` checkpoints all of every N-th block.
        blocks_per_unit: how many blocks one ``fully_shard`` call takes.
        stage: as :meth:`FSDPModule.set_zero_stage` takes it. 3 frees weights after each use.
        layout: as :class:`FsdpContext` takes it.
        prefetch: as :class:`FsdpContext` takes it.
        implicit_units: as :class:`FsdpContext` takes it.
        dtype: of parameters at rest, and of optimizer states.
        param_dtype: as :class:`MixedPrecisionPolicy` takes it.
        reduce_dtype: as :class:`MixedPrecisionPolicy` takes it.
        gather_dtype: as :class:`QuantizedCommPolicy` takes it. Without, weights are gathered in
            ``param_dtype``. With linear layers in float8, ``torch.float8_e4m3fn`` in
            :class:`PerTensor` are torchao's gathers.
        linear_dtype: ``"float8"`` computes the linear layers of blocks in float8, by torchao.
            Without, they compute in ``param_dtype``.
        loss: ``"standard"`` computes it of logits in float32, ``"eager"`` does so by torch's own
            kernels where others are fused, ``"fused"`` puts gradients in the place of logits, by
            one kernel, ``"chunked"`` never has the logits of all tokens.
        optimizer: one of :data:`OPTIMIZERS`.
        reshard_after_forward: among how many neighboring ranks blocks keep their weights from
            forward to backward, as :func:`fully_shard` takes the number. Without, ``stage`` says.
        reduce_each: whether each microbatch's gradients are reduced. Else they stay whole until
            those of the last are, which takes more memory and less communication.
        blocks: how many of the model's equal blocks there are. Without, all of them.
    """

    model: str
    gpus: int
    replicas: int = 1
    expert_parallel: int = 1
    expert_parallel_comm_backend: str = "standard"
    tensor_parallel: int = 1
    context_parallel: int = 1
    micro_batch_size: int = 1
    sequence: int = 8192
    microbatches: int = 1
    checkpointing: str = "none"
    selective_ac_option: str = "op"
    blocks_per_unit: int = 1
    stage: int = 3
    layout: LayoutRule = field(default_factory=Flat)
    prefetch: int = 1
    implicit_units: bool = False
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    gather_dtype: torch.dtype | None = None
    linear_dtype: str | None = None
    loss: str = "standard"
    optimizer: str = "adamw"
    reshard_after_forward: int | None = None
    reduce_each: bool = False
    blocks: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.tensor_parallel > 1 and self.expert_parallel > 1:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} with expert_parallel="
                f"{self.expert_parallel}: leave one of the two at 1"
            )
        needs_all_words = self.loss in ("fused", "chunked")
        if self.tensor_parallel > 1 and (self.context_parallel > 1 or needs_all_words):
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} with context_parallel="
                f"{self.context_parallel} and loss={self.loss!r}: leave it at 1, or the others at "
                "1 and 'standard'"
            )
        if self.selective_ac_option != "op" and not self._every_block:
            raise ValueError(
                f"selective_ac_option={self.selective_ac_option!r}: must be op, or a number of "
                "blocks from 1 on"
            )
        tensor, wide = self.tensor_parallel, self.gpus // self.tensor_parallel
        experts, of_copy = self.expert_parallel, self.gpus // self.replicas
        context = self.context_parallel
        of = "GPUs that hold one copy cannot share"
        for total, parts, problem in (
            (self.sequence, tensor, f"{tensor} GPUs cannot share {self.sequence} tokens"),
            (self.sequence, context, f"{context} GPUs cannot share {self.sequence} tokens"),
            (self.gpus, tensor, f"{self.gpus} GPUs cannot share products {tensor} by {tensor}"),
            (wide, self.replicas, f"{wide} GPUs cannot hold {self.replicas} copies of a shard"),
            (of_copy, context, f"{of_copy} {of} sequences {context} by {context}"),
            (of_copy, experts, f"{of_copy} {of} experts {experts} by {experts}"),
        ):
            if total % parts:
                raise ValueError(f"{problem}: {total} is no multiple of {parts}")
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("checkpointing", CHECKPOINTING),
            ("expert_parallel_comm_backend", COMM_BACKENDS),
            ("loss", LOSSES),
        ):
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"{name}={given!r}: must be one of {', '.join(known)}")
        if self.expert_parallel_comm_backend != "standard" and experts == 1:
            raise ValueError(
                f"expert_parallel_comm_backend={self.expert_parallel_comm_backend!r} with "
                "expert_parallel=1, which sends no tokens: set that, or leave this out"
            )
        tokens = self.micro_batch_size * self.sequence // self.context_parallel
        check_linear_dtype(self.linear_dtype, tokens)
        if self.reshard_after_forward is not None and self.stage != 3:
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward} with stage={self.stage}, "
                "which keeps all weights: use stage 3"
            )

    @property
    def tokens(self) -> float:
        """What a GPU trains on in a step: its part, where several share a sequence."""
        sharing = self.tensor_parallel * self.context_parallel
        return self.micro_batch_size * self.sequence * self.microbatches / sharing

    @property
    def checkpoints_every(self) -> int:
        """The number of blocks of which one is checkpointed whole, and others are not. 0 if none
        says."""
        return self._every_block if self.checkpointing == "selective" else 0

    @property
    def _every_block(self) -> int:
        option = self.selective_ac_option
        return int(option) if option.isdecimal() else 0

    @property
    def gathers_in_float8(self) -> bool:
        """Whether weights travel as the float8 numbers that are multiplied, which is up to torchao
        then: it has one scale for each weight, and needs shards of whole rows."""
        return (
            self.linear_dtype is not None
            and self.gather_dtype is torch.float8_e4m3fn
            and self.layout == PerTensor()
        )

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """What weights are rounded to for the wire alone, by a :class:`QuantizedCommPolicy`."""
        return None if self.gathers_in_float8 else self.gather_dtype

    def program(self) -> Step:
        """Build and shard the model, and return what makes a step of it."""
        meshes = self._meshes()
        with torch.device(DEVICE):
            model = model_of(self.model)()
            check_positions(model, self.sequence)
            if self.blocks is not None:
                shorten(model, self.blocks)
            model.to(self.dtype)
            spread = spread_experts(model, meshes.tokens, self.expert_parallel_comm_backend)
            if self.loss == "chunked":
                chunk_loss(model)
        if self.linear_dtype is not None:
            compute_in_float8(model, self.gathers_in_float8)
        if meshes.tensor is not None:
            parallelize(model, meshes.tensor)
        if self.expert_parallel > 1 and not spread:
            raise ValueError(
                f"expert_parallel={self.expert_parallel}: {self.model} has no mixture of experts "
                "as transformers builds them"
            )
        sharded = self._shard(model, self._units_of(model, meshes, spread), meshes)
        optimizer = OPTIMIZERS[self.optimizer](sharded)

        shape = self.micro_batch_size, self.sequence // self.context_parallel
        attention: Callable[[], ContextManager] = nullcontext
        if meshes.context is not None:
            attention = partial(shared_attention, meshes.context)

        def step() -> None:
            for number in range(self.microbatches):
                self._begin(sharded, is_last=number == self.microbatches - 1)
                tokens = torch.randint(2, shape, device=DEVICE)
                with attention(), loss_parallel() if meshes.tensor else nullcontext():
                    output = sharded(tokens)
                    logits = getattr(output, "logits", output)
                    loss_of(self.loss, logits, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        if self.linear_dtype is not None:
            return step_in_float8(step, sharded, self.gathers_in_float8)
        return step

    def _meshes(self) -> Meshes:
        copies, shards = self.replicas, self.gpus // self.replicas // self.tensor_parallel
        names = ("replicate", "shard") if copies > 1 else ("shard",)

        def mesh_of(*sizes: int, inner: str = "") -> DeviceMesh:
            all_names = (*names, inner) if inner else names
            return init_device_mesh(DEVICE, sizes[-len(all_names) :], mesh_dim_names=all_names)

        if self.tensor_parallel > 1:
            grid = mesh_of(copies, shards, self.tensor_parallel, inner="tensor")
            return Meshes(grid[names], grid[names], None, grid["tensor"], None)
        dense, context = mesh_of(copies, shards), None
        if self.context_parallel > 1:
            inside = self.context_parallel
            grid = mesh_of(copies, shards // inside, inside, inner="context")
            context = grid.get_group("context")
        if self.expert_parallel == 1:
            return Meshes(dense, dense, None, None, context)
        grid = mesh_of(
            copies, shards // self.expert_parallel, self.expert_parallel, inner="experts"
        )
        return Meshes(dense, grid[names], grid.get_group("experts"), None, context)

    def _units_of(
        self, model: nn.Module, meshes: Meshes, spread: list[nn.Module]
    ) -> list[SimulatedUnit]:
        """Return the units below the root, inner ones first. Blocks keep for backward what they
        shall."""
        blocks = find_blocks(model)
        if self.checkpointing != "none":
            every = self.checkpoints_every
            kept = CHECKPOINTING["full" if every else self.checkpointing]
            for block in blocks[:: every or 1]:
                block.forward = partial(
                    checkpoint, block.forward, use_reentrant=False, context_fn=kept
                )
        units = []
        for first in range(0, len(blocks), self.blocks_per_unit):
            of_unit = blocks[first : first + self.blocks_per_unit]
            if meshes.tokens is not None:
                # Of each expert there is one in each of these groups, which tokens of all reach.
                units += [
                    SimulatedUnit([module], meshes.experts, self.gpus)
                    for block in of_unit
                    for module in block.modules()
                    if module in spread
                ]
            units.append(SimulatedUnit(of_unit, meshes.dense))
        return units

    def _shard(self, model: nn.Module, units: list[SimulatedUnit], meshes: Meshes) -> Any:
        ctx = FsdpContext(
            meshes.dense,
            layout=self.layout,
            prefetch=self.prefetch,
            implicit_units=self.implicit_units,
        )
        policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype)
        wire = QuantizedCommPolicy(self.wire_dtype) if self.wire_dtype is not None else None
        shard = partial(fully_shard, ctx=ctx, mp_policy=policy, comm_policy=wire)
        for unit in units:
            part = self.reshard_after_forward if unit.mesh is meshes.dense else None
            unit.share(shard, mesh=unit.mesh, reshard_after_forward=part)
        sharded: Any = shard(model)
        if self.stage != 3:
            sharded.set_zero_stage(self.stage)
        return sharded

    def _begin(self, sharded: Any, is_last: bool) -> None:
        """Begin a microbatch."""
        sharded.set_requires_gradient_sync(is_last or self.reduce_each)
