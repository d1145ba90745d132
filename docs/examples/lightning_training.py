"""lightning's Trainer with its ModelParallelStrategy, on units of ours: run it by

    python docs/examples/lightning_training.py --folder /tmp/run --epochs 3 --ranks 2

which starts the ranks, or under ``torchrun --nproc-per-node 2``. Run it again with more epochs, and
it goes on where it stopped. The model and its task are those of ``training.py``. Sharding is done
in ``configure_model()``, so what differs from FSDP2 is the import.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.utils.data import DataLoader
from training import Block, build, sequences

from fsdp_overlap import FsdpContext, FsdpModule, fully_shard


class Module(lightning.LightningModule):
    model: FsdpModule
    """Made by :meth:`configure_model`."""

    def __init__(self, accumulate: int = 2) -> None:
        super().__init__()
        self.accumulate = accumulate
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """lightning calls it more than once, as before a test that follows the fit."""
        if hasattr(self, "model"):
            return
        torch.manual_seed(0)  # every rank builds the same model
        model = build()
        assert self.device_mesh is not None
        self.ctx = FsdpContext(self.device_mesh["data_parallel"])
        for module in model:
            if isinstance(module, Block):
                fully_shard(module, self.ctx)
        self.model = fully_shard(model, self.ctx)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        # lightning would reduce gradients of every microbatch, as it does with FSDP2. The last
        # batch of an epoch ends a step too.
        is_step = (index + 1) % self.accumulate == 0 or self.trainer.is_last_batch
        self.model.set_requires_gradient_sync(is_step)
        [rows] = batch
        scores = self.model(rows[:, :-1])
        loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch + 1}: loss {self.losses[-1]:.4f}", flush=True)


def run(folder: Path, epochs: int, ranks: int = 2, accumulate: int = 2) -> Module:
    """Trains until ``epochs`` are done; ``losses`` has one for each that was run here."""
    lightning.seed_everything(0, verbose=False)
    is_on_cpu = not torch.cuda.is_available()
    trainer = lightning.Trainer(
        accelerator="cpu" if is_on_cpu else "gpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.4,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(accumulate)
    loader = DataLoader(sequences(256, seed=1), batch_size=8, shuffle=True)
    last = folder / "last.ckpt"  # of DCP, a folder
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="seen by all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    run(**vars(parser.parse_args()))
