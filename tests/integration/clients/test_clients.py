"""accelerate and lightning run their own training loops on our units, as they do on FSDP2's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_overlap
from fsdp_overlap import FsdpContext, patch_fsdp2
from support.clients import check_alike, check_whose, example, forget_accelerators, whole
from support.examples import EXAMPLES
from support.ranks import close_pool, run_ranks


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_their_own() -> Iterator[None]:
    """What clients leave behind in a process ends with it."""
    yield
    close_pool()


# ---- accelerate ----


@contextlib.contextmanager
def accelerate_example() -> Iterator[Any]:
    with example("accelerate_training") as program:
        forget_accelerators()
        try:
            yield program
        finally:
            forget_accelerators()


def trainings(program: Any, folder: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    """The example's training, on our units and on FSDP2's."""
    ours = program.Training(Path(folder) / "ours", *args, **options)
    forget_accelerators()
    with mock.patch.object(program, "patch_fsdp2", contextlib.nullcontext):
        theirs = program.Training(Path(folder) / "theirs", *args, **options)
    check_whose(ours.model, theirs.model)
    return ours, theirs


def accelerated(folder: str) -> None:
    with accelerate_example() as program:
        losses, norms = [], []
        ours, theirs = trainings(program, folder)
        for training in (ours, theirs):
            clip = training.accelerator.clip_grad_norm_

            def noted(*args: Any, clip: Callable[..., Any] = clip, **options: Any) -> None:
                norm = clip(*args, **options)
                norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

            training.accelerator.clip_grad_norm_ = noted
            losses += [training.train_epoch() for _ in range(2)]
        assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)
        assert losses[1] < 0.9 * losses[0]
        steps = len(norms) // 2
        assert steps == 16
        torch.testing.assert_close(norms[:steps], norms[steps:], rtol=1e-4, atol=1e-5)
        assert sum(norm > 0.4 for norm in norms) >= steps  # of which clipping made something
        check_alike(ours.model, theirs.model)
        # Only a step's last microbatch is reduced.
        assert ours.ctx.stats.order_checks == steps
        assert ours.ctx.stats.reduce_scatters == 3 * steps


@pytest.mark.slow
def test_accelerate_trains_as_on_fsdp2(tmp_path: Path) -> None:
    run_ranks(accelerated, 2, str(tmp_path))


def resumed(folder: str) -> None:
    losses = []
    with accelerate_example() as program:
        for name, parts in (("whole", [2]), ("parts", [1, 2])):
            for epochs in parts:
                losses += program.run(Path(folder) / name, epochs)
                forget_accelerators()
    assert losses[:2] == losses[2:]


@pytest.mark.slow
def test_the_accelerate_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run_ranks(resumed, 2, str(tmp_path))


def full_state_dicts(folder: str) -> None:
    """Also from FSDP2's checkpoints to ours and back."""
    with accelerate_example() as program:
        ours, theirs = trainings(program, folder, state_dict_type="FULL_STATE_DICT")
        ours.train_epoch()
        ours.save()
        weights = whole(ours.model)
        moments = ours.optimizer.optimizer.state[next(ours.model.parameters())]["exp_avg"]
        theirs.folder = ours.folder
        theirs.resume()
        check_alike(ours.model, theirs.model)
        theirs.folder = Path(folder) / "theirs"
        theirs.save()
        ours.train_epoch()
        ours.folder = theirs.folder
        ours.resume()
        for name, value in whole(ours.model).items():
            assert torch.equal(value, weights[name]), name
        state = ours.optimizer.optimizer.state[next(ours.model.parameters())]
        assert torch.equal(state["exp_avg"].full_tensor(), moments.full_tensor())
        found = ours.accelerator.get_state_dict(ours.model)
        assert list(found) == (list(weights) if dist.get_rank() == 0 else [])
        for name, value in found.items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, weights[name]), name


def test_accelerate_saves_and_loads_whole_state_dicts(tmp_path: Path) -> None:
    run_ranks(full_state_dicts, 2, str(tmp_path))


class Headed(nn.Module):
    """With what accelerate makes a unit of each: an embedding, blocks, and a list of the last norm
    and the head."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        training = sys.modules["training"]
        self.embedding = nn.Embedding(training.VOCABULARY, training.WIDTH)
        self.blocks = nn.ModuleList([training.Block(), training.Block()])
        self.norm = nn.LayerNorm(training.WIDTH)
        self.head = nn.Linear(training.WIDTH, training.VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.is_tied = is_tied
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.is_tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def from_rank_0(folder: str, is_tied: bool, checkpointing: bool) -> None:
    """Only rank 0 has the weights, as transformers loads a model for this."""
    with accelerate_example() as program:

        def build() -> nn.Module:
            torch.manual_seed(dist.get_rank())
            return Headed(is_tied)

        with mock.patch.object(program, "build", build):
            ours, theirs = trainings(
                program,
                folder,
                cpu_ram_efficient_loading=True,
                activation_checkpointing=checkpointing,
            )
        torch.manual_seed(0)
        first = dict(Headed(is_tied).named_parameters())
        for name, value in whole(ours.model).items():
            assert torch.equal(value, first[name.replace("_checkpoint_wrapped_module.", "")]), name
        losses = [training.train_epoch() for training in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        check_alike(ours.model, theirs.model)


@pytest.mark.slow
@pytest.mark.parametrize(("is_tied", "checkpointing"), [(False, True), (True, False)])
def test_accelerate_loads_a_model_that_rank_0_has(
    tmp_path: Path, is_tied: bool, checkpointing: bool
) -> None:
    run_ranks(from_rank_0, 2, str(tmp_path), is_tied, checkpointing)


def clipped() -> None:
    """Of parameters over two meshes, and of some that are not sharded, accelerate puts the norm
    together itself."""
    world = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shard"))
    gradients, norms = [], []
    for library in (fsdp_overlap, fsdp2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        library.fully_shard(model[0], mesh=grid["shard"])
        library.fully_shard(model, mesh=world, ignored_params=set(model[2].parameters()))
        model(torch.ones(2, 4)).sum().backward()
        with accelerate_example() as program:
            accelerator = program.make_accelerator(1)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
        gradients.append(
            [
                grad.full_tensor() if isinstance(grad, DTensor) else grad
                for grad in (parameter.grad for parameter in model.parameters())
            ]
        )
    torch.testing.assert_close(norms[0], norms[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert norms[0] > 1


def test_accelerate_clips_over_several_meshes_as_with_fsdp2() -> None:
    run_ranks(clipped, 4)


# ---- lightning ----


def fits(folder: str) -> None:
    with example("lightning_training") as program:
        ours = program.run(Path(folder) / "ours", epochs=2)
        steps = 2 * 8
        assert ours.ctx.stats.order_checks == steps
        assert ours.ctx.stats.reduce_scatters == 3 * steps
        for epochs in (1, 2):
            parts = program.run(Path(folder) / "parts", epochs)
        assert parts.losses == ours.losses[1:]

        def theirs_of(module: nn.Module, ctx: FsdpContext) -> nn.Module:
            return fsdp2.fully_shard(module, mesh=ctx.mesh)

        with mock.patch.object(program, "fully_shard", theirs_of):
            theirs = program.run(Path(folder) / "theirs", epochs=2)
    check_whose(ours, theirs)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.losses[1] < 0.9 * ours.losses[0]
    check_alike(ours, theirs)


@pytest.mark.slow
def test_lightning_trains_as_on_fsdp2_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run_ranks(fits, 2, str(tmp_path))


def fabric_losses(program: Any, folder: Path, first: str, last: str) -> list[float]:
    """Trains, saves all in one file, goes on; trained by ``first``, and then from that file by
    ``last``."""
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy

    def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for module in (model[1], model[2], model):
            fsdp2.fully_shard(module, mesh=mesh["data_parallel"])
        return model

    losses = []
    for library in dict.fromkeys((first, last)):
        ctx = FsdpContext()
        with patch_fsdp2(ctx) if library == "ours" else contextlib.nullcontext():
            strategy = ModelParallelStrategy(sharded, 2, 1, save_distributed_checkpoint=False)
            fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
            fabric.launch()
            torch.manual_seed(0)
            model = fabric.setup(program.build())
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
            if library != first:
                fabric.load(folder / "state", {"model": model, "optimizer": optimizer})
        [rows] = program.sequences(32, seed=1)[8 * dist.get_rank() :]
        before = len(losses)
        for index in range(before, 8):
            if index == 4 and library == first:
                fabric.save(folder / "state", {"model": model, "optimizer": optimizer})
                if library != last:
                    break
            is_step = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not is_step):
                scores = model(rows[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores, rows[:, 1:].flatten())
                fabric.backward(loss)
            if is_step:
                fabric.clip_gradients(model, optimizer, max_norm=0.4)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if library == "ours":
            assert isinstance(model.module, fsdp_overlap.FSDPModule)
            assert ctx.stats.order_checks == (len(losses) - before) // 2  # one for a step
        else:
            assert not isinstance(model.module, fsdp_overlap.FSDPModule)
    return losses


def fabric(folder: str) -> None:
    with example("lightning_training") as program:
        expected = fabric_losses(program, Path(folder), "theirs", "theirs")
        for first, last in (("ours", "ours"), ("ours", "theirs"), ("theirs", "ours")):
            found = fabric_losses(program, Path(folder), first, last)
            assert found == pytest.approx(expected, rel=1e-5), (first, last)
            dist.barrier()


@pytest.mark.slow
def test_lightnings_fabric_trains_as_on_fsdp2_and_loads_its_checkpoints(tmp_path: Path) -> None:
    run_ranks(fabric, 2, str(tmp_path))


# ---- as a program ----


@pytest.mark.slow
def test_the_lightning_example_starts_its_ranks_itself(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "lightning_training.py"), "--ranks", "2"]
    program += ["--folder", str(tmp_path), "--epochs", "1"]
    started = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = started.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):  # of ranks that outlive the first
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, err
    assert "epoch 1: loss" in out
    assert (tmp_path / "last.ckpt" / "__1_0.distcp").exists()
