"""The example of Ray Train, on our units and on FSDP2's, in a process of its own.

Its first workers fail in the second epoch, so Ray starts others, which go on from the checkpoint
that the first have reported. The second workers also train on FSDP2, without a stop.
``python tests/support/ray_run.py FOLDER``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray
import ray.train
import ray_training as program
import torch
import torch.distributed.checkpoint as dcp

import fsdp_overlap

EPOCHS = 3


class FailingTraining(program.Training):
    def train_epoch(self, loader: Any) -> float:
        loss = super().train_epoch(loader)
        if self.epoch == 2:
            raise ArithmeticError("planned")
        return loss


def train(config: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses of FSDP2, and the weights that it trained."""
    if ray.train.get_checkpoint() is None:
        with mock.patch.object(program, "Training", FailingTraining):
            program.train(config)
    training = program.Training(is_fsdp2=True)
    assert not any(isinstance(module, fsdp_overlap.FSDPModule) for module in training.model)
    loader = program.make_loader()
    losses = [training.train_epoch(loader) for _ in range(EPOCHS)]
    program.train(config)
    weights = {name: each.full_tensor() for name, each in training.model.named_parameters()}
    return losses, {name: weight.numpy(force=True) for name, weight in weights.items()}


def main(folder: Path) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        with mock.patch.object(program, "train", train):
            result = program.run(folder, EPOCHS)
    finally:
        ray.shutdown()
    losses, weights = result.return_value
    reports = [metrics for _, metrics in result.best_checkpoints]
    assert [report["epoch"] for report in reports] == [1, 2, 3]
    assert [report["loss"] for report in reports] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    state = {"model": program.build().state_dict(), "epoch": 0}
    with result.checkpoint.as_directory() as saved:
        dcp.load(state, checkpoint_id=saved)
    assert state["epoch"] == EPOCHS
    for name, value in state["model"].items():
        expected = torch.tensor(weights[name])
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("trained alike")
