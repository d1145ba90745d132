"""Programs from public reports of optimizers that did the wrong thing under sharding, beside an
unsharded twin that sees all ranks' batches."""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import lr_scheduler, swa_utils

from fsdp_overlap import BlockAtomic, Flat, FsdpContext, PerTensor, TensorAtomic, fully_shard
from fsdp_overlap.comm.comm_streams import HostWorkHandle
from fsdp_overlap.engine import grads
from fsdp_overlap.optim import AdamW, LayerWise, Muon, OverlapPolicy
from fsdp_overlap.optim.adamw import KernelCall
from support.ranks import run_ranks

WIDTH = 6


class Block(nn.Module):
    """A unit of parameters of several groups: a matrix, a bias, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, 3)
        self.uses = [True, True, True]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block, is_used in zip(self.blocks, self.uses, strict=True):
            if is_used:
                x = block(x)
        return self.last(x)


_FLAT = Flat()


@dataclass(frozen=True)
class Column:
    """An optimizer of ours, and that of the twin. ``kind``: the option of groups of matrices, and
    its value in those of others. ``refuses``: what is an error, by program."""

    make: Callable[[Any], Any]
    twin: Callable[[Any], Any] = torch.optim.AdamW
    layout: Any = _FLAT
    mesh: tuple[int, ...] = ()
    is_offloaded: bool = False
    kind: tuple[str, Any] | None = None
    refuses: Mapping[str, str] = field(default_factory=dict)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Run:
    """What a program trains: sharded, or as one process that sees all ranks' batches."""

    def __init__(self, column: Column, is_twin: bool) -> None:
        self.column = column
        self.is_twin = is_twin
        self.values: list[torch.Tensor] = []

    def model(self, seed: int = 0, frozen: str | None = None) -> Any:
        """Return a model, sharded if this is no twin. ``frozen``: names of frozen parameters."""
        torch.manual_seed(seed)
        model = Model().double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen is None or not re.search(frozen, name))
        if not self.is_twin:
            shape = self.column.mesh or (dist.get_world_size(),)
            mesh = init_device_mesh(
                "cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
            )
            ctx = FsdpContext(
                mesh, layout=self.column.layout, shard_optimizer_over_replicas=len(shape) > 1
            )
            offload = {"offload_policy": CPUOffloadPolicy()} if self.column.is_offloaded else {}
            for unit in (*model.blocks, model):
                fully_shard(unit, ctx, **offload)
        return model

    def group(self, parameters: Any, **options: Any) -> list[dict[str, Any]]:
        """Return ``parameters`` as groups: matrices apart if the optimizer wants that."""
        parameters = list(parameters)
        if self.column.kind is None:
            return [{"params": parameters, **options}]
        name, other = self.column.kind
        matrices = [p for p in parameters if p.dim() == 2]
        rest = [p for p in parameters if p.dim() != 2]
        groups = [{"params": matrices, **options}, {"params": rest, name: other, **options}]
        return [group for group in groups if group["params"]]

    def optimizer(self, groups: Any) -> Any:
        if not isinstance(groups, list):
            groups = self.group(groups.parameters(), lr=0.05)
        return (self.column.twin if self.is_twin else self.column.make)(groups)

    def mean(
        self, loss_of: Callable[[torch.Tensor, int], torch.Tensor], index: int
    ) -> torch.Tensor:
        """Return the mean over ranks of the loss of a batch, of this rank alone if sharded."""
        size = dist.get_world_size()
        ranks = range(size) if self.is_twin else [dist.get_rank()]
        losses = []
        for rank in ranks:
            generator = torch.Generator().manual_seed(100 * index + rank)
            batch = torch.randn(4, 5, dtype=torch.float64, generator=generator)
            losses.append(loss_of(batch, rank))
        return torch.stack(losses).mean()

    def loss(self, model: Any, index: int) -> torch.Tensor:
        return self.mean(lambda batch, rank: (model(batch) - 1).square().mean(), index)

    def step(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def train(self, model: Any, optimizer: Any, steps: Any = range(2)) -> None:
        for index in steps:
            self.loss(model, index).backward()
            self.step(optimizer)

    def is_last_backward(self, model: Any, is_last: bool) -> None:
        if not self.is_twin:
            model.set_is_last_backward(is_last)

    def saved(self, model: Any, optimizer: Any) -> Callable[[Any, Any], None]:
        """Save a checkpoint. Return what loads it."""
        if self.is_twin:
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

            def restore(model: Any, optimizer: Any) -> None:
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])

            return restore
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        dcp.save(
            dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
            checkpoint_id=folder[0],
        )

        def load(model: Any, optimizer: Any) -> None:
            states = dict(
                zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
            )
            dcp.load(states, checkpoint_id=folder[0])
            set_state_dict(
                model,
                optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optimizer"],
            )
            dist.barrier()
            shutil.rmtree(folder[0], ignore_errors=True)

        return load

    def note(self, *tensors: Any) -> None:
        """Note values that must be the twin's."""
        self.values += [whole(tensor).detach().clone() for tensor in tensors]

    def note_loss(self, model: Any, index: int) -> None:
        with torch.no_grad():
            loss = self.loss(model, index)
        if not self.is_twin:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.note(loss)


RIGHT = ("right", "refused")
PROGRAMS: dict[str, Callable[[Run], None]] = {}
REPORTS: dict[str, str] = {}


def program(report: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(act: Callable[..., None]) -> Callable[..., None]:
        PROGRAMS[act.__name__], REPORTS[act.__name__] = act, report
        return act

    return add


# ---- averages of weights ----


@program("pytorch #117742, #106858: modifying parameters by hand, EMA, evaluation")
def ema_swapped_for_evaluation(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    parameters = list(model.parameters())
    ema = [p.detach().clone() for p in parameters]
    for index in range(4):
        run.loss(model, index).backward()
        run.step(optimizer)
        with torch.no_grad():
            torch._foreach_lerp_(ema, [p.detach() for p in parameters], 0.3)
        if index % 2:
            model.eval()
            with torch.no_grad():
                kept = [p.detach().clone() for p in parameters]
                for p, average in zip(parameters, ema, strict=True):
                    p.copy_(average)
            run.note_loss(model, 50)
            with torch.no_grad():
                for p, own in zip(parameters, kept, strict=True):
                    p.data.copy_(own)
            model.train()
    run.note(*parameters, *ema)


@program("NCAR/miles-credit #416: EMA of local shards, swapped in place")
def ema_of_local_shards(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)

    def local(p: Any) -> torch.Tensor:
        return (p.to_local() if hasattr(p, "to_local") else p).detach()

    ema = [local(p).clone() for p in model.parameters()]
    for index in range(3):
        run.loss(model, index).backward()
        run.step(optimizer)
        for average, p in zip(ema, model.parameters(), strict=True):
            average.mul_(0.7).add_(local(p), alpha=0.3)
    for average, p in zip(ema, model.parameters(), strict=True):
        local(p).copy_(average)
    run.note_loss(model, 50)
    run.note(*model.parameters())


@program("tnt #565, Lightning #21414: AveragedModel of a sharded model")
def averaged_model(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    averaged = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7), use_buffers=True
    )
    scheduler = swa_utils.SWALR(optimizer, 0.01, anneal_epochs=2)
    for index in range(4):
        run.loss(model, index).backward()
        run.step(optimizer)
        averaged.update_parameters(model)
        scheduler.step()
        run.note_loss(averaged, 50)
    run.note(*averaged.module.parameters(), *model.parameters())


@program("TRL #1971: TR-DPO's reference model follows the trained one")
def reference_model_follows(run: Run) -> None:
    model, reference = run.model(), run.model(1)
    reference.requires_grad_(False)
    optimizer = run.optimizer(model)
    for index in range(4):
        with torch.no_grad():
            run.note_loss(reference, index)

        def loss_of(batch: torch.Tensor, rank: int) -> torch.Tensor:
            with torch.no_grad():
                target = reference(batch)
            return (model(batch) - target).square().mean()

        run.mean(loss_of, index).backward()
        run.step(optimizer)
        for target, p in zip(reference.parameters(), model.parameters(), strict=True):
            target.data.mul_(1 - 0.4).add_(p.data, alpha=0.4)
    run.note(*reference.parameters(), *model.parameters())


# ---- several backwards ----


@program("fairscale #989: sharpness-aware minimization")
def sharpness_aware(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for index in range(3):
        run.is_last_backward(model, False)
        run.loss(model, index).backward()
        with torch.no_grad():
            norm = torch.stack([whole(p.grad.norm()) for p in model.parameters()]).norm()
            kept = [p.detach().clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(p.grad * (0.05 / norm))
        optimizer.zero_grad()
        run.is_last_backward(model, True)
        run.loss(model, index).backward()
        with torch.no_grad():
            for p, own in zip(model.parameters(), kept, strict=True):
                p.data.copy_(own)
        run.step(optimizer)
    run.note(*model.parameters())


@program("pytorch #124523, accelerate #1153: the last accumulation is cut short")
def last_accumulation_is_cut_short(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for epoch in range(2):
        for index in range(5):
            is_last = index % 2 == 1
            run.is_last_backward(model, is_last)
            (run.loss(model, 10 * epoch + index) / 2).backward()
            if is_last or index == 4:  # with a backward that was not said to be the last
                run.step(optimizer)
    run.note(*model.parameters())


@program("FunASR #3472: gradients are synchronized in the last backward alone")
def no_sync(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for index in range(6):
        is_last = index % 2 == 1
        if not run.is_twin:
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
        (run.loss(model, index) / 2).backward()
        if is_last:
            run.step(optimizer)
    run.note(*model.parameters())


@program("pytorch #132068: a GAN, whose generator's loss leads through the discriminator")
def gan(run: Run, toggles: bool = False, clip: float | None = None) -> None:
    generator, critic = run.model(), run.model(1)
    first, second = run.optimizer(generator), run.optimizer(critic)

    def through(batch: torch.Tensor, rank: int) -> torch.Tensor:
        fake = generator(batch)
        return critic(torch.cat([fake, fake[:, :2]], 1)).square().mean()

    def apart(batch: torch.Tensor, rank: int) -> torch.Tensor:
        fake = generator(batch).detach()
        return (critic(torch.cat([fake, fake[:, :2]], 1)) - 1).square().mean() + critic(
            batch
        ).square().mean()

    for index in range(4):
        if toggles:
            generator.requires_grad_(False)
        second.zero_grad()
        run.mean(apart, index).backward()
        second.step()
        if clip is not None:
            with torch.no_grad():
                for p in critic.parameters():
                    p.data.clamp_(-clip, clip)
        if toggles:
            generator.requires_grad_(True)
            critic.requires_grad_(False)
        first.zero_grad()
        run.mean(through, index).backward()
        first.step()
        if toggles:
            critic.requires_grad_(True)
    run.note(*generator.parameters(), *critic.parameters())


@program("Lightning's toggle_optimizer; WassersteinGAN #32: weights clamped after steps")
def gan_toggled_and_clamped(run: Run) -> None:
    gan(run, toggles=True, clip=0.2)


@program("gradients of inputs alone: FGSM, FreeLB, gradient penalties")
def adversarial_inputs(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for index in range(3):

        def loss_of(batch: torch.Tensor, rank: int) -> torch.Tensor:
            batch = batch.requires_grad_()
            (gradient,) = torch.autograd.grad((model(batch) - 1).square().mean(), batch)
            return (model(batch.detach() + 0.1 * gradient.sign()) - 1).square().mean()

        run.mean(loss_of, index).backward()
        run.step(optimizer)
    run.note(*model.parameters())


# ---- parameters that come and go ----


@program("Lightning #6891, #21901: layers unfrozen mid-run as new groups, with a resume")
def unfrozen_as_new_groups(run: Run) -> None:
    model = run.model(frozen="blocks")
    optimizer = run.optimizer(run.group(trained(model), lr=0.05))
    run.train(model, optimizer, range(2))
    for block in reversed(model.blocks):
        block.requires_grad_(True)
        for group in run.group(block.parameters(), lr=0.005):
            optimizer.add_param_group(group)
        run.train(model, optimizer, range(2, 4))
    restore = run.saved(model, optimizer)
    model = run.model(1, frozen="blocks")
    optimizer = run.optimizer(run.group(trained(model), lr=1.0))
    for block in reversed(model.blocks):
        block.requires_grad_(True)
        for group in run.group(block.parameters(), lr=1.0):
            optimizer.add_param_group(group)
    restore(model, optimizer)
    run.train(model, optimizer, range(4, 7))
    run.note(*model.parameters())


@program("PEFT: all parameters in the group after unfreezing")
def group_of_all_parameters(run: Run) -> None:
    model = run.model(frozen="blocks.0|norm")
    optimizer = run.optimizer(
        run.group([p for p in model.parameters() if p.requires_grad], lr=0.05)
    )
    run.train(model, optimizer, range(3))
    model.requires_grad_(True)
    for group, all_ in zip(optimizer.param_groups, run.group(model.parameters()), strict=True):
        group["params"] = all_["params"]
    run.train(model, optimizer, range(3, 6))
    run.note(*model.parameters())


@program("LISA, BAdam: other layers are trained every few steps, by new optimizers")
def layers_in_turn(run: Run) -> None:
    model = run.model()
    for turn in range(4):
        for number, block in enumerate(model.blocks):
            block.requires_grad_(number == turn % 3)
        optimizer = run.optimizer(
            run.group([p for p in model.parameters() if p.requires_grad], lr=0.05)
        )
        run.train(model, optimizer, range(3 * turn, 3 * turn + 3))
    run.note(*model.parameters())


@program("Megatron-LM #6871: a stale gradient of a layer that is passed by for a step")
def layer_drop(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for index in range(6):
        model.uses = [index % 3 != 1, True, index % 2 == 0]
        run.loss(model, index).backward()
        run.step(optimizer)
    run.note(*model.parameters())


@program("no tokens for an expert of one rank")
def layer_that_one_rank_passes_by(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)

    def loss_of(batch: torch.Tensor, rank: int) -> torch.Tensor:
        model.uses[1] = rank == 0 or index % 2 == 0
        if not run.is_twin and not model.uses[1]:
            # the unit runs, and its output does not count
            model.uses[1] = True
            return (model(batch) * 0 + 1).square().mean()
        if not model.uses[1]:
            return (model(batch) * 0 + 1).square().mean()
        return (model(batch) - 1).square().mean()

    for index in range(4):
        run.mean(loss_of, index).backward()
        run.step(optimizer)
    model.uses[1] = True
    run.note(*model.parameters())


# ---- groups and schedules ----


@program("fairscale #539, torchtitan #2210: a rate and decay for each parameter of a unit")
def rates_by_layer(run: Run) -> None:
    model = run.model()
    groups = []
    for depth, layer in enumerate([model.first, *model.blocks, model.last]):
        for name, parameter in layer.named_parameters():
            decay = 0.0 if "bias" in name or "norm" in name else 0.3
            groups += run.group([parameter], lr=0.1 * 0.5 ** (4 - depth), weight_decay=decay)
    optimizer = run.optimizer(groups)
    scheduler = lr_scheduler.LambdaLR(
        optimizer,
        [partial(lambda n, step: (1 + step) / (4 + n % 3), n) for n in range(len(groups))],
    )
    for index in range(5):
        run.loss(model, index).backward()
        run.step(optimizer)
        for _ in range(2):  # accelerate #1382: as often as there are processes
            scheduler.step()
    run.note(*model.parameters())


@program("modded-nanogpt: two optimizers of parameters of one unit")
def two_optimizers_of_each_unit(run: Run) -> None:
    model = run.model()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    first, second = (
        run.optimizer(run.group(matrices, lr=0.05)),
        run.optimizer(run.group(others, lr=0.1)),
    )
    for index in range(5):
        run.loss(model, index).backward()
        first.step()
        if index % 2:
            second.step()
            second.zero_grad()
        first.zero_grad()
    run.note(*model.parameters())


@program("DeepSpeed #8415: steps of losses that are not finite are left out")
def nan_is_skipped(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for index in range(5):
        loss = run.loss(model, index)
        if index in (2, 3):
            loss = loss * float("nan")
        loss.backward()
        if index in (2, 3):
            optimizer.zero_grad()
            continue
        run.step(optimizer)
    run.note(*model.parameters())


# ---- states ----


@program("pytorch-lr-finder #1, #11: rates are tried, then weights and states restored")
def lr_finder(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    run.train(model, optimizer, range(2))
    kept = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    scheduler = lr_scheduler.ExponentialLR(optimizer, 2)
    for index in range(4):
        run.loss(model, index).backward()
        run.step(optimizer)
        scheduler.step()
        run.note_loss(model, index)
    model.load_state_dict(weights)
    optimizer.load_state_dict(kept)
    run.train(model, optimizer, range(2, 5))
    run.note(*model.parameters())


@program("timm's Lookahead: slow weights among the states of the optimizer within")
def lookahead(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)

    @torch.no_grad()
    def sync() -> None:
        for group in optimizer.param_groups:
            for fast in group["params"]:
                state = optimizer.state[fast]
                if "slow_buffer" not in state:
                    state["slow_buffer"] = fast.detach().clone()
                slow = state["slow_buffer"]
                slow.add_(fast.detach() - slow, alpha=0.5)
                fast.copy_(slow)

    for index in range(6):
        run.loss(model, index).backward()
        run.step(optimizer)
        if index % 2:
            sync()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = run.optimizer(model)
    optimizer.load_state_dict(saved)
    for index in range(6, 9):
        run.loss(model, index).backward()
        run.step(optimizer)
        sync()
    run.note(*model.parameters())


@program("Lookahead, SlowMo (torchdistx #36): slow weights beside the optimizer")
def slow_weights(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    slow = {p: p.detach().clone() for p in model.parameters()}
    for index in range(6):
        run.loss(model, index).backward()
        run.step(optimizer)
        if index % 2:
            for p, own in slow.items():
                own.lerp_(p.data, 0.5)
                p.data.copy_(own)
    run.note(*model.parameters())


class ScheduleFree:
    """Weights are interpolations of those that the optimizer steps, and of their average."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.count = 0
        self.is_training = True
        self.z = {
            p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]
        }

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for p, z in self.z.items():
            y = p.detach().clone()
            x = y.lerp(z, 1 - 1 / 0.9)
            p.copy_(z)
            z.copy_(x)
        self.optimizer.step()
        for p, x in self.z.items():
            x.lerp_(p.detach(), 1 / self.count)
            z = p.detach().clone()
            p.copy_(z.lerp(x, 0.9))
            x.copy_(z)

    @torch.no_grad()
    def _set(self, is_training: bool) -> None:
        if self.is_training != is_training:
            for p, z in self.z.items():
                p.data.lerp_(z, 0.1 if is_training else 1 - 1 / 0.9)
        self.is_training = is_training

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@program("schedule_free #22, accelerate #4159: weights differ in evaluation")
def schedule_free(run: Run) -> None:
    model = run.model()
    optimizer = ScheduleFree(run.optimizer(model))
    for index in range(5):
        optimizer._set(True)
        run.loss(model, index).backward()
        run.step(optimizer)
        optimizer._set(False)
        run.note_loss(model, 50)
    run.note(*model.parameters())


@program("pytorch #126948, #192202, #192225: states by names, flat, onto other groups")
def states_by_name(run: Run, flat: bool = True) -> None:
    model = run.model(frozen="blocks.1")
    optimizer = run.optimizer(
        run.group([p for p in model.parameters() if p.requires_grad], lr=0.05)
    )
    lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.train(model, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    run.train(model, optimizer, range(3, 5))
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    halves = [[p for p in names if ("blocks" in names[p]) == half] for half in (True, False)]
    halves = halves if flat else [list(names)]
    other = run.optimizer([group for half in halves for group in run.group(half, lr=1.0)])
    set_optimizer_state_dict(model, other, saved, options=options)
    run.note(*(torch.tensor(float(group["lr"])) for group in other.param_groups))
    run.train(model, other, range(5, 8))
    run.note(*model.parameters())


@program("the same, nested by parameter")
def states_by_name_nested(run: Run) -> None:
    states_by_name(run, flat=False)


@program("Megatron-LM #5976: states made for a load count no step")
def states_made_for_a_load(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    get_optimizer_state_dict(model, optimizer)
    run.train(model, optimizer, range(3))
    run.note(*model.parameters())


@program("bergson #350: training is rolled back to states kept in memory")
def rolled_back(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _attempt in range(2):
        for index in range(3):
            run.loss(model, index).backward()
            run.step(optimizer)
            scheduler.step()
            if index == 0 and _attempt == 0:
                kept = (
                    {name: value.detach().clone() for name, value in model.state_dict().items()},
                    copy.deepcopy(optimizer.state_dict()),
                    copy.deepcopy(scheduler.state_dict()),
                )
        if _attempt == 0:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            scheduler.load_state_dict(kept[2])
    run.note(*model.parameters())


@program("a checkpoint in the middle of an accumulation")
def checkpoint_in_an_accumulation(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    run.train(model, optimizer, range(2))
    run.is_last_backward(model, False)
    run.loss(model, 2).backward()
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    grads = [p.grad.detach().clone() for p in model.parameters()]
    run.is_last_backward(model, True)
    run.loss(model, 3).backward()
    run.step(optimizer)
    run.note(*model.parameters())
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    run.loss(model, 3).backward()
    run.step(optimizer)
    run.note(*model.parameters())


# ---- hooks ----


@program("pytorch #180666, #129450, torchrec #4268: gradients are read in hooks")
def norms_in_hooks(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    norms: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            partial(lambda name, p: norms.__setitem__(name, p.grad.detach().clone()), name)
        )
    for index in range(3):
        norms.clear()
        run.loss(model, index).backward()
        run.note(*(norms[name] for name, _ in model.named_parameters()))
        run.step(optimizer)
    run.note(*model.parameters())


@program("pytorch #98419: an optimizer for each layer, stepped in hooks")
def stepped_in_hooks(run: Run) -> None:
    model = run.model()
    for p in model.parameters():
        optimizer = run.optimizer(run.group([p], lr=0.05))
        p.register_post_accumulate_grad_hook(lambda p, each=optimizer: run.step(each))
    for index in range(4):
        run.loss(model, index).backward()
    run.note(*model.parameters())


# ---- weights ----


@program("nGPT: rows of matrices are normalized after each step")
def weights_projected(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for index in range(4):
        run.loss(model, index).backward()
        run.step(optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.div_(whole(p.norm()))
    run.note(*model.parameters())


@program("weights are read as soon as the step is over")
def weights_read_after_steps(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for index in range(3):
        run.loss(model, index).backward()
        optimizer.step()
        run.note(*(p.detach() for p in model.parameters()))
        for p in model.parameters():
            if run.column.kind != ("layer_wise", False):
                run.note(*(v for v in optimizer.state[p].values() if v.dim()))
        optimizer.zero_grad()


@program("a part of the model is evaluated between steps")
def a_part_is_evaluated(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for index in range(4):
        run.loss(model, index).backward()
        run.step(optimizer)
        with torch.no_grad():
            run.note(model.blocks[2](torch.ones(2, WIDTH, dtype=torch.float64)))
            if index % 2:
                for p in model.blocks[0].parameters():
                    p.data.mul_(0.9)
    run.note(*model.parameters())


@program("one optimizer of two models, each with a backward of its own")
def one_optimizer_of_two_models(run: Run) -> None:
    policy, value = run.model(), run.model(1)
    optimizer = run.optimizer(run.group(chain(policy.parameters(), value.parameters()), lr=0.05))
    for index in range(4):
        run.loss(policy, index).backward()
        if index != 2:
            run.loss(value, index + 10).backward()
        run.step(optimizer)
    run.note(*policy.parameters(), *value.parameters())


@program("multi-token prediction: each head's backward, then the trunk's")
def heads_one_after_the_other(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)

    size = dist.get_world_size() if run.is_twin else 1

    def backward(batch: torch.Tensor, rank: int) -> torch.Tensor:
        trunk = model.blocks[0](batch @ torch.ones(5, WIDTH, dtype=torch.float64))
        leaf = trunk.detach().requires_grad_()
        for head in (model.blocks[1], model.blocks[2]):
            (head(leaf).square().mean() / size).backward()
        trunk.backward(leaf.grad)
        return torch.zeros(())

    for index in range(3):
        run.mean(backward, index)
        run.step(optimizer)
    run.note(*model.parameters())


@program("fairseq, timm: EMA swapped by assignment of .data")
def ema_swapped_by_assignment(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    ema = [p.detach().clone() for p in model.parameters()]
    for index in range(3):
        run.loss(model, index).backward()
        run.step(optimizer)
        for average, p in zip(ema, model.parameters(), strict=True):
            average.lerp_(p.data, 0.3)
        for place in range(2):
            for number, p in enumerate(model.parameters()):
                ema[number], p.data = p.data, ema[number]
            if not place:
                run.note_loss(model, 50)
    run.note(*model.parameters())


@program("EMA swapped by state dicts")
def ema_swapped_by_state_dicts(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    ema = {name: p.detach().clone() for name, p in model.state_dict().items()}
    for index in range(3):
        run.loss(model, index).backward()
        run.step(optimizer)
        own = model.state_dict()
        for name, average in ema.items():
            average.lerp_(own[name].detach(), 0.3)
        kept = {name: value.detach().clone() for name, value in own.items()}
        model.load_state_dict(ema)
        run.note_loss(model, 50)
        model.load_state_dict(kept)
    run.note(*model.parameters())


@program("two optimizers of the same parameters")
def two_optimizers_of_the_same_parameters(run: Run) -> None:
    model = run.model()
    first, second = run.optimizer(model), run.optimizer(run.group(model.parameters(), lr=0.01))
    for index in range(4):
        run.loss(model, index).backward()
        first.step()
        second.step()
        first.zero_grad()
    run.note(*model.parameters())


@program("EMA in a hook after steps")
def ema_in_a_hook(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    ema = [p.detach().clone() for p in model.parameters()]

    def average(*_: Any) -> None:
        for each, p in zip(ema, model.parameters(), strict=True):
            each.lerp_(p.detach(), 0.3)

    optimizer.register_step_post_hook(average)
    run.train(model, optimizer, range(4))
    run.note(*ema)


@program("accelerate: a full state dict of rank 0, broadcast to a new optimizer")
def full_states_of_rank_0(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    run.train(model, optimizer, range(3))
    save, load = StateDictOptions(), StateDictOptions()
    if not run.is_twin:
        save = StateDictOptions(full_state_dict=True, cpu_offload=True)
        load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=save))
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    other = run.model(1)
    other.load_state_dict(weights)
    optimizer = run.optimizer(other)
    set_optimizer_state_dict(other, optimizer, saved, options=load)
    run.train(other, optimizer, range(3, 6))
    run.note(*other.parameters())


@program("Lightning, bitsandbytes: state dicts are edited in hooks")
def hooks_of_state_dicts(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    run.train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())

    def triple(optimizer: Any, state_dict: Any) -> Any:
        def scaled(value: Any) -> Any:
            if isinstance(value, dict):
                return {k: scaled(v) if k != "step" else v for k, v in value.items()}
            return value * 3

        return {**state_dict, "state": {k: scaled(v) for k, v in state_dict["state"].items()}}

    if run.is_twin:  # which needs no hooks
        optimizer.load_state_dict(triple(optimizer, triple(optimizer, triple(optimizer, saved))))
    else:
        optimizer.register_load_state_dict_pre_hook(triple)
        optimizer.load_state_dict(saved)
        optimizer.register_state_dict_post_hook(triple)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run.train(model, optimizer, range(3, 5))
    run.note(*model.parameters())


# ---- optimizers ----

_EDITED = "were edited between backward and step"
_EARLY = "was stepped in backward and is needed before step"
IN_BACKWARD = {
    "sharpness_aware": _EDITED,
    "schedule_free": _EDITED,
    "gan": _EARLY,
    "nan_is_skipped": _EARLY,
    "heads_one_after_the_other": _EARLY,
    "two_optimizers_of_the_same_parameters": "this gradient was used in backward",
}
FLOAT32: dict[str, Any] = {"moment_dtype": torch.float32}
MUON = partial(Muon, ns_dtype=torch.float64)
OF_MUON: dict[str, Any] = {"twin": MUON, "kind": ("algorithm", "adamw")}
LAYER_WISE = partial(LayerWise, factory=torch.optim.AdamW)

COLUMNS: dict[str, Column] = {
    "AdamW, overlap": Column(
        partial(AdamW, overlap=OverlapPolicy(buffer_bytes=0)),
        layout=BlockAtomic(rows=2),
        is_offloaded=True,
        refuses=IN_BACKWARD,
    ),
    "AdamW, overlap, clipped": Column(
        partial(AdamW, overlap=OverlapPolicy(max_norm=1e9)), mesh=(2, 1), is_offloaded=True
    ),
    "AdamW, prefetch": Column(
        partial(AdamW, prefetch_next_forward=True, **FLOAT32),
        partial(AdamW, **FLOAT32),
        layout=PerTensor(),
    ),
    "Muon, overlap": Column(
        partial(MUON, overlap=OverlapPolicy()),
        layout=TensorAtomic(),
        refuses=IN_BACKWARD,
        **OF_MUON,
    ),
    "Muon, replicas": Column(partial(MUON, prefetch_next_forward=True), mesh=(2, 1), **OF_MUON),
    "LayerWise": Column(
        partial(LAYER_WISE, others=partial(AdamW, prefetch_next_forward=True)),
        is_offloaded=True,
        kind=("layer_wise", False),
    ),
    "LayerWise, overlap": Column(
        partial(LAYER_WISE, overlap=OverlapPolicy()),
        layout=TensorAtomic(),
        is_offloaded=True,
        refuses=IN_BACKWARD,
        kind=("layer_wise", False),
    ),
}
ALWAYS = {
    "LayerWise": {"lookahead", "hooks_of_state_dicts", "states_by_name", "full_states_of_rank_0"},
    "AdamW, prefetch": {"hooks_of_state_dicts"},
}


def programs_of(column: str) -> list[str]:
    """Return a third of the programs, so that two columns have each, and those that were wrong
    here."""
    index = list(COLUMNS).index(column)
    own = [name for number, name in enumerate(PROGRAMS) if (number - index) % 3 == 0]
    return own + sorted(ALWAYS.get(column, set()) - set(own))


@contextmanager
def late(seconds: float = 0.002) -> Iterator[None]:
    """Have threads begin each step late."""
    run = KernelCall.run

    def slowly(call: KernelCall) -> None:
        if threading.current_thread().name == "host step":
            time.sleep(seconds)
        run(call)

    with patch.object(KernelCall, "run", slowly):
        yield


def outcome(column: str, name: str) -> str:
    """Return "right", "refused" as the column says, or else what is wrong."""
    of = COLUMNS[column]
    twin, ours = Run(of, is_twin=True), Run(of, is_twin=False)
    refusal = of.refuses.get(name)
    PROGRAMS[name](twin)
    try:
        with late():
            PROGRAMS[name](ours)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return "refused" if refusal is not None and re.search(refusal, text) else text
    pairs = zip(twin.values, ours.values, strict=True)
    off = max(float((one - other).abs().max()) for one, other in pairs)
    if not off < 1e-8:
        return f"off by {off:.1e}"
    return "right" if refusal is None else "not refused"


def outcomes(column: str) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: outcome(column, name) for name in programs_of(column)}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("column", COLUMNS)
def test_reported_programs(column: str) -> None:
    for of_rank in run_ranks(outcomes, 2, column):
        wrong = {f"{k} ({REPORTS[k]})": v for k, v in of_rank.items() if v not in RIGHT}
        assert not wrong, f"wrong with {column}: {wrong}"


def steps_in_hooks(columns: Sequence[str]) -> None:
    """The steps exchange matrices, and reductions are done early on one rank, late on the other."""

    def done(work: HostWorkHandle) -> bool:
        if dist.get_rank() == 0 and work._pending is not None:
            for each in work._pending.works:
                each.wait()
        return dist.get_rank() == 0 or work._pending is None

    with (
        patch.object(HostWorkHandle, "done", done),
        patch.object(grads, "LARGE_BYTES", 0),
    ):
        for column in columns:
            assert outcome(column, "stepped_in_hooks") == "right"


def test_steps_in_hooks_communicate_in_one_order_on_all_ranks() -> None:
    run_ranks(steps_in_hooks, 2, ["LayerWise", "Muon, replicas"])
