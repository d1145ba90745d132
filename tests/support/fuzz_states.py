"""Operations of random programs: weights are edited, saved, loaded and copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from fsdp_overlap import PerTensor
from fsdp_overlap.checkpoint import SafeFileSystemReader, SafeFileSystemWriter
from fsdp_overlap.engine.unit import unit_of
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.tensor.creation import with_range_shards
from fsdp_overlap.tensor.tiles import has_tiles
from support.fuzz_run import Run
from support.fuzz_training import Operation
from support.random_models import Node, TensorAtomic


def rising(like: torch.Tensor) -> torch.Tensor:
    values = torch.linspace(-1, 1, like.numel(), dtype=like.dtype, device=like.device)
    return values.view(like.shape)


EDITS: dict[str, Callable[[Any], None]] = {
    "mul_": lambda p: p.mul_(1.25),
    "data": lambda p: p.data.add_(0.125),
    "rows": lambda p: p[: max(1, len(p) // 2)].neg_(),
    "copy_": lambda p: p.copy_(rising(p)),
    "foreach": lambda p: torch._foreach_mul_([p], 0.75),
    "to_local": lambda p: getattr(p, "to_local", lambda: p)().add_(0.25),
}


@dataclass(frozen=True)
class Edit(Operation):
    module: int
    how: str

    def run(self, run: Run) -> bool:
        chosen = run.under(self.module)
        if self.how == "rows":  # a view, which is refused of tiles
            chosen = [index for index in chosen if not has_tiles(run.sharded[index]._spec)]
        run.before_edit()
        with torch.no_grad():
            for index in chosen:
                EDITS[self.how](run.sharded[index])
                EDITS[self.how](run.whole[index])
        run.edited()
        return bool(chosen)


@dataclass(frozen=True)
class Save(Operation):
    """``how``: whole tensors, sharded ones, or by DCP to a folder, which may be ``"safe"``."""

    how: str

    def run(self, run: Run) -> bool:
        state: Any = run.model.state_dict()
        if self.how == "whole":
            state = {name: tensor.full_tensor() for name, tensor in state.items()}
        elif self.how == "sharded":
            state = copy.deepcopy(state)
        else:
            folder = run.folder()
            writer = {"safe": SafeFileSystemWriter, "dcp": dcp.FileSystemWriter}[self.how]
            dcp.save({"model": state}, storage_writer=writer(folder))
            state = folder
        run.shown()
        run.saved = self.how, state, copy.deepcopy(run.twin.state_dict())
        return True


@dataclass(frozen=True)
class Load(Operation):
    """What was saved last, also by a model of other units."""

    def run(self, run: Run) -> bool:
        if run.saved is None:
            return False
        how, state, expected = run.saved
        if how in ("dcp", "safe"):
            reader: Any = {"safe": SafeFileSystemReader, "dcp": dcp.FileSystemReader}[how]
            dcp.load({"model": run.model.state_dict()}, storage_reader=reader(state))
        else:
            run.model.load_state_dict(state)
        run.twin.load_state_dict(expected)
        run.shown()
        run.edited()
        return True


@dataclass(frozen=True)
class Rebuild(Operation):
    """A fresh model of other units, layout and prefetch, which loads all that the old one has but
    its gradients."""

    units: str
    layout: LayoutRule
    prefetch: int
    on_meta: bool
    how: str

    def run(self, run: Run) -> bool:
        setup = run.setup
        if setup.shard_optimizer_over_replicas and isinstance(self.layout, PerTensor):
            return False  # replicas cannot divide rows
        setup = replace(
            setup,
            node=with_units(setup.node, self.units),
            layout=self.layout,
            prefetch=self.prefetch,
            ends=setup.ends != (self.units == "others"),
        )
        with torch.device("meta" if self.on_meta else setup.device):
            model = TensorAtomic(setup.node).double()
        for parameter, old in zip(model.parameters(), run.sharded, strict=True):
            parameter.requires_grad_(old.requires_grad)
        meshes = setup.make_meshes()
        setup.shard(model, setup.make_context(meshes), meshes)
        if self.on_meta:
            model.to_empty(device=setup.device)
        previous = run.saved
        Save(self.how).run(run)
        old = run.optimizer
        optimizer = setup.make_optimizer(model)
        optimizer.load_state_dict(moved(old, optimizer))
        run.setup = setup
        run.adopt(model, optimizer)
        Load().run(run)
        run.saved = previous or run.saved
        run.twin_optimizer.zero_grad()
        return True


def with_units(node: Node, which: str) -> Node:
    unit = {"all": True, "none": False, "others": not node.unit, "same": node.unit}[which]
    return replace(
        node, unit=unit, children=tuple(with_units(child, which) for child in node.children)
    )


def moved(old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of ``old``, laid out as the parameters of ``new``."""
    state = old.state_dict()
    targets = [parameter for group in new.param_groups for parameter in group["params"]]
    placed: dict[Any, Any] = {}
    distribute = with_range_shards(torch.distributed.tensor.distribute_tensor)
    for index, values in state["state"].items():
        placed[index] = {
            key: distribute(
                value.full_tensor(), targets[index].device_mesh, targets[index].placements
            )
            if isinstance(value, DTensor)
            else value
            for key, value in values.items()
        }
    return {**state, "state": placed}


@dataclass(frozen=True)
class Copy(Operation):
    """``deepcopy`` of the model and its optimizer; ``switch`` to the copy, or look at it only."""

    switch: bool

    def run(self, run: Run) -> bool:
        model, optimizer = copy.deepcopy((run.model, run.optimizer))
        if self.switch:
            old, told = run.model.modules(), run.told
            run.adopt(model, optimizer)
            for module, copied in zip(old, model.modules(), strict=True):
                if (unit := unit_of(copied)) is not None:
                    run.told[unit] = told[unit_of(module)]
        else:
            with torch.no_grad():
                run.evaluate(model)
        return True
