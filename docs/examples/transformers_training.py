"""A model of Hugging Face's transformers, from its configuration to a folder that others load:

    torchrun --nproc-per-node 2 docs/examples/transformers_training.py --folder /tmp/counting

The model is small and starts from random weights; nothing is downloaded. How to stop, resume,
evaluate and average weights, as for any model, is in ``training.py`` beside this.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config

from fsdp_overlap import (
    FsdpContext,
    MixedPrecisionPolicy,
    find_blocks,
    fully_shard,
    register_fsdp_forward_method,
)

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
    tie_word_embeddings=True,  # tied weights stay in one unit, the root
    bos_token_id=None,
    eos_token_id=None,
)


def build(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """A sharded model with random weights, the same for every number of ranks.

    No rank ever holds all of it. With weights of ``from_pretrained(...)`` instead, which every rank
    loads, there is no meta device, ``to_empty()`` and ``init_weights()``.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ctx = FsdpContext()
    for block in find_blocks(model):
        fully_shard(block, ctx, mp_policy=policy)
    fully_shard(model, ctx, mp_policy=policy)
    # generate() calls forward for each token, and parts of some models by themselves, as encoders.
    register_fsdp_forward_method(model, "generate")
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.init_weights()
    model.activation_checkpointing_enable()
    return model


def batch(step: int, device: torch.device, rows: int = 16) -> torch.Tensor:
    """Rows that count up by a step of their own, other rows on each rank."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    first, by = torch.randint(VOCABULARY, (2, rows, 1), generator=generator)
    return ((first + by * torch.arange(LENGTH)) % VOCABULARY).to(device)


def save(model: PreTrainedModel, folder: Path) -> None:
    """What ``from_pretrained(folder)`` loads. Every rank takes part, the first one writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=full)


def run(folder: Path, steps: int) -> tuple[list[float], list[int]]:
    """Trains and saves; returns the losses on this rank and how the trained model counts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(CONFIG, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for step in range(steps):
        tokens = batch(step, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    model.eval()
    with torch.no_grad():
        tokens = model.generate(torch.tensor([[1, 3, 5]], device=device), max_new_tokens=5)
    save(model, folder)
    return losses, tokens[0].tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    _, counted = run(**vars(arguments))
    if dist.get_rank() == 0:
        print(f"counts {counted}; saved in {arguments.folder}")
    dist.destroy_process_group()
