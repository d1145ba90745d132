"""accelerate's training loop with its FSDP version 2, on units of ours: run it by

    torchrun --nproc-per-node 2 docs/examples/accelerate_training.py --folder /tmp/run --epochs 3

or, to set what is below by its own configuration, by ``accelerate launch``. Run it again with more
epochs, on as many ranks, and it goes on where it stopped. The model and its task are those of
``training.py``. What differs from accelerate with FSDP2 is one line, ``with patch_fsdp2()``.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from training import build, sequences

from fsdp_overlap import FsdpContext, patch_fsdp2


def make_accelerator(accumulate: int, **options: object) -> Accelerator:
    """``options``: more of those of the plugin, as ``cpu_ram_efficient_loading=True``."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],  # one unit each
        **options,
    )
    is_on_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=is_on_cpu,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=accumulate,
        # Whose order follows from the epoch, so that a run that was stopped goes on alike.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    if is_on_cpu:
        # accelerate knows FSDP on accelerators alone: on a CPU it says nothing, leaves the plugin
        # aside and takes DDP. Once told, it does there what it does on GPUs.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


class Training:
    def __init__(self, folder: Path, accumulate: int = 2, **options: object) -> None:
        self.folder, self.epoch = folder, 0
        self.accelerator = make_accelerator(accumulate, **options)
        set_seed(0)  # every rank builds the same model
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
        loader = DataLoader(sequences(256, seed=1), batch_size=8, shuffle=True)
        self.ctx = FsdpContext()  # optional: for its counters, prefetch and layouts
        # prepare() calls fully_shard(), and gives the optimizer the sharded parameters.
        with patch_fsdp2(self.ctx):
            self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
                model, optimizer, scheduler, loader
            )

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.model(rows[:, :-1])
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())

    def train_epoch(self) -> float:
        """The mean loss of the epoch, over all ranks."""
        self.model.train()
        self.loader.set_epoch(self.epoch)
        losses = []
        for (rows,) in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.loss(rows)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm=0.4)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                losses.append(loss.detach())
        self.epoch += 1
        return self.accelerator.reduce(torch.stack(losses).mean(), "mean").item()

    def save(self) -> None:
        """Weights and optimizer states as a checkpoint of DCP, the rest as accelerate does."""
        self.accelerator.save_state(str(self.folder / f"epoch-{self.epoch}"))

    def resume(self) -> None:
        """From the last checkpoint, if there is one."""
        epochs = [int(path.name[6:]) for path in self.folder.glob("epoch-*")]
        if epochs:
            self.epoch = max(epochs)
            self.accelerator.load_state(str(self.folder / f"epoch-{self.epoch}"))


def run(folder: Path, epochs: int) -> list[float]:
    """Trains until ``epochs`` are done and returns the loss of each that was run here."""
    training = Training(folder)
    training.resume()
    losses = []
    while training.epoch < epochs:
        losses.append(training.train_epoch())
        training.save()
        training.accelerator.print(f"epoch {training.epoch}: loss {losses[-1]:.4f}", flush=True)
    training.accelerator.print(training.ctx.stats)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="seen by all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    run(**vars(parser.parse_args()))
    # The model holds process groups, whose threads end with them. One that frees a tensor while the
    # interpreter ends would abort it, on FSDP2's units as well.
    gc.collect()
    torch.distributed.destroy_process_group()
