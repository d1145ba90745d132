"""Ray Train's TorchTrainer, whose train loop shards with us: run it by

    python docs/examples/ray_training.py --folder /tmp/run --epochs 3

which starts Ray on this machine with two workers. Run it again with more epochs, and it goes on
from the last checkpoint. It also does so by itself if a worker fails. ``--fsdp2`` trains on FSDP2's
units. The model and its task are those of ``training.py``. Ray makes the process group, divides the
data and keeps checkpoints. What differs from FSDP2 is how ``fully_shard`` is called.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from training import Block, build, sequences

from fsdp_overlap import FsdpContext, fully_shard


class Training:
    def __init__(self, is_fsdp2: bool) -> None:
        torch.manual_seed(0)  # every worker builds the same model
        self.model = build().to(get_device())
        mesh = init_device_mesh(get_device().type, (dist.get_world_size(),))
        self.ctx = FsdpContext(mesh)
        shard: Any = partial(fully_shard, ctx=self.ctx)
        if is_fsdp2:
            shard = partial(fsdp2.fully_shard, mesh=mesh)
        for module in self.model:
            if isinstance(module, Block):
                shard(module)
        shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.epoch = 0

    def train_epoch(self, loader: Any) -> float:
        """The mean loss of the epoch, over all workers."""
        if dist.get_world_size() > 1:
            loader.sampler.set_epoch(self.epoch)
        losses = []
        for (rows,) in loader:
            scores = self.model(rows[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        self.epoch += 1
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def save_and_report(self, loss: float) -> None:
        """Each worker writes its shards into a folder of its own. Ray puts the files of all workers
        together in its storage, as one checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "epoch": self.epoch}
        with tempfile.TemporaryDirectory() as folder:
            dcp.save(state, checkpoint_id=folder)
            metrics = {"epoch": self.epoch, "loss": loss}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))

    def load(self, checkpoint: Checkpoint) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
        with checkpoint.as_directory() as folder:
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.epoch = state["epoch"]


def make_loader() -> Any:
    """Of this worker's part of the data."""
    return prepare_data_loader(DataLoader(sequences(256, seed=1), batch_size=8, shuffle=True))


def train(config: dict[str, Any]) -> None:
    """The train loop, which every worker runs."""
    training = Training(config["is_fsdp2"])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        training.load(checkpoint)
    loader = make_loader()
    while training.epoch < config["epochs"]:
        loss = training.train_epoch(loader)
        training.save_and_report(loss)
        if dist.get_rank() == 0:
            print(f"epoch {training.epoch}: loss {loss:.4f}", flush=True)


def run(folder: Path, epochs: int, workers: int = 2, is_fsdp2: bool = False) -> Result:
    """Trains until ``epochs`` are done, on a cluster that ``ray.init()`` has started or found."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": epochs, "is_fsdp2": is_fsdp2},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="counting",
            storage_path=str(folder.resolve()),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="seen by all workers")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fsdp2", action="store_true", help="train on FSDP2's units")
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.workers, include_dashboard=False)
    try:
        result = run(arguments.folder, arguments.epochs, arguments.workers, arguments.fsdp2)
        print(result.metrics, result.checkpoint)
    finally:
        ray.shutdown()
