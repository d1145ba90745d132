"""A small Qwen of transformers, trained by the trainers of others: "accelerate" or transformers'
"trainer" (with "fsdp2", or DDP), or "fabric" of Lightning (with "fsdp2", "fsdp", or DDP). "clip"
clips gradients, "bf16" computes in bfloat16, "checkpoint" recomputes activations."""

import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

GIVEN = set(sys.argv[1:])
WORDS = 32


class Numbers(Dataset):
    """Rows that count up, as the model and its labels."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (index + torch.arange(16)) % WORDS
        return {"input_ids": row, "labels": row}


def build() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def run_accelerate() -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )
    accelerator = Accelerator(
        fsdp_plugin=plugin if "fsdp2" in GIVEN else None,
        mixed_precision="bf16" if "bf16" in GIVEN else "no",
        gradient_accumulation_steps=2,
    )
    model: Any = build()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(Numbers(), batch_size=4, shuffle=True, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.3f}")
    accelerator.end_training()


def run_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {}
        if "fsdp2" in GIVEN:
            wrapped = {"version": 2, "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}
            settings = {"fsdp": True, "fsdp_config": wrapped}
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=6,
            logging_steps=2,
            save_strategy="no",
            report_to="none",
            bf16="bf16" in GIVEN,
            gradient_checkpointing="checkpoint" in GIVEN,
            dataloader_pin_memory=True,
            **settings,
        )
        Trainer(build(), args, train_dataset=Numbers()).train()


def run_fabric() -> None:
    from functools import partial

    import torch.distributed.fsdp as fsdp
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    def shard(model: Any, mesh: Any) -> Any:
        for block in model.model.layers:
            fsdp.fully_shard(block, mesh=mesh["data_parallel"])
        return fsdp.fully_shard(model, mesh=mesh["data_parallel"])

    ranks = int(os.environ["WORLD_SIZE"])
    strategy: Any = "ddp"
    if "fsdp2" in GIVEN:
        strategy = ModelParallelStrategy(
            partial(shard), data_parallel_size=ranks, tensor_parallel_size=1
        )
    elif "fsdp" in GIVEN:
        strategy = FSDPStrategy(auto_wrap_policy=ModuleWrapPolicy({Qwen3DecoderLayer}))
    fabric: Any = Fabric(accelerator="cuda", strategy=strategy, devices=ranks)
    fabric.launch()
    model: Any = build()
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(Numbers(), batch_size=4, pin_memory=True))
    for batch in loader:
        loss = model(**batch).loss
        fabric.backward(loss)
        if "clip" in GIVEN:
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    fabric.print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    runs = {"accelerate": run_accelerate, "trainer": run_trainer, "fabric": run_fabric}
    runs[next(name for name in runs if name in GIVEN)]()
