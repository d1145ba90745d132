"""The weights and random numbers that a first run begins with, for the runs that follow it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp_overlap.weights.chunks import Chunk, local_chunks

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


def save_first(weights: Mapping[str, torch.Tensor], folder: Path, rank: int) -> None:
    """Save this rank's part of the ``weights`` of a model, and its states of random numbers."""
    parts = {
        name: [((chunk.offsets, chunk.sizes), values.cpu()) for chunk, values in local_chunks(each)]
        for name, each in weights.items()
        if each.device.type != "meta"
    }
    torch.save({"weights": parts, "random": _states()}, _path(folder, rank))


@torch.no_grad()
def restore_first(weights: Mapping[str, torch.Tensor], folder: Path, rank: int) -> list[str]:
    """Give the ``weights`` of a model the values that the run in ``folder`` began with, and this
    rank its random numbers, where they differ. Return what was done."""
    saved: dict[str, _Parts] = {}
    states: dict[str, Any] = {}
    for path in folder.glob("first-*.pt"):
        file = torch.load(path, mmap=True, weights_only=False)
        if path == _path(folder, rank):
            states = file["random"]
        for name, parts in file["weights"].items():
            saved.setdefault(name, []).extend((Chunk(*place), values) for place, values in parts)
    notes = []
    changed = sum(_restore(tensor, saved.get(name, [])) for name, tensor in weights.items())
    if changed:
        notes.append(f"{changed} weights began with other values, and were given the first run's")
    if states and not _same(states, _states()):
        notes.append(_OTHER_STATE)
        _set(states)
    return notes


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
