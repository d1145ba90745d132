"""A ``config.json`` of Hugging Face's transformers: what its class reads of it, sizes that no model
can have, and the model it is of."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_overlap.tools.emulator import EmulatedDevice, running
from fsdp_overlap.tools.emulator.calls import NAME

PACKAGE = Path(__file__).parents[2]
PREDICTED = (
    "decoders such as llama, mixtral and gpt2, and encoders such as bert, which map tokens to "
    "logits; for any other module that does, give module:function"
)
NOT_SIZES = {"auto_map", "model_type", "quantization_config", "torch_dtype", "unsloth_version"}
"""Keys of a config that say nothing of the model that is trained."""
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "head_dim",
    "sliding_window_pattern",
    "global_attn_every_n_layers",
)
"""Keys that must be at least 1 where they are numbers."""
OWN_HEAD_SIZES = ("attention_head_dim", "attention_head_size", "d_head", "d_kv", "qk_rope_head_dim")
"""Keys by which heads need not share ``hidden_size`` among them, beside ``head_dim``."""
OLDER_NAME = r"""kwargs\.(?:get|pop)\(\s*"(\w+)"""
READ = rf"""{OLDER_NAME}|config\.(\w+)|[gh](?:et|as)attr\([\w.]+, "(\w+)"""
"""How classes of configs take older names of keys, and code of a model reads a key."""
OTHER_NAMES = {
    "hidden_size": {"d_model", "n_embd", "n_embed"},
    "intermediate_size": {"d_ff", "ffn_dim", "n_inner"},
    "num_hidden_layers": {"n_layer", "n_layers", "num_layers"},
    "num_attention_heads": {"n_head", "n_heads", "num_heads"},
}
"""What other families call a size, as do authors whose own code read their config at first."""
NEAR = 0.7
"""From which ratio on difflib's names are near: ``num_layers`` is to ``num_hidden_layers``, and
nothing that hubs ship is to what is absent there."""


class ModelError(ValueError):
    """There is no such model, or it cannot be predicted. The message says in a line why, and what
    can be."""


def read_config(path: Path) -> tuple[Any, list[str]]:
    """Return the config in a file, as its class in transformers reads it, and the keys that neither
    the class nor the model reads.

    Raises:
        ModelError: it is none of a model that can be predicted, a key is misspelled, or there is no
            model of its sizes.
    """
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
        if "auto_map" in values:
            hint = f"the code that auto_map names is not run; what can be predicted: {PREDICTED}"
        raise ModelError(
            f"{path}: transformers {transformers.__version__} has no model_type {kind!r}; {hint}"
        )
    config_class = transformers.CONFIG_MAPPING[kind]
    if problem := "; ".join(_too_small(config_class, values)):
        raise ModelError(f"{path}: {problem}")
    try:
        config = config_class.from_json_file(path)
    except Exception as error:  # each class has its own checks
        raise ModelError(f"{path} is no config of {kind}: {in_a_line(error)}") from error
    config.use_cache = False
    _check_is_language_model(path, config)
    if problem := "; ".join(_impossible(config, values)):
        raise ModelError(f"{path}: {problem}")
    return config, _unread_keys(path, config, values)


def _unread_keys(path: Path, config: Any, values: dict[str, Any]) -> list[str]:
    """Return the keys that do not matter. Refuse those that look like a known one which the file
    does not have, and which has its default then."""
    import transformers

    default, aliases = type(config)(), type(config).attribute_map
    known = {*vars(default), *default.to_dict(), *aliases, *_read_by_code(config)}
    ignored = known | NOT_SIZES | set(transformers.GenerationConfig().to_dict())
    unread = [name for name in values if name not in ignored and not name.startswith("_")]
    given = {*values, *(aliases.get(name) for name in values)}
    given |= {name for name, alias in aliases.items() if alias in values}
    # What all configs have, such as labels, is not meant by what looks like a size.
    absent = known - given - set(dir(transformers.PretrainedConfig()))
    absent = {name for name in absent if not name.startswith("_")}
    meant = {name: near for name in unread if (near := _near(name, absent))}
    if meant:
        names = ", ".join(f"{name} (did you mean {near}?)" for name, near in meant.items())
        raise ModelError(
            f"{path}: {config.model_type} of transformers {transformers.__version__} does not read "
            f"{names}; correct or remove it"
        )
    return sorted(unread)


def _read_by_code(config: Any) -> set[str]:
    """Return the keys that the config's classes take as older names, of which they say nothing
    later, and those that the model asks for."""
    model, _ = _classes_of(config) or (type(config), None)
    classes = [*type(config).__mro__, model]
    keys: set[str] = set()
    for module in {each.__module__ for each in classes}:
        if module.startswith("transformers."):
            # What all models share asks for keys that few of them have.
            reads = READ if module.startswith("transformers.models.") else OLDER_NAME
            found_keys = re.finditer(reads, inspect.getsource(sys.modules[module]))
            keys.update(match[match.lastindex or 0] for match in found_keys)
    return keys


def _near(name: str, absent: Iterable[str]) -> str | None:
    """Return which of ``absent`` the name is another one of, or looks like: one of nearly its
    letters, or one of all its words and more."""
    for other in absent:
        if name in OTHER_NAMES.get(other, ()):
            return other
    name, others = re.sub("^n_", "num_", name), sorted(absent)
    words = set(name.split("_"))
    of_more_words = [other for other in others if len(words) > 1 and words < {*other.split("_")}]
    return next(iter(difflib.get_close_matches(name, others, 1, NEAR) or of_more_words), None)


def _too_small(kind: Any, values: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with single numbers. ``kind``: the class of the config."""
    meant = {alias: name for name, alias in kind.attribute_map.items()}
    for name, value in values.items():
        if meant.get(name, name) in COUNTS and type(value) is int and value < 1:
            yield f"{name} is {value}, and must be at least 1"


def _impossible(config: Any, values: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with numbers that do not go together, of which transformers may make a
    model all the same."""

    def number(name: str) -> int | None:
        # Not getattr, which refuses what differs between layers.
        value = vars(config).get(config.attribute_map.get(name, name))
        return value if type(value) is int else None

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    own_size = any(getattr(config, name, None) is not None for name in OWN_HEAD_SIZES)
    own_size |= values.get("head_dim", getattr(type(config), "head_dim", None)) is not None
    if hidden and heads and hidden % heads and not own_size:
        yield (
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no "
            "head_dim"
        )
    for name in ("num_key_value_heads", "num_kv_heads"):
        key_values = number(name)
        if heads and key_values and heads % key_values:
            yield f"{name} {key_values} does not divide num_attention_heads {heads}"
    window, layers = number("sliding_window"), getattr(config, "layer_types", None)
    if (
        window is not None
        and window < 1
        and "sliding_attention" in (layers or ["sliding_attention"])
    ):
        yield f"sliding_window is {window}, and must be at least 1"
    chosen = number("num_experts_per_tok")
    for name in EXPERTS:
        experts = number(name)
        if experts and chosen is not None and not 1 <= chosen <= experts:
            yield f"num_experts_per_tok is {chosen}, of {name} {experts}"
            return


def _check_is_language_model(path: Path, config: Any) -> None:
    """Raise a ModelError if the config is of another kind of model, which cannot be predicted."""
    why = None
    if config.is_encoder_decoder:
        why = "has an encoder and a decoder, which take different tokens"
    elif config.get_text_config() is not config:
        why = "takes more than tokens"
        if _classes_of(config.get_text_config()) is not None:
            why += "; the model of its text_config can be predicted: save that as a file of its own"
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

    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM
    masked = transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.AutoModelForMaskedLM
    # Encoders are in both, as the decoders that they can be made.
    ways = (causal, masked) if getattr(config, "is_decoder", False) else (masked, causal)
    for classes, maker in ways:
        if type(config) in classes:
            return classes[type(config)], maker
    return None


def of_config(config: Any, **options: Any) -> nn.Module:
    """Return the model that is trained to predict tokens, of a config that was read."""
    found = _classes_of(config)
    assert found is not None  # else it was refused
    # None: sdpa where the model has it.
    model: nn.Module = found[1].from_config(config, attn_implementation=None, **options)
    return model


def _runs_token_by_token(config: Any) -> bool:
    """Return whether the model runs more operations for more tokens."""
    device, counts = EmulatedDevice(values=False), []
    with running(device), torch.device(NAME), suppress(Exception):  # said when it is predicted
        model = of_config(deepcopy(config), dtype=torch.bfloat16)
        for tokens in (16, 32):
            before = device.operations
            model(torch.zeros(1, tokens, dtype=torch.int64))
            counts.append(device.operations - before)
    return len(counts) == 2 and counts[0] != counts[1]


def in_a_line(error: Exception) -> str:
    """Return what ``error`` says, and where others raised it, in a line of some 300 characters at
    most."""
    said = f"{type(error).__name__}: " + " ".join(str(error).split()).rstrip(".")
    if len(said) > 300:
        said = said[:300] + "..."
    raised = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if is_ours(error) else f" ({Path(raised.filename).name}:{raised.lineno})"
    return said + where


def is_ours(error: Exception) -> bool:
    """Return whether the library's own code raised ``error``."""
    return PACKAGE in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents
