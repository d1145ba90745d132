"""LoRA adapters of PEFT, trained on a decoder whose own weights are frozen and sharded:

    torchrun --nproc-per-node 2 docs/examples/peft_training.py --folder /tmp/adapters

or, with ``--fsdp2``, on FSDP2's units. ``--dtype bfloat16`` holds the frozen weights in half the
bytes; PEFT keeps adapters in float32 beside them. Each rank gathers frozen weights and adapters,
and reduces gradients of adapters alone. The model is small and starts from random weights, so that
nothing is downloaded.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from fsdp_overlap import FsdpContext, find_blocks, fully_shard

VOCABULARY, LENGTH = 17, 12
CONFIG = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    initializer_range=0.1,
)
ADAPTERS = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def build_base(dtype: torch.dtype) -> PreTrainedModel:
    """The same weights on every rank, in the place of those of ``from_pretrained(...)``."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=dtype)


def batch(step: int, device: torch.device, rows: int = 16) -> torch.Tensor:
    """Rows that count up by a step of their own, other rows on each rank."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    first, by = torch.randint(VOCABULARY, (2, rows, 1), generator=generator)
    return ((first + by * torch.arange(LENGTH)) % VOCABULARY).to(device)


class Training:
    def __init__(self, is_fsdp2: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        base = build_base(dtype).to(self.device)
        self.model: Any = get_peft_model(base, ADAPTERS)  # freezes all but the adapters
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.ctx = FsdpContext(mesh)
        shard = (
            partial(fsdp2.fully_shard, mesh=mesh)
            if is_fsdp2
            else partial(fully_shard, ctx=self.ctx)
        )
        for block in find_blocks(self.model):
            shard(block)
        shard(self.model)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def step(self, tokens: torch.Tensor) -> float:
        """The loss on this rank."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self, folder: Path) -> None:
        """The adapters alone: the frozen weights are not even gathered for this. Every rank takes
        part, the first one writes."""
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
        )
        adapters = get_model_state_dict(self.model, options=options)
        if dist.get_rank() == 0:
            self.model.save_pretrained(folder, state_dict=adapters)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    """What was saved, on the base model, in one process and without sharding."""
    return PeftModel.from_pretrained(build_base(dtype), folder)


def run(
    folder: Path, steps: int, is_fsdp2: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Training, list[float]]:
    """Trains and saves."""
    training = Training(is_fsdp2, dtype)
    training.model.train()
    losses = []
    for step in range(steps):
        losses.append(training.step(batch(step, training.device)))
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    training.save(folder)
    return training, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--fsdp2", action="store_true", help="train on FSDP2's units")
    arguments = parser.parse_args()
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    training, _ = run(
        arguments.folder, arguments.steps, arguments.fsdp2, getattr(torch, arguments.dtype)
    )
    if dist.get_rank() == 0:
        print(f"adapters in {arguments.folder}; {training.ctx.stats}")
    dist.destroy_process_group()
