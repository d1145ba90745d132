"""Reinforcement learning whose samples have other lengths on each rank, from sharded weights:

    torchrun --nproc-per-node 2 docs/examples/uneven_generation.py

Within ``ctx.uneven()`` a rank that has sampled all of its tokens takes part in the forwards of the
others. The model is small and starts from random weights; nothing is downloaded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_overlap import FsdpContext, find_blocks, fully_shard

VOCABULARY, ROWS, PROMPT = 16, 8, 3
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
)


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)  # every rank builds the same model
    return LlamaForCausalLM(CONFIG)


def shard(model: LlamaForCausalLM) -> FsdpContext:
    ctx = FsdpContext(init_device_mesh("cpu", (dist.get_world_size(),)))
    for block in find_blocks(model):
        fully_shard(block, ctx)
    fully_shard(model, ctx)
    return ctx


def sample(model: LlamaForCausalLM, step: int, rank: int) -> torch.Tensor:
    """Return prompts and what follows them, longer on some ranks than on others."""
    torch.manual_seed(1000 * step + rank)
    prompts = torch.randint(VOCABULARY, (ROWS, PROMPT))
    new_tokens = 2 + (step + 3 * rank) % 5
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=True,
        pad_token_id=0,
        synced_gpus=False,  # else ranks that are done run forwards whose results are dropped
    )


def reward_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return for each row how many of its new tokens are even, in parts of all."""
    return (tokens[:, PROMPT:] % 2 == 0).to(torch.get_default_dtype()).mean(dim=1)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(input_ids=tokens[:, :-1]).logits[:, PROMPT - 1 :].flatten(0, 1)
    surprise = nn.functional.cross_entropy(scores, tokens[:, PROMPT:].flatten(), reduction="none")
    advantage = reward_of(tokens) - 0.5
    return (advantage[:, None] * surprise.view(len(tokens), -1)).mean()


def run(steps: int) -> tuple[nn.Module, list[list[list[int]]]]:
    """Train. Return the model and what this rank sampled in each step."""
    model = build()
    ctx = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = []
    for step in range(steps):
        with ctx.uneven():
            tokens = sample(model, step, dist.get_rank())
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
        samples.append(tokens.tolist())
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: reward {reward_of(tokens).mean():.2f}", flush=True)
    return model, samples


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(steps=41)
    dist.destroy_process_group()
