"""The same training step under torch's FSDP2, as its users write it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_overlap.layout import Flat
from fsdp_overlap.tools.simulator.training import Meshes, SimulatedUnit, Training


@dataclass(frozen=True)
class Fsdp2Training(Training):
    """A step of training under ``torch.distributed.fsdp.fully_shard``, which runs unmodified: the
    same units, dtypes, stage and prefetch as :class:`Training` has.

    Raises:
        ValueError: FSDP2 has nothing like an option; says which.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, has in (
            ("stage", self.stage in (2, 3)),
            ("prefetch", self.prefetch >= 1),
            ("implicit_units", not self.implicit_units),
            ("layout", self.layout == Flat()),
            ("gather_dtype", self.gather_dtype is None or self.gathers_in_float8),
            ("optimizer", self.optimizer == "torch-adamw"),
        ):
            if not has:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: FSDP2 has nothing like it; it takes stage 2 "
                    "or 3, prefetch from 1 on, no implicit units, the default layout, AdamW, and a "
                    "gather_dtype of float8_e4m3fn alone, with products in float8"
                )

    @property
    def gathers_in_float8(self) -> bool:
        return self.linear_dtype is not None and self.gather_dtype is torch.float8_e4m3fn

    @classmethod
    def like(cls, training: Training) -> Fsdp2Training:
        """Return what is to be compared with ``training``, whose AdamW becomes torch's."""
        if training.optimizer == "adamw":
            training = replace(training, optimizer="torch-adamw")
        return cls(**{each.name: getattr(training, each.name) for each in fields(Training)})

    def _shard(self, model: nn.Module, units: list[SimulatedUnit], meshes: Meshes) -> Any:
        policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype)
        shard = partial(fully_shard, mp_policy=policy)
        part = self.reshard_after_forward
        for unit in units:
            # In stage 3 it gathers each unit again in backward, but for the root.
            among = part if part is not None and unit.mesh is meshes.dense else self.stage == 3
            unit.share(shard, mesh=unit.mesh, reshard_after_forward=among)
        sharded: Any = shard(model, mesh=meshes.dense)
        if self.prefetch > 1:  # one unit ahead is its default
            self._prefetch(sharded, units, meshes)
        return sharded

    def _prefetch(self, sharded: Any, units: list[SimulatedUnit], meshes: Meshes) -> None:
        """List for each unit those that are entered next. A block is entered before the experts in
        it, in forward and in backward."""
        blocks: list[list[Any]] = []
        experts: list[Any] = []
        for unit in units:
            if unit.mesh is meshes.dense:
                blocks.append([unit.modules[0], *experts])
                experts = []
            else:
                experts.append(unit.modules[0])
        forward = [sharded, *chain.from_iterable(blocks)]
        backward = [sharded, *chain.from_iterable(reversed(blocks))]
        for at, module in enumerate(forward):
            module.set_modules_to_forward_prefetch(forward[at + 1 :][: self.prefetch])
        for at, module in enumerate(backward):
            module.set_modules_to_backward_prefetch(backward[at + 1 :][: self.prefetch])

    def _begin(self, sharded: Any, is_last: bool) -> None:
        super()._begin(sharded, is_last)
        if self.stage == 2:
            sharded.set_reshard_after_backward(is_last)
