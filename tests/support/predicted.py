"""Predicted steps of small models of transformers, on 16 GPUs, and what is asked of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Prediction, Training, simulate

GPUS = 16


def write_config(config: dict[str, Any], folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def known_to(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those options that configs of an architecture have."""
    default = transformers.CONFIG_MAPPING[kind]()
    return {name: value for name, value in options.items() if hasattr(default, name)}


def predict(model: str, kind: type[Training] = Training, **options: Any) -> Prediction:
    training = kind(model, GPUS, optimizer="torch-adamw", **options)
    costs = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))
    return simulate(training.program, GPUS, costs)


def kernels(prediction: Prediction, name: str) -> list[dict[str, Any]]:
    events = prediction.trace["traceEvents"]
    return [each for each in events if each["cat"] == "kernel" and each["name"] == name]
