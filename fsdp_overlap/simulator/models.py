"""Models by name: those that come with the library, configs of Hugging Face's transformers, and
functions of users."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_overlap.emulator import EmulatedDevice, running
from fsdp_overlap.emulator.calls import NAME
from fsdp_overlap.fully_shard import find_blocks

PACKAGE = Path(__file__).parents[1]
SHIPPED = Path(__file__).parent / "models"
PREDICTED = (
    "decoders such as llama, mixtral and gpt2, and encoders such as bert, which map tokens to "
    "logits; for any other module that does, give module:function"
)


class ModelError(ValueError):
    """There is no such model, or it cannot be predicted. The message says in a line why, and what
    can be."""


NOT_SIZES = {"auto_map", "quantization_config", "torch_dtype", "unsloth_version"}
"""Keys of a config that say nothing of the model that is trained."""
SIZES = (
    ("num_hidden_layers",),
    ("hidden_size",),
    ("vocab_size",),
    ("n_routed_experts", "num_experts", "num_local_experts"),
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
        config = _read_config(path)
        _check_is_language_model(path, config)
        return partial(_made, name, partial(_of_config, config))
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
    if isinstance(error, ValueError) and _is_ours(error):
        return error
    hint = "" if _config_file(name) is None else f". What can be predicted: {PREDICTED}"
    return ModelError(f"{name} cannot be predicted: {_in_a_line(error)}{hint}")


def _in_a_line(error: Exception) -> str:
    """Return what ``error`` says, and where others raised it, in a line of some 300 characters at
    most."""
    said = f"{type(error).__name__}: " + " ".join(str(error).split()).rstrip(".")
    if len(said) > 300:
        said = said[:300] + "..."
    raised = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if _is_ours(error) else f" ({Path(raised.filename).name}:{raised.lineno})"
    return said + where


def _is_ours(error: Exception) -> bool:
    return PACKAGE in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents


def _config_file(name: str) -> Path | None:
    if name in known_models():
        return SHIPPED / f"{name}.json"
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    return path if path.is_file() or path.suffix == ".json" else None


def _read_config(path: Path) -> Any:
    """Return the config in a file, as its class in transformers reads it."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "models by a config.json need transformers: pip install transformers"
        ) from error
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: {error}") from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise ModelError(f"{path} is no config of a model of transformers: it has no model_type")
    if kind not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, transformers.CONFIG_MAPPING.keys(), 1)
        hint = f"did you mean {near[0]}?" if near else f"what can be predicted: {PREDICTED}"
        raise ModelError(
            f"{path}: transformers {transformers.__version__} has no model_type {kind!r}; {hint}"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_json_file(path)
    except Exception as error:  # each class has its own checks
        raise ModelError(f"{path} is no config of {kind}: {_in_a_line(error)}") from error
    _check_keys(path, kind, config)
    config.use_cache = False
    return config


def _check_keys(path: Path, kind: str, config: Any) -> None:
    """Refuse what the class of ``config`` does not know, and the model does not read."""
    import transformers

    default = type(config)()
    known = {*vars(default), *default.to_dict()}
    unknown = set(vars(config)) - known - NOT_SIZES - set(transformers.GenerationConfig().to_dict())
    if unknown and (found := _classes_of(config)) is not None:
        source = inspect.getsource(inspect.getmodule(found[0]) or found[0])
        unknown = {name for name in unknown if not re.search(rf"\b{re.escape(name)}\b", source)}
    if not unknown:
        return
    names = []
    for name in sorted(unknown):
        near = difflib.get_close_matches(name, known, 1)
        names.append(f"{name} (did you mean {near[0]}?)" if near else name)
    raise ModelError(
        f"{path}: {kind} of transformers {transformers.__version__} does not read "
        f"{', '.join(names)}; remove what does not change sizes, and correct the rest"
    )


def _check_is_language_model(path: Path, config: Any) -> None:
    why = None
    if config.is_encoder_decoder:
        why = "has an encoder and a decoder, which take different tokens"
    elif config.get_text_config() is not config:
        why = "takes more than tokens"
        if _classes_of(config.get_text_config()) is not None:
            why += "; what its text_config describes can be predicted, from a file of its own"
    elif (found := _classes_of(config)) is None:
        why = "is no language model"
    elif getattr(found[0], "_is_stateful", False) and _runs_token_by_token(config):
        why = (
            "runs token by token in PyTorch, and its fast kernels, which are of other packages, "
            "are not known"
        )
    if why is not None:
        raise ModelError(f"{path}: {config.model_type} {why}. What can be predicted: {PREDICTED}")


def _classes_of(config: Any) -> tuple[Any, Any] | None:
    """Return the class of models that are trained to predict tokens, if there is one, and what
    makes such a model of a config."""
    import transformers

    for classes, maker in (
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.AutoModelForMaskedLM),
    ):
        if type(config) in classes:
            return classes[type(config)], maker
    return None


def _of_config(config: Any, **options: Any) -> nn.Module:
    found = _classes_of(config)
    assert found is not None  # else it was refused
    # None: sdpa where the model has it.
    model: nn.Module = found[1].from_config(config, attn_implementation=None, **options)
    return model


def _made(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        model = make()
    except Exception as error:  # whatever a model's code raises
        raise unpredictable(name, error) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} makes a {type(model).__name__}; it must make a module")
    return model


def _runs_token_by_token(config: Any) -> bool:
    """Return whether the model runs more operations for more tokens."""
    device, counts = EmulatedDevice(values=False), []
    with running(device), torch.device(NAME), suppress(Exception):  # said when it is predicted
        model = _of_config(deepcopy(config), dtype=torch.bfloat16)
        for tokens in (16, 32):
            before = device.operations
            model(torch.zeros(1, tokens, dtype=torch.int64))
            counts.append(device.operations - before)
    return len(counts) == 2 and counts[0] != counts[1]


# Models with fewer blocks: each block adds the same to a step's time and memory, so that short
# models tell what long ones take.


class EqualBlocks(NamedTuple):
    """Equal blocks that follow each other in a list, from ``start`` on."""

    modules: nn.ModuleList
    start: int
    length: int


def longest_run(model: nn.Module) -> EqualBlocks | None:
    """Return the most blocks in a row whose parameters have the same names and shapes, if a list
    has them."""
    blocks = set(find_blocks(model))
    runs = []
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList):
            start = 0
            for is_like, alike in groupby(modules, _looks):
                members = list(alike)
                if is_like and blocks.issuperset(members):
                    runs.append(EqualBlocks(modules, start, len(members)))
                start += len(members)
    return max(runs, key=lambda run: run.length, default=None)


def shorten(model: nn.Module, blocks: int) -> None:
    """Leave so many blocks of the longest run.

    Raises:
        ValueError: there are fewer.
    """
    run = longest_run(model)
    if run is None or run.length < blocks:
        raise ValueError(f"{type(model).__name__} has no {blocks} equal blocks in a list")
    del run.modules[run.start + blocks : run.start + run.length]


def _looks(module: nn.Module) -> tuple[object, ...]:
    shapes = [(name, parameter.shape) for name, parameter in module.named_parameters()]
    return (type(module), *shapes) if shapes else ()
