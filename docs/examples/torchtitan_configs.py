"""Small models of torchtitan's families, for ``torchtitan_training.py``. torchtitan finds them by
``--module torchtitan_configs --config llama3``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import Configurable
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel, qwen3_moe_debug
from torchtitan.trainer import Trainer


class Recorder(MetricsProcessor):
    """Also writes loss and norm with all their digits, a line of JSON a step, to
    ``metrics.jsonl`` in the folder."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, *, dump_folder: str, **options: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **options)
        self.path = Path(dump_folder) / "metrics.jsonl"

    def log(
        self, step: int, loss: float, max_loss: float, norm: float, *args: Any, **options: Any
    ) -> None:
        super().log(step, loss, max_loss, norm, *args, **options)
        if dist.get_rank() == dist.get_world_size() - 1:  # whose pipeline stage has the loss
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss, "norm": norm}) + "\n")


def small(config: Trainer.Config) -> Trainer.Config:
    model = config.model_spec.model
    model.layers = model.layers[:3]
    config.training.seq_len = 64
    config.training.local_batch_size = 2
    config.training.disable_cuda_graphs = True  # experimental with units
    config.debug.seed = 0
    config.metrics = Recorder.Config(log_freq=1)
    return config


def llama3() -> Trainer.Config:
    return small(llama3_debugmodel())


def qwen3() -> Trainer.Config:
    """Its head has the embedding's weight."""
    return small(qwen3_debugmodel())


def qwen3_moe() -> Trainer.Config:
    return small(qwen3_moe_debug())


def deepseek_v3() -> Trainer.Config:
    """One dense layer, then layers of eight experts."""
    return small(deepseek_v3_debugmodel())


def deepseek_v3_few_experts() -> Trainer.Config:
    """Two experts, which on four ranks FSDP2 cuts along their second dimension."""
    config = deepseek_v3()
    for _, part, _, _ in config.model_spec.model.traverse(Configurable.Config, recurse=True):
        if hasattr(part, "num_experts"):
            part.num_experts = 2
        if hasattr(part, "top_k"):
            part.top_k = 1
        if hasattr(part, "gate"):
            part.gate.out_features = 2
    return config
