"""A vision-language model, some ranks of which have images and others text alone:

    torchrun --nproc-per-node 2 docs/examples/multimodal.py

The vision tower is a conditional unit. Ranks without images run no forward of it on blank images:
they take part in its collectives, and add zero to its gradients. The model is a small Qwen2-VL with
random weights; nothing is downloaded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from fsdp_overlap import FsdpContext, find_blocks, fully_shard

NUMBERS, IMAGE = 17, 20  # tokens below NUMBERS are numbers; IMAGE stands where an image is
ROWS, LENGTH = 8, 6
PATCH, PATCHES = 4, 16  # an image of 4 by 4 patches, which become a quarter as many tokens
CONFIG = Qwen2VLConfig(
    text_config={
        "vocab_size": IMAGE + 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    vision_config={
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "patch_size": PATCH,
    },
    image_token_id=IMAGE,
)


def build() -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)  # every rank builds the same model
    return Qwen2VLForConditionalGeneration(CONFIG)


def shard(model: Qwen2VLForConditionalGeneration) -> None:
    ctx = FsdpContext(init_device_mesh("cpu", (dist.get_world_size(),)))
    for block in find_blocks(model):  # of the vision tower and of the language model
        fully_shard(block, ctx)
    fully_shard(model.model.visual, ctx, conditional=True)
    fully_shard(model, ctx)


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Rows that count up by a step of their own. An image before them is as bright as the step is
    large. In turn no rank has images, each alone, and several."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first, by = torch.randint(NUMBERS, (2, ROWS, 1), generator=generator)
    tokens = (first + by * torch.arange(LENGTH)) % NUMBERS
    if not step >> rank & 1:
        return {"input_ids": tokens}
    tokens = torch.cat([torch.full((ROWS, PATCHES // 4), IMAGE), tokens], dim=1)
    brightness = by.repeat_interleave(PATCHES, dim=0) / NUMBERS
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": brightness.expand(-1, 3 * 2 * PATCH * PATCH),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
    }


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    scores, numbers = model(**inputs).logits[:, -LENGTH:-1], inputs["input_ids"][:, 1 - LENGTH :]
    return nn.functional.cross_entropy(scores.flatten(0, 1), numbers.flatten())


def run(steps: int) -> tuple[nn.Module, list[float]]:
    """Train. Return the model and the losses on this rank."""
    model = build()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 25 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return model, losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(steps=200)
    dist.destroy_process_group()
