"""Fine-tuning of published weights of transformers, which no rank ever has whole:

    torchrun --nproc-per-node 2 docs/examples/fine_tuning.py --folder /tmp/tuned

The published model is a small one of experts, which rank 0 makes and saves as others do; nothing is
downloaded. It is trained on the sources of Python's standard library, as bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, find_blocks, fully_shard
from fsdp_overlap.optim import AdamW, clip_grad_norm_
from fsdp_overlap.tools.cli.data import Text, load_text, sample_batch
from fsdp_overlap.weights import load_weights, save_weights

LENGTH = 64
CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)


def publish(folder: Path) -> None:
    """Write what stands for a folder from a hub, in several files."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).bfloat16()
    model.save_pretrained(folder, max_shard_size="50KB")


def load(folder: Path) -> PreTrainedModel:
    """Return the model of ``folder``, sharded: float32 at rest, computed in bfloat16."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ctx = FsdpContext()
    for block in find_blocks(model):
        fully_shard(block, ctx, mp_policy=policy)
    fully_shard(model, ctx, mp_policy=policy)
    # Gives memory, and reads the ranges of the files that this rank's shards are made of: also of
    # experts, which the files have one by one and the model as one tensor.
    loaded = load_weights(model, folder)
    print(f"rank {dist.get_rank()} has read {loaded.nbytes / 1e3:.0f} kB", flush=True)
    return model


def train(model: PreTrainedModel, text: Text, steps: int, device: torch.device) -> list[float]:
    """Return this rank's losses, in nats per byte."""
    optimizer = AdamW(model.parameters(), lr=3e-3)
    draws = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        tokens, _ = sample_batch(text.train, 8, LENGTH, draws)
        tokens = tokens.to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def run(folder: Path, steps: int) -> list[float]:
    """Load, train and save what ``from_pretrained(folder / "tuned")`` loads. Return the losses."""
    if dist.get_rank() == 0:
        publish(folder / "published")
    dist.barrier()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(folder / "published")
    losses = train(model, load_text(None, LENGTH), steps, device)
    save_weights(model, folder / "tuned", dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder / "tuned")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    run(**vars(arguments))
    dist.destroy_process_group()
