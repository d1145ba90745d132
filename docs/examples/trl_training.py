"""TRL's trainer for supervised fine-tuning, on units of ours: run it by

    torchrun --nproc-per-node 2 docs/examples/trl_training.py --folder /tmp/run

or, with ``--fsdp2``, on FSDP2's. With ``--lora`` it trains adapters of PEFT alone, and saves them.
What differs from TRL with FSDP2 is one line, ``with patch_fsdp2()``. The model, its tokenizer
and texts are small and made here, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before TRL asks the hub

import torch
import torch.distributed as dist
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import SFTConfig, SFTTrainer

from fsdp_overlap import FsdpContext, patch_fsdp2

NUMBERS = 17
ADAPTERS = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])


def use_fsdp_on_cpu(trainer: Any) -> None:
    """accelerate knows FSDP on accelerators alone: on a CPU it says nothing, leaves the plugin
    aside and takes DDP. Once told, it does there what it does on GPUs."""
    if not torch.cuda.is_available():
        state = trainer.accelerator.state
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        trainer.is_fsdp_enabled = True


class Trainer(SFTTrainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp_on_cpu(self)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number."""
    words = ["<pad>", "<eos>", *map(str, range(NUMBERS))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_texts(count: int = 256) -> Dataset:
    """Prompts that count up by a step of their own, and their completions of several lengths."""
    rows = []
    for index in range(count):
        first, by = index % NUMBERS, index // NUMBERS % NUMBERS
        words = [str((first + by * place) % NUMBERS) for place in range(8 + index % 3)]
        rows.append({"prompt": " ".join(words[:4]), "completion": f" {' '.join(words[4:])} <eos>"})
    return Dataset.from_list(rows)


def make_model(tokenizer: PreTrainedTokenizerFast, **options: Any) -> Any:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    torch.manual_seed(0)  # every rank builds the same model
    return AutoModelForCausalLM.from_config(config)


def make_settings(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"},
    }


def run(
    folder: Path, steps: int, is_fsdp2: bool = False, lora: bool = False, **options: Any
) -> tuple[Any, FsdpContext]:
    """Trains and saves. ``options`` are more of those of ``SFTConfig``."""
    tokenizer = make_tokenizer()
    trainer = Trainer(
        model=make_model(tokenizer),
        args=SFTConfig(**make_settings(folder, steps) | options),
        train_dataset=make_texts(),
        processing_class=tokenizer,
        peft_config=ADAPTERS if lora else None,
    )
    ctx = FsdpContext()  # optional: for its counters, prefetch and layouts
    with contextlib.nullcontext() if is_fsdp2 else patch_fsdp2(ctx):
        trainer.train()  # accelerate calls fully_shard() in it
        trainer.save_model()
    return trainer, ctx


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="seen by all ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lora", action="store_true", help="train adapters alone")
    parser.add_argument("--fsdp2", action="store_true", help="train on FSDP2's units")
    arguments = parser.parse_args()
    trainer, ctx = run(arguments.folder, arguments.steps, arguments.fsdp2, arguments.lora)
    trainer.accelerator.print(ctx.stats)
    # The model holds process groups, whose threads end with them.
    del trainer, ctx
    gc.collect()
    dist.destroy_process_group()
