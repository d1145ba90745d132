"""torch's optimizers: options to try each with, and the forms of its step."""

from __future__ import annotations

from typing import Any

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}],
    "Adam": [{"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.5, "weight_decay": 0.1}],
    "Rprop": [{}, {"maximize": True}],
    "ASGD": [{}, {"weight_decay": 0.1, "t0": 2}],
    "Adafactor": [{}, {"weight_decay": 0.1, "maximize": True}],
}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
