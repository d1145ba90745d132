"""Models by name: those that come with the library, configs of Hugging Face's transformers, and
functions of users."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_overlap.blocks import find_blocks
from fsdp_overlap.tools.simulator.model_configs import (
    EXPERTS,
    PREDICTED,
    ModelError,
    in_a_line,
    is_ours,
    of_config,
    read_config,
)

SHIPPED = Path(__file__).parent / "models"
SIZES = (
    ("num_hidden_layers",),
    ("hidden_size",),
    ("vocab_size",),
    EXPERTS,
    ("num_experts_per_tok",),
)
"""Keys of a config that are shown beside the number of parameters, of each the first there is."""


def known_models() -> list[str]:
    """Return the models that come with the library."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def model_of(name: str) -> Callable[[], nn.Module]:
    """Return what makes the model of ``name``, as :class:`Training` takes it.

    Raises:
        ModelError: there is no such model, or it is none that can be predicted. So does what is
            returned, where the model cannot be made.
    """
    if (path := _config_file(name)) is not None:
        config, _ = read_config(path)
        return partial(_made, name, partial(of_config, config))
    module, colon, function = name.partition(":")
    if not colon:
        raise ModelError(
            f"there is no model {name!r}: give one of {', '.join(known_models())}, the path of a "
            "config.json of transformers, or module:function"
        )
    try:
        made: Callable[[], nn.Module] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"model {name!r}: {error}") from error
    except Exception as error:  # whatever the module of a user raises
        raise unpredictable(name, error) from error
    return partial(_made, name, made)


def unread_keys(name: str) -> list[str]:
    """Return the keys of the model's config.json that do not change the model; none of other
    models.

    Raises:
        ModelError: as :func:`model_of` does.
    """
    path = _config_file(name)
    return [] if path is None else read_config(path)[1]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module | None:
    """Return the model without memory; ``None`` if it needs some."""
    try:
        with torch.device("meta"):
            return make()
    except ModelError:
        return None


def describe_size(model: nn.Module) -> str:
    """Return the number of parameters, and what its config says of sizes."""
    count = sum(parameter.numel() for parameter in model.parameters())
    config = getattr(model, "config", None)
    found = (next((name for name in names if getattr(config, name, None)), "") for names in SIZES)
    sizes = ", ".join(f"{name} {getattr(config, name)}" for name in found if name)
    return f"{count:,} ({sizes})" if sizes else f"{count:,}"


def positions_of(model: nn.Module) -> int | None:
    """Return how many tokens a sequence of the model may have; ``None`` if its config does not
    say."""
    for name, module in model.named_modules():
        # Models of RoBERTa's kind number positions from the one after the padding's.
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx:
            return module.num_embeddings - module.padding_idx - 1
    for name in ("max_position_embeddings", "max_seq_len"):
        positions = getattr(getattr(model, "config", None), name, None)
        if isinstance(positions, int) and positions > 0:
            return positions
    return None


def check_positions(model: nn.Module, sequence: int) -> None:
    """Raise a ModelError if the model has not as many positions."""
    positions = positions_of(model)
    if positions is not None and sequence > positions:
        raise ModelError(
            f"sequence={sequence}: {type(model).__name__} has {positions} positions; use shorter "
            "sequences, or a config with more"
        )


def unpredictable(name: str, error: Exception) -> ValueError:
    """Return what to raise where the code of model ``name`` has raised ``error``: this very error
    if it is one of the library's own, which says what would work, else a line about it."""
    if isinstance(error, ValueError) and is_ours(error):
        return error
    hint = "" if _config_file(name) is None else f". What can be predicted: {PREDICTED}"
    return ModelError(f"{name} cannot be predicted: {in_a_line(error)}{hint}")


def _config_file(name: str) -> Path | None:
    if name in known_models():
        return SHIPPED / f"{name}.json"
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    return path if path.is_file() or path.suffix == ".json" else None


def _made(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        model = make()
    except Exception as error:  # whatever a model's code raises
        raise unpredictable(name, error) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} makes a {type(model).__name__}; it must make a module")
    return model


# Models with fewer blocks: each block adds the same to a step's time and memory, so that short
# models tell what long ones take.


class EqualBlocks(NamedTuple):
    """Equal blocks that follow each other in a list, from ``start`` on. Which of them attend within
    a window repeats after ``period`` blocks."""

    modules: nn.ModuleList
    start: int
    length: int
    period: int


def longest_run(model: nn.Module) -> EqualBlocks | None:
    """Return the most blocks in a row whose parameters have the same names and shapes, if a list
    has them. Without a period in what layers are they are the most of one kind of layer."""
    blocks = set(find_blocks(model))
    runs: list[EqualBlocks] = []
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList):
            kinds, start = _layer_types(model, modules) or [""] * len(modules), 0
            for is_like, alike in groupby(modules, _looks):
                members = list(alike)
                if is_like and blocks.issuperset(members):
                    runs += _periodic_runs(modules, start, kinds[start : start + len(members)])
                start += len(members)
    return max(runs, key=lambda run: run.length, default=None)


def _periodic_runs(modules: nn.ModuleList, start: int, kinds: list[str]) -> Iterator[EqualBlocks]:
    """Yield the blocks from ``start`` on, of which ``kinds`` are; if these do not repeat, those of
    each kind that follow each other."""
    length = len(kinds)
    period = next(each for each in range(1, length + 1) if kinds[each:] == kinds[:-each])
    if 2 * period <= length or length == 1:
        yield EqualBlocks(modules, start, length, period)
        return
    for _, alike in groupby(kinds):
        yield EqualBlocks(modules, start, len(members := list(alike)), 1)
        start += len(members)


def _layer_types(model: nn.Module, modules: nn.ModuleList) -> list[str] | None:
    """Return what the config says of each layer, if they are these."""
    types = getattr(getattr(model, "config", None), "layer_types", None)
    return types if types is not None and len(types) == len(modules) else None


def shorten(model: nn.Module, blocks: int) -> None:
    """Leave so many blocks of the longest run.

    Raises:
        ValueError: there are fewer.
    """
    run = longest_run(model)
    if run is None or run.length < blocks:
        raise ValueError(f"{type(model).__name__} has no {blocks} equal blocks in a list")
    left_out = slice(run.start + blocks, run.start + run.length)
    if (types := _layer_types(model, run.modules)) is not None:
        kept = [*types[: left_out.start], *types[left_out.stop :]]
        if kept != types[: len(kept)]:  # else a config that others share stays as it is
            config: Any = model.config
            config.layer_types = kept
    del run.modules[left_out]


def _looks(module: nn.Module) -> tuple[object, ...]:
    shapes = [(name, parameter.shape) for name, parameter in module.named_parameters()]
    return (type(module), *shapes) if shapes else ()
