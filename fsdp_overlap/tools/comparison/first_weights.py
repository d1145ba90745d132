"""The weights and random numbers that a first run begins with, for the runs that follow it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_overlap.features.meta_init import UnwrittenParams
from fsdp_overlap.weights.chunks import Chunk, local_chunks
from fsdp_overlap.weights.model_weights import units_of, weights_of

_Parts = list[tuple[Chunk, torch.Tensor]]


_OTHER_STATE = "random numbers had another state, and were given the first run's"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"first-{rank}.pt"


def _random_path(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank}.pt"


def save_random(folder: Path, rank: int) -> None:
    """Save this rank's states of random numbers, for what is drawn before the first forward."""
    torch.save(_states(), _random_path(folder, rank))


def restore_random(folder: Path, rank: int) -> list[str]:
    """Give this rank the random numbers of the run in ``folder``. Return what was done."""
    path = _random_path(folder, rank)
    states = torch.load(path, weights_only=False) if path.exists() else {}
    if not states or _same(states, _states()):
        return []
    _set(states)
    return [_OTHER_STATE]


def save_first(model: nn.Module, folder: Path, rank: int) -> None:
    """Save this rank's part of the weights, and its states of random numbers."""
    weights = {
        name: [((chunk.offsets, chunk.sizes), values.cpu()) for chunk, values in chunks]
        for name, chunks in _weights(model)
    }
    torch.save({"weights": weights, "random": _states()}, _path(folder, rank))


@torch.no_grad()
def restore_first(model: nn.Module, folder: Path, rank: int) -> list[str]:
    """Give ``model`` the weights that the run in ``folder`` began with, and this rank its random
    numbers, where they differ. Return what was done."""
    param_groups = [group for unit in units_of(model) for group in unit.param_groups]
    if UnwrittenParams.unwritten([g for g in param_groups if g.init_hashes is not None]):
        return []  # the first forward says so
    saved: dict[str, _Parts] = {}
    states: dict[str, Any] = {}
    for path in folder.glob("first-*.pt"):
        file = torch.load(path, mmap=True, weights_only=False)
        if path == _path(folder, rank):
            states = file["random"]
        for name, parts in file["weights"].items():
            saved.setdefault(name, []).extend((Chunk(*place), values) for place, values in parts)
    notes = []
    changed = sum(_restore(tensor, saved.get(name, [])) for name, tensor in _tensors(model))
    if changed:
        notes.append(f"{changed} weights began with other values, and were given the first run's")
    if states and not _same(states, _states()):
        notes.append(_OTHER_STATE)
        _set(states)
    return notes


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from weights_of(model).items()


def _weights(model: nn.Module) -> Iterator[tuple[str, _Parts]]:
    for name, tensor in _tensors(model):
        if tensor.device.type != "meta":
            yield name, local_chunks(tensor)


def _restore(tensor: torch.Tensor, saved: _Parts) -> bool:
    """Copy what was saved into this rank's part. Return whether something differed."""
    is_changed = False
    for chunk, values in local_chunks(tensor):
        for of_file, others in saved:
            if (common := chunk & of_file) is None:
                continue
            mine, theirs = common.of(chunk, values), common.of(of_file, others)
            theirs = theirs.to(mine.device, mine.dtype)
            is_equal = bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())
            if not is_equal:
                mine.copy_(theirs)
                is_changed = True
    if is_changed:
        local = getattr(tensor, "_local_tensor", tensor)
        torch.autograd.graph.increment_version(local.detach())
    return is_changed


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def _same(states: dict[str, Any], others: dict[str, Any]) -> bool:
    return all(
        repr(states[name]) == repr(others.get(name))
        for name in ("python", "numpy")
        if (name in states)
    ) and all(
        torch.equal(states[name], others[name])
        for name in ("torch", "cuda")
        if (name in states and name in others)
    )


def _set(states: dict[str, Any]) -> None:
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])  # emulated GPUs draw from it
    random.setstate(states["python"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
