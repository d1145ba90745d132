"""Names and conversions of weights by which transformers loads files into its own models."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether transformers has ways of its own to load ``model``."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def convert(
    model: Any, in_files: Mapping[str, torch.Tensor], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return tensors of files as ``model``, of transformers, has them, by name. ``names`` are those
    of the model."""
    from transformers import conversion_mapping, core_model_loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    converter_class = core_model_loading.WeightConverter
    converters = [each for each in transforms if isinstance(each, converter_class)]
    renamings = [each for each in transforms if not isinstance(each, converter_class)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    in_model = dict.fromkeys(names, True)
    prefix = model.base_model_prefix
    result: dict[str, torch.Tensor] = {}
    renamed_from: dict[str, str] = {}
    converting: dict[str, Any] = {}
    # The order in which experts are stacked.
    for name in sorted(in_files, key=core_model_loading.dot_natural_key):
        rename = core_model_loading.rename_source_key
        renamed, pattern = rename(name, renamings, converters, prefix, in_model)
        if renamed not in in_model and name in in_model:
            renamed, pattern = rename(name, [], [], prefix, in_model)
        if pattern is None or renamed not in in_model:
            if renamed in result:
                raise ValueError(
                    f"the files have {renamed_from[renamed]!r} and {name!r}, which are both "
                    f"{renamed!r} in the model"
                )
            result[renamed], renamed_from[renamed] = in_files[name], name
        else:
            converter = converting.setdefault(renamed, deepcopy(by_pattern[pattern]))
            converter.collected_tensors[pattern].append(in_files[name])
    for name, converter in converting.items():
        for target, values in converter.convert(name, model=model, config=model.config).items():
            result[target] = values[0] if isinstance(values, list) else values
    return result


def without_ignored(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """Return ``names`` without those that match one of ``patterns``."""
    return [
        name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())
    ]


def init_of(model: nn.Module) -> Callable[[nn.Module], object]:
    """Return what ``model``, of transformers, initializes a module by."""
    init: Callable[[nn.Module], object] = getattr(model, _INIT)
    return init


_INIT = "_init_weights"
