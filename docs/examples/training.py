"""A training loop with all that one usually has: run it by

    torchrun --nproc-per-node 2 docs/examples/training.py --folder /tmp/run --epochs 3

Run it again with more epochs, on as many ranks as you like, and it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gc
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fsdp_overlap import FsdpContext, fully_shard

VOCABULARY, LENGTH, WIDTH = 17, 12, 32


class Block(nn.Module):
    """Each position looks at the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(2 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        before = nn.functional.pad(normed, (0, 0, 1, -1))
        return x + self.down(nn.functional.gelu(self.up(torch.cat([normed, before], dim=-1))))


def build() -> nn.Sequential:
    """Tokens ``[rows, length]`` to scores ``[rows, length, VOCABULARY]``."""
    blocks = [Block(), Block()]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def sequences(count: int, seed: int) -> TensorDataset:
    """Rows that count up by a step of their own: the next token follows from the last two."""
    generator = torch.Generator().manual_seed(seed)
    first, step = torch.randint(VOCABULARY, (2, count, 1), generator=generator)
    return TensorDataset((first + step * torch.arange(LENGTH + 1)) % VOCABULARY)


class Training:
    def __init__(
        self, folder: Path, half: bool = False, zero_stage: int = 3, microbatches: int = 2
    ) -> None:
        self.folder, self.microbatches = folder, microbatches
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)  # every rank builds the same model
        model = build().to(self.device)
        self.ctx = FsdpContext()
        for module in model:
            if isinstance(module, Block):
                fully_shard(module, self.ctx)
        self.model = fully_shard(model, self.ctx)
        # Made of sharded parameters, averages and optimizer states are sharded likewise.
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        # After the copy for averages, whose full parameters need not be kept between evaluations.
        self.model.set_zero_stage(zero_stage)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=200)
        # float16 needs its loss scaled, bfloat16 does not. Without the cache autocast does not
        # hold on to casts of what is gathered. (MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        # takes less memory: parameters are gathered in bfloat16, and no casts are saved.)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)
        self.dtype = torch.float16 if half else torch.bfloat16
        self.epoch = 0

    def loss(self, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, self.dtype, cache_enabled=False):
            scores = model(rows[:, :-1])
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())

    def train_epoch(self, data: TensorDataset, batch_size: int = 8) -> None:
        sampler: DistributedSampler = DistributedSampler(data, drop_last=True)
        sampler.set_epoch(self.epoch)
        self.model.train()
        # All ranks have equally many batches, as collectives need, and all steps equally many.
        batches = DataLoader(data, batch_size, sampler=sampler)
        used = len(batches) - len(batches) % self.microbatches
        for index, (rows,) in enumerate(islice(batches, used), start=1):
            is_step = index % self.microbatches == 0
            self.model.set_is_last_backward(is_step)
            loss = self.loss(self.model, rows.to(self.device)) / self.microbatches
            self.scaler.scale(loss).backward()
            if is_step:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.ctx.start_param_sync()  # at stages 1 and 2, under all that follows
                self.scheduler.step()
                self.average.update_parameters(self.model)
        self.epoch += 1

    @torch.no_grad()
    def evaluate(self, data: TensorDataset) -> float:
        """The mean loss of the averaged weights, over all ranks."""
        self.average.eval()
        loader = DataLoader(data, 16, sampler=DistributedSampler(data, shuffle=False))
        losses = [self.loss(self.average, rows.to(self.device)) for (rows,) in loader]
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rest = {"epoch": self.epoch, "scheduler": self.scheduler.state_dict()}
        if self.scaler.is_enabled():
            rest["scaler"] = self.scaler.state_dict()
        return {
            "model": model,
            "optimizer": optimizer,
            "average": self.average.state_dict(),
            **rest,
        }

    def save(self) -> None:
        self.ctx.release_unsharded()  # a checkpoint holds shards alone
        dcp.save(self.state(), checkpoint_id=self.folder / f"epoch-{self.epoch}")

    def resume(self) -> None:
        """From the last checkpoint, if there is one. DCP loads into the tensors of a state."""
        epochs = [int(path.parent.name[6:]) for path in self.folder.glob("epoch-*/.metadata")]
        if not epochs:
            return
        state = self.state()
        dcp.load(state, checkpoint_id=self.folder / f"epoch-{max(epochs)}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.average.load_state_dict(state["average"])
        self.scheduler.load_state_dict(state["scheduler"])
        if "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        self.epoch = state["epoch"]


def run(
    folder: Path, epochs: int, half: bool = False, zero_stage: int = 3, microbatches: int = 2
) -> list[float]:
    """Trains until ``epochs`` are done and returns the loss after each that was run here."""
    training = Training(folder, half, zero_stage, microbatches)
    training.resume()
    losses = []
    while training.epoch < epochs:
        training.train_epoch(sequences(256, seed=1))
        losses.append(training.evaluate(sequences(64, seed=2)))
        training.save()
        if dist.get_rank() == 0:
            print(f"epoch {training.epoch}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="seen by all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--half", action="store_true", help="float16 instead of bfloat16")
    parser.add_argument("--zero-stage", type=int, default=3, help="1 or 2 gathers less often")
    parser.add_argument("--microbatches", type=int, default=2, help="batches in a step")
    arguments = parser.parse_args()
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    run(**vars(arguments))
    gc.collect()  # of what holds process groups, whose threads must end before the interpreter
    dist.destroy_process_group()
