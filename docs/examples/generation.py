"""Half of the ranks train, the others generate with tensor parallelism, as in reinforcement
learning:

    torchrun --nproc-per-node 4 docs/examples/generation.py --folder /tmp/counting

Every few steps weights move from one half to the other, each rank sending only what another needs.
The model is small and starts from random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_overlap import FsdpContext, find_blocks, fully_shard
from fsdp_overlap.optim import AdamW
from fsdp_overlap.weights import WeightResharder, save_weights

VOCABULARY, LENGTH = 17, 12
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=None,
)
PROMPTS = torch.tensor([[3, 5, 7, 9], [1, 2, 3, 4], [16, 12, 8, 4]])


def shard(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """For training."""
    ctx = FsdpContext(mesh)
    for block in find_blocks(model):
        fully_shard(block, ctx)
    fully_shard(model, ctx)


def parallelize(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """For generation: each rank has some of the heads and of the hidden units."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for layer in model.model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "self_attn.q_proj": columns,
                "self_attn.k_proj": columns,
                "self_attn.v_proj": columns,
                "self_attn.o_proj": rows,
                "mlp.gate_proj": columns,
                "mlp.up_proj": columns,
                "mlp.down_proj": rows,
            },
        )


def batch(step: int, rank: int, rows: int = 16) -> torch.Tensor:
    """Rows that count up by a step of their own, other rows on each rank."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
    first, by = torch.randint(VOCABULARY, (2, rows, 1), generator=generator)
    return (first + by * torch.arange(LENGTH)) % VOCABULARY


def generate(model: LlamaForCausalLM) -> torch.Tensor:
    """The most likely tokens after the prompts, ``[prompts, LENGTH]``."""
    attended = torch.ones_like(PROMPTS)
    return model.generate(
        PROMPTS, attention_mask=attended, max_length=LENGTH, do_sample=False, pad_token_id=0
    )


def run(folder: Path, steps: int, every: int) -> list[torch.Tensor]:
    """Returns what was generated, on the ranks that generate."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    training = DeviceMesh("cpu", list(range(half)))
    generating = DeviceMesh("cpu", list(range(half, 2 * half)))
    trains = rank < half
    torch.manual_seed(0)  # of all weights only those that train count
    model = LlamaForCausalLM(CONFIG)
    if trains:
        shard(model, training)
        optimizer = AdamW(model.parameters(), lr=1e-2)
    else:
        parallelize(model, generating)
        torch.nn.init.zeros_(model.lm_head.weight)
    weights = WeightResharder(model if trains else None, None if trains else model)
    generated = []
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            weights.run()  # on all ranks
            if not trains:
                generated.append(generate(model))
        if trains and step < steps:
            tokens = batch(step, rank)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if trains:
        save_weights(model, folder)  # files that from_pretrained(folder) loads
    if rank == 0:
        model.config.save_pretrained(folder)
    return generated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the trained model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between generations")
    args = parser.parse_args()
    dist.init_process_group()
    generated = run(args.folder, args.steps, args.every)
    if dist.get_rank() == dist.get_world_size() - 1:
        for number, tokens in enumerate(generated):
            print(f"step {min(number * args.every, args.steps)}: {tokens[0].tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
