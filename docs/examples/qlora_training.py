"""QLoRA: PEFT's adapters, trained on weights that bitsandbytes holds in four or eight bits:

    torchrun --nproc-per-node 2 docs/examples/qlora_training.py --folder /tmp/tuned

The packed weights are sharded and gathered as they are, in a quarter of the bytes of bfloat16 with
``--bits 4``. Nothing casts them, whatever policy a unit has. Only adapters are reduced, and saved.
The model is small and starts from random weights, so that nothing is downloaded.
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
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, Qwen3Config

from fsdp_overlap import FsdpContext, find_blocks, fully_shard

VOCABULARY, LENGTH = 17, 12
CONFIG = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    initializer_range=0.1,
)
ADAPTERS = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
QUANTIZATION = {
    4: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    8: BitsAndBytesConfig(load_in_8bit=True),
}


def write_base(folder: Path) -> None:
    """Writes a model of random weights, in the place of one that is downloaded."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)  # of which one rank writes
    dist.barrier()


def load_base(folder: Path, bits: int, device: torch.device) -> PreTrainedModel:
    """The same weights on every rank, quantized on the device where they will be used."""
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=QUANTIZATION[bits], device_map=device
    )
    for module in base.modules():
        # On a CPU that has AVX512-BF16, an evaluation would replace the packed weights for good.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return base


def batch(step: int, device: torch.device, rows: int = 16) -> torch.Tensor:
    """Rows that count up by a step of their own, other rows on each rank."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    first, by = torch.randint(VOCABULARY, (2, rows, 1), generator=generator)
    return ((first + by * torch.arange(LENGTH)) % VOCABULARY).to(device)


class Training:
    def __init__(self, base: Path, bits: int, is_fsdp2: bool = False) -> None:
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", dist.get_node_local_rank())
        self.model: Any = get_peft_model(load_base(base, bits, self.device), ADAPTERS)
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
        nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self, folder: Path) -> None:
        """The adapters alone. Every rank takes part, the first one writes."""
        # get_model_state_dict() of torch does not know all keys that bitsandbytes adds.
        adapters = {
            name: each.full_tensor().cpu()
            for name, each in self.model.named_parameters()
            if each.requires_grad
        }
        if dist.get_rank() == 0:
            self.model.save_pretrained(folder, state_dict=adapters)


def load(folder: Path, bits: int) -> PeftModel:
    """What was saved, on the base model, in one process and without sharding."""
    base = load_base(folder / "base", bits, torch.device("cpu"))
    return PeftModel.from_pretrained(base, folder / "adapters")


def run(
    folder: Path, steps: int, bits: int, is_fsdp2: bool = False
) -> tuple[Training, list[float]]:
    """Trains and saves."""
    write_base(folder / "base")
    training = Training(folder / "base", bits, is_fsdp2)
    training.model.train()
    losses = []
    for step in range(steps):
        losses.append(training.step(batch(step, training.device)))
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    training.save(folder / "adapters")
    return training, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--fsdp2", action="store_true", help="train on FSDP2's units")
    arguments = parser.parse_args()
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    training, _ = run(arguments.folder, arguments.steps, arguments.bits, arguments.fsdp2)
    if dist.get_rank() == 0:
        print(f"adapters in {arguments.folder / 'adapters'}; {training.ctx.stats}")
    dist.destroy_process_group()
