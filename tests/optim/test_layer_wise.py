"""``LayerWise``: ordinary optimizers of matrices on sharded parameters."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import profile

from fsdp_overlap import BlockAtomic, Flat, FsdpContext, PerTensor, TensorAtomic, fully_shard
from fsdp_overlap.optim import LayerWise, exchange
from support import experts, tensor_parallel
from support.ranks import run_ranks
from support.tensor_parallel import ROWS, batches, loss_of, parallelize

LAYOUTS: dict[str, Any] = {
    "flat": Flat(),
    "blocks": BlockAtomic(rows=4),
    "whole": TensorAtomic(),
    "rows": PerTensor(),
}


class Model(nn.Module):
    """Blocks whose matrices have unequal sizes, stacks among them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 20, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 18)
        self.stack = nn.Parameter(torch.randn(3, 18, 18) / 5)
        self.down = nn.Linear(18, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        for matrix in self.stack:
            hidden = torch.tanh(hidden @ matrix)
        return x + self.down(hidden)


def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1)


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.02)


class Whitening(torch.optim.Optimizer):
    """As Shampoo: factors for rows and columns, in a list, and a count in the group."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                assert gradient.dim() == 2
                state = self.state[parameter]
                if not state:
                    state["factors"] = [torch.eye(n, dtype=gradient.dtype) for n in gradient.shape]
                left, right = state["factors"]
                left += gradient @ gradient.mT
                right += gradient.mT @ gradient
                for factor in (left, right):
                    values, vectors = torch.linalg.eigh(factor)
                    root = vectors @ values.pow(-0.25).diag() @ vectors.mT
                    gradient = root @ gradient if factor is left else gradient @ root
                # Some replace the data instead of editing it.
                parameter.data = parameter.data - group["lr"] * gradient


def whitening(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Whitening(parameters)


FACTORIES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "muon": muon,
    "adafactor": adafactor,
    "whitening": whitening,
}


def of_pytorch_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    library = importlib.import_module("pytorch_optimizer")
    groups: Any = [{"params": parameters, "use_muon": True}] if "Muon" in name else parameters
    made: torch.optim.Optimizer = getattr(library, name)(groups, lr=0.01)
    return made


def of_heavyball(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    precision = torch.get_float32_matmul_precision()
    library = importlib.import_module("heavyball")
    library.utils.compile_mode = None
    made: torch.optim.Optimizer = library.SOAP(parameters, lr=0.01)
    torch.set_float32_matmul_precision(precision)  # it sets another one
    return made


def of_emerging_optimizers(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    library = importlib.import_module("emerging_optimizers.soap")
    made: torch.optim.Optimizer = library.SOAP(parameters, lr=0.01)
    return made


REGISTRY = {
    name: partial(of_pytorch_optimizer, name)
    for name in ("SOAP", "Shampoo", "ScalableShampoo", "AdaFactor", "CAME", "NorMuon")
}
REGISTRY |= {
    "heavyball's SOAP": of_heavyball,
    "emerging-optimizers' SOAP": of_emerging_optimizers,
}


def others(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def build(
    layout: str, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
) -> tuple[Any, FsdpContext]:
    model: Any = twin(dtype)
    mesh = None
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    ctx = FsdpContext(mesh, layout=LAYOUTS[layout])
    ctx.plan_layout([*model.blocks, model])
    for block in model.blocks:
        fully_shard(block, ctx)
    fully_shard(model, ctx)
    return model, ctx


def twin(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(1)
    return Model().to(dtype)


def plain(model: nn.Module, factory: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of an unsharded model. Stacks are parameters of their own."""
    matrices = [p for name, p in model.named_parameters() if "up.weight" in name or "down" in name]
    stacks = [p for name, p in model.named_parameters() if "stack" in name]
    model.pieces = [nn.Parameter(matrix.detach()) for stack in stacks for matrix in stack]
    rest = [p for p in model.parameters() if not any(p is q for q in (*matrices, *stacks))]
    return [factory([*matrices, *model.pieces]), others(rest)]


def train(model: Any, optimizers: list[torch.optim.Optimizer], steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(20, (4, 6), generator=generator)
        model(tokens).square().mean().backward()
        stacks = [p for name, p in model.named_parameters() if "stack" in name]
        for index, piece in enumerate(getattr(model, "pieces", ())):
            piece.grad = stacks[index // 3].grad[index % 3]
        for optimizer in optimizers:
            optimizer.step()
        for index, piece in enumerate(getattr(model, "pieces", ())):
            stacks[index // 3].data[index % 3].copy_(piece.data)
            piece.data = stacks[index // 3].data[index % 3]
        model.zero_grad()


def same(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), its in zip(model.named_parameters(), other.parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(whole, its, msg=lambda text, name=name: f"{name}: {text}")


def equals_twin(
    layout: str, shape: tuple[int, ...], name: str, dtype: torch.dtype = torch.float64
) -> None:
    factory = (FACTORIES | REGISTRY)[name]
    model, _ = build(layout, shape, dtype)
    other = twin(dtype)
    optimizer, its = LayerWise(model, factory, others), plain(other, factory)
    for seed in range(3):
        train(model, [optimizer], 1, seed)
        train(other, its, 1, seed)
        same(model, other)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("shape", [(), (2, 2)], ids=["sharded", "replicated"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_unsharded_training(layout: str, shape: tuple[int, ...], name: str) -> None:
    run_ranks(equals_twin, 4, layout, shape, name)


def equals_twin_in_rounds(layout: str, shape: tuple[int, ...]) -> None:
    with patch.object(exchange, "ROUND_ELEMENTS", 60):
        equals_twin(layout, shape, "whitening")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "shape"), [("flat", ()), ("rows", ()), ("whole", (2, 2))])
def test_training_in_rounds_equals_unsharded_training(layout: str, shape: tuple[int, ...]) -> None:
    run_ranks(equals_twin_in_rounds, 4, layout, shape)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("layout", ["flat", "whole"])
def test_optimizers_of_others_work_as_they_are(layout: str, name: str) -> None:
    library = {"h": "heavyball", "e": "emerging_optimizers"}.get(name[0], "pytorch_optimizer")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")  # one of them needs Python 3.12
    dtype = torch.float32 if "heavyball" in name else torch.float64
    run_ranks(equals_twin, 4, layout, (), name, dtype, timeout=200)


def compiled(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.Muon(parameters, lr=0.02)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
    return optimizer


def trains_compiled() -> None:
    """Also after a gradient was missing, and with another learning rate."""
    model, _ = build("whole")
    other = twin()
    optimizer = LayerWise(model, compiled, others)
    its = plain(other, compiled)  # torch 2.11's compiled Muon rounds otherwise than an eager one
    for step in range(4):
        tokens = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(step))
        for each, optimizers in ((model, [optimizer]), (other, its)):
            each(tokens).square().mean().backward()
            stacks = [p for name, p in each.named_parameters() if "stack" in name]
            for index, piece in enumerate(getattr(each, "pieces", ())):
                piece.grad = stacks[index // 3].grad[index % 3]
            if step == 1:
                each.blocks[1].up.weight.grad = None
            for one in optimizers:
                for group in one.param_groups:
                    group["lr"] = 0.02 / (step + 1)
                one.step()
            for index, piece in enumerate(getattr(each, "pieces", ())):
                stacks[index // 3].data[index % 3].copy_(piece.data)
                piece.data = stacks[index // 3].data[index % 3]
            each.zero_grad()
        same(model, other)


@pytest.mark.slow
def test_steps_may_be_compiled() -> None:
    run_ranks(trains_compiled, 2, timeout=200)


# Meshes


def train_in_tiles(shape: tuple[int, ...], layout: str, split: bool) -> int:
    names = ("replicate", "shard", "tp")[3 - len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    ctx = FsdpContext(mesh[names[:-1]], layout=LAYOUTS[layout])
    model = tensor_parallel.shard(parallelize(tensor_parallel.plain(), mesh["tp"]), ctx)
    other = tensor_parallel.plain()
    splits: Any = {"*.wq.weight": 4, "*.wk.weight": (3, 5)} if split else {}
    optimizers = [LayerWise(each, whitening, others, split=splits) for each in (model, other)]
    rank = dist.get_rank() // shape[-1]
    for tokens, targets in batches(3, dist.get_world_size() // shape[-1]):
        loss_of(model, tokens.split(ROWS)[rank], targets.split(ROWS)[rank]).backward()
        loss_of(other, tokens, targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tensor_parallel.same(model, other, "value")
    return matrices_of(optimizers[0])


def matrices_of(optimizer: LayerWise) -> int:
    """Return of how many matrices this rank has states."""
    return sum(len(s) for s in optimizer.state.values() if all(str(k).isdigit() for k in s))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("shape", "layout", "split"),
    [
        ((2, 2), "flat", False),
        ((2, 2), "flat", True),
        ((2, 2), "whole", False),
        ((1, 2, 2), "blocks", True),
        ((2, 1, 2), "flat", True),
    ],
)
def test_tensor_parallelism(shape: tuple[int, ...], layout: str, split: bool) -> None:
    found = run_ranks(train_in_tiles, 4, shape, layout, split)
    torch.manual_seed(0)
    model = tensor_parallel.plain()
    splits: Any = {"*.wq.weight": 4, "*.wk.weight": (3, 5)} if split else {}
    alone = LayerWise(model, whitening, others, split=splits)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    alone.step()
    assert sum(found) == matrices_of(alone)  # each is stepped once


def train_experts(layout: str) -> None:
    whole, shards, ep = experts.meshes()
    model, other = experts.Moe(ep, True), experts.Moe(None)
    ctx = FsdpContext(whole, layout=LAYOUTS[layout])
    units = [layer.experts for layer in model]
    ctx.plan_layout([*units, *model, model], meshes=dict.fromkeys(units, shards))
    experts.shard(model, whole, shards, ctx)
    optimizer, its = LayerWise(model, whitening, others), LayerWise(other, whitening, others)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randn(4, experts.ROWS, experts.WIDTH, generator=generator, dtype=torch.double)
        model(x[dist.get_rank()]).square().mean().backward()
        torch.stack([other(rows).square().mean() for rows in x]).mean().backward()
        with CommDebugMode() as issued:
            optimizer.step()
        assert not (layout == "whole" and issued.get_total_counts())
        its.step()
        for each in (optimizer, its):
            each.zero_grad()
        experts.compare(model, other, ep, of_gradients=False)


@pytest.mark.parametrize("layout", ["flat", "blocks", "whole"])
def test_experts(layout: str) -> None:
    run_ranks(train_experts, 4, layout)


# What is sent


def collectives(layout: str) -> int:
    model, _ = build(layout)
    optimizer = LayerWise(model, whitening, others)
    train(model, [optimizer], 1)
    model(torch.zeros(1, 4, dtype=torch.int64)).square().mean().backward()
    with profile() as seen:
        optimizer.step()
    return sum(event.name.startswith("gloo:") for event in seen.events())


def test_whole_matrices_are_stepped_without_communication() -> None:
    assert run_ranks(collectives, 4, "whole") == [0] * 4
    assert run_ranks(collectives, 4, "flat") == [2] * 4  # values and gradients, results


def order_of_rounds() -> list[str]:
    """Return what a step does, in order: each round's calls, and steps of batches."""
    model, _ = build("flat")
    optimizer = LayerWise(model, whitening, others)
    train(model, [optimizer], 1)
    model(torch.zeros(1, 4, dtype=torch.int64)).square().mean().backward()
    seen = []

    def noted(name: str, method: Any) -> Any:
        def call(self: Any) -> None:
            seen.append(name)
            method(self)

        return call

    with ExitStack() as stack:
        for name in ("start", "run", "finish"):
            method = getattr(exchange.Exchange, name)
            stack.enter_context(patch.object(exchange.Exchange, name, noted(name, method)))
        stack.enter_context(patch.object(Whitening, "step", noted("step", Whitening.step)))
        optimizer.step()
    return seen


def in_rounds() -> tuple[list[str], int]:
    with patch.object(exchange, "ROUND_ELEMENTS", 60):
        return order_of_rounds(), collectives("flat")


def test_rounds_are_sent_while_others_are_stepped() -> None:
    for seen, sent in run_ranks(in_rounds, 4):
        rounds = seen.count("start")
        assert rounds > 2
        assert sent == 2 * rounds
        steps = [each for each in seen if each != "step"]
        assert steps[:5] == ["start", "start", "run", "start", "run"]
        assert steps[-4:] == ["finish", "run", "finish", "finish"]
    (first, _), *_ = run_ranks(in_rounds, 2)
    assert first[:3] == ["start", "step", "start"]  # its own matrices, under the first round


# Options and states


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    ups = [p for name, p in named.items() if "up.weight" in name]
    downs = [p for name, p in named.items() if "down" in name]
    rest = [p for p in named.values() if not any(p is q for q in (*ups, *downs))]
    return [
        {"params": ups, "lr": 0.03},
        {"params": downs, "weight_decay": 0.0},
        {"params": rest, "layer_wise": False},
    ]


def train_in_groups(layout: str) -> None:
    model, _ = build(layout)
    other = twin()
    optimizer = LayerWise(groups_of(model), muon, others)
    ups, downs, rest = (group["params"] for group in groups_of(other))
    its = [
        torch.optim.Muon(ups, lr=0.03, weight_decay=0.1),
        torch.optim.Muon(downs, lr=0.02, weight_decay=0.0),
        others(rest),
    ]
    model.blocks[0].up.weight.requires_grad_(False)
    other.blocks[0].up.weight.requires_grad_(False)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, *its)]
    for seed in range(3):
        train(model, [optimizer], 1, seed)
        train(other, its, 1, seed)
        for scheduler in schedulers:
            scheduler.step()
        same(model, other)
    assert [group["lr"] for group in optimizer.param_groups] == [0.03 / 8, 0.02 / 8, 0.01 / 8]


@pytest.mark.parametrize("layout", ["flat", "whole"])
def test_groups_have_options_that_schedulers_change(layout: str) -> None:
    run_ranks(train_in_groups, 2, layout)


def save(folder: str, layout: str, name: str) -> list[torch.Tensor]:
    """Three steps; returns the parameters two steps after the checkpoint."""
    model, _ = build(layout)
    optimizer = LayerWise(model, FACTORIES[name], others)
    train(model, [optimizer], 3)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    train(model, [optimizer], 2, 1)
    return [parameter.full_tensor() for parameter in model.parameters()]


def load(folder: str, layout: str, shape: tuple[int, ...], name: str) -> list[torch.Tensor]:
    model, _ = build(layout, shape)
    optimizer = LayerWise(model, FACTORIES[name], others)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    train(model, [optimizer], 2, 1)
    return [parameter.full_tensor() for parameter in model.parameters()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FACTORIES)
def test_checkpoints_move_between_worlds_layouts_and_meshes(name: str, tmp_path: Path) -> None:
    [expected, *_] = run_ranks(save, 2, str(tmp_path), "whole", name)
    for world_size, layout, shape in (
        (3, "whole", ()),
        (4, "flat", ()),
        (4, "rows", (2, 2)),
        (1, "blocks", ()),
    ):
        for found in run_ranks(load, world_size, str(tmp_path), layout, shape, name):
            for mine, its in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, its)


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def save_full(path: str, name: str) -> list[torch.Tensor]:
    """Three steps; returns the parameters two steps after rank 0 saved all."""
    model, _ = build("whole")
    optimizer = LayerWise(model, FACTORIES[name], others)
    train(model, [optimizer], 3)
    saved = get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        torch.save(saved, path)
    train(model, [optimizer], 2, 1)
    return [parameter.full_tensor() for parameter in model.parameters()]


def load_full(path: str, layout: str, shape: tuple[int, ...], name: str) -> list[torch.Tensor]:
    saved: Any = ({}, {})
    if dist.get_rank() == 0:
        saved = torch.load(path, weights_only=False)
    model, _ = build(layout, shape)
    optimizer = LayerWise(model, FACTORIES[name], others)
    set_model_state_dict(model, saved[0], options=BROADCAST)
    set_optimizer_state_dict(model, optimizer, saved[1], options=BROADCAST)
    train(model, [optimizer], 2, 1)
    return [parameter.full_tensor() for parameter in model.parameters()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FACTORIES)
def test_full_state_dicts_have_the_states_of_all_ranks(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "full")
    [expected, *_] = run_ranks(save_full, 2, path, name)
    for world_size, layout, shape in ((2, "whole", ()), (3, "flat", ()), (4, "rows", (2, 2))):
        for found in run_ranks(load_full, world_size, path, layout, shape, name):
            for mine, its in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, its)


def load_in_part() -> None:
    model, _ = build("whole")
    optimizer = LayerWise(model, muon, others)
    train(model, [optimizer], 1)
    before = optimizer.state_dict()
    index = next(i for i, state in before["state"].items() if "0" in state and "1" not in state)
    for lost in ({index: {}}, {}):
        kept = {i: state for i, state in before["state"].items() if i != index}
        with pytest.raises(ValueError, match=rf"lacks parameters {index} of shape \(\d+, \d+\),"):
            optimizer.load_state_dict({**before, "state": kept | lost})
    optimizer.load_state_dict(before)


def test_a_state_dict_of_some_matrices_is_refused() -> None:
    run_ranks(load_in_part, 2)


def load_plain(layout: str) -> None:
    other = twin()
    ups, downs, _ = (group["params"] for group in groups_of(other))
    its = torch.optim.Muon([{"params": ups}, {"params": downs}], lr=0.02)
    train(other, [its], 2)
    model, _ = build(layout)
    optimizer = LayerWise(groups_of(model)[:2], muon)
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(its.state_dict())
    train(model, [optimizer], 2, 1)
    train(other, [its], 2, 1)
    same(model, other)


@pytest.mark.parametrize("layout", ["flat", "whole"])
def test_the_state_of_an_unsharded_optimizer_can_be_loaded(layout: str) -> None:
    run_ranks(load_plain, 2, layout)


def load_of_another_rank() -> None:
    model, _ = build("whole")
    optimizer = LayerWise(model, muon, others)
    train(model, [optimizer], 1)
    states = [None, None]
    dist.all_gather_object(states, optimizer.state_dict())
    optimizer.load_state_dict(states[dist.get_rank()])
    before = list(optimizer.state_dict()["state"])
    with pytest.raises(ValueError, match=r"lacks matrix \d of a parameter of shape"):
        optimizer.load_state_dict(states[1 - dist.get_rank()])
    assert list(optimizer.state_dict()["state"]) == before


def test_the_state_of_another_rank_is_refused() -> None:
    run_ranks(load_of_another_rank, 2)


# Between steps


def reset_between(layout: str) -> None:
    model, ctx = build(layout)
    other = twin()
    optimizer, its = LayerWise(model, whitening, others), plain(other, whitening)
    train(model, [optimizer], 1)
    train(other, its, 1)
    ctx.reset()
    model.set_zero_stage(2)
    for seed in range(2):  # full parameters are kept, and gathered again after a step
        train(model, [optimizer], 1, seed)
        train(other, its, 1, seed)
        same(model, other)


@pytest.mark.parametrize("layout", ["flat", "whole"])
def test_after_a_reset_and_at_zero_stage_2(layout: str) -> None:
    run_ranks(reset_between, 2, layout)


def without_gradients() -> None:
    model, _ = build("flat")
    other = twin()
    optimizer, its = LayerWise(model, whitening, others), plain(other, whitening)
    for each in (model, other):
        for optimizers in ([optimizer],) if each is model else (its,):
            each(torch.zeros(1, 4, dtype=torch.int64)).square().mean().backward()
            each.blocks[1].up.weight.grad = None
            for piece in getattr(each, "pieces", ()):
                piece.grad = None
            for block in each.blocks:
                block.stack.grad = None
            for one in optimizers:
                one.step()
    same(model, other)
    model.zero_grad()
    optimizer.step()
    same(model, other)


def test_parameters_without_a_gradient_stay() -> None:
    run_ranks(without_gradients, 2)


def counted(name: str) -> Any:
    """Of three ranks two own no matrix."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6))
    fully_shard(model, FsdpContext(layout=TensorAtomic()))
    optimizer = LayerWise(model, REGISTRY[name], layer_wise={"1.weight": False})
    for _ in range(3):
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.param_groups[0]["step"]


def test_ranks_without_matrices_count_steps_too() -> None:
    assert run_ranks(counted, 3, "SOAP") == [3] * 3


class Counting(torch.optim.Optimizer):
    """Counts steps in a tensor of the group that it edits in place, in the group when the first
    step is made, and by itself; and uses them all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02, "steps": torch.tensor(0.0)})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["steps"] += 1
            group["late"] = group.get("late", 0) + 1
            divisor = float(group["steps"]) + group["late"] + self.count
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["mean"] = 0.5 * state.get("mean", 0.0) + parameter.grad
                    parameter.add_(state["mean"], alpha=-group["lr"] / divisor)


def counts_in_rounds() -> None:
    """Also of matrices that have no gradient in some steps."""
    with patch.object(exchange, "ROUND_ELEMENTS", 60):
        model, _ = build("flat")
        other = twin()
        optimizer, its = LayerWise(model, Counting, others), plain(other, Counting)
        for seed in range(4):
            for each in (model, other):
                each.blocks[1].requires_grad_(seed not in (0, 2))
            train(model, [optimizer], 1, seed)
            for piece in other.pieces:
                piece.grad = None
            train_part(other, its, seed)
            same(model, other)
        assert optimizer.param_groups[0]["steps"] == 4
        optimizer.param_groups[0]["lr"] = its[0].param_groups[0]["lr"] = 0.5
        train(model, [optimizer], 1, 9)
        train(other, its, 1, 9)
        same(model, other)


def train_part(model: Any, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    """As ``train``, where some stacks have no gradient."""
    tokens = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(seed))
    model(tokens).square().mean().backward()
    stacks = [p for name, p in model.named_parameters() if "stack" in name]
    for index, piece in enumerate(model.pieces):
        gradient = stacks[index // 3].grad
        piece.grad = None if gradient is None else gradient[index % 3]
    for optimizer in optimizers:
        optimizer.step()
    for index, piece in enumerate(model.pieces):
        stacks[index // 3].data[index % 3].copy_(piece.data)
        piece.data = stacks[index // 3].data[index % 3]
    model.zero_grad()


def test_each_round_counts_steps_once() -> None:
    run_ranks(counts_in_rounds, 2)


def load_what_was_before(layout: str) -> None:
    """The state dict from before the first step has no momentum and no counts."""
    model, _ = build(layout)
    optimizer = LayerWise(model, Counting, others)
    first = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, [optimizer], 2)
    model.load_state_dict(first[0])
    optimizer.load_state_dict(first[1])
    train(model, [optimizer], 2)
    other = twin()
    train(other, plain(other, Counting), 2)
    same(model, other)


@pytest.mark.parametrize("layout", ["flat", "whole"])
def test_a_state_dict_from_before_the_first_step_can_be_loaded(layout: str) -> None:
    run_ranks(load_what_was_before, 3, layout)


class FailsOnce(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        of_first = any(
            p.grad is not None and 8 not in p.shape for p in self.param_groups[0]["params"]
        )
        if self.fails and of_first and dist.get_rank() == 0:
            raise ArithmeticError("planned")
        return super().step(closure)


def fail_in_the_first_of_two_contexts() -> tuple[float, str]:
    """Ranks 0 and 1 share matrices of one context, all those of another one."""
    torch.manual_seed(0)
    models: list[Any] = [
        nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((n, n + 3), (n + 3, n), (n, n))))
        for n in (6, 8)
    ]
    pair, all_ranks = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
    chosen = list(zip(models, (pair, all_ranks), strict=True))[dist.get_rank() == 2 :]
    for model, mesh in chosen:
        fully_shard(model, FsdpContext(mesh, layout=Flat()))
        model(torch.ones(2, model[0].in_features)).sum().backward()
    parameters = [parameter for model, _ in chosen for parameter in model.parameters()]
    optimizer = LayerWise(parameters, partial(FailsOnce, lr=0.1))
    FailsOnce.fails = True
    start = time.perf_counter()
    try:
        optimizer.step()
    except Exception as error:
        return time.perf_counter() - start, type(error).__name__
    finally:
        FailsOnce.fails = False
    return time.perf_counter() - start, "none"


def test_an_error_ends_the_step_of_ranks_that_wait_in_another_context() -> None:
    (_, first), (_, second), (seconds, third) = run_ranks(fail_in_the_first_of_two_contexts, 3)
    assert (first, second, third) == ("ArithmeticError", "RuntimeError", "RuntimeError")
    assert seconds < 20  # not the group's timeout


def fail_once(layout: str) -> None:
    """A step raises on one rank. After a reset and a load training goes on as if it had not."""
    model, ctx = build(layout)
    other = twin()
    optimizer, its = LayerWise(model, whitening, others), plain(other, whitening)
    train(model, [optimizer], 1)
    train(other, its, 1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    fails = torch.linalg.LinAlgError if dist.get_rank() == 0 else RuntimeError
    with pytest.raises(fails), patch("torch.linalg.eigh", broken):
        train(model, [optimizer], 1, 1)
    ctx.reset()
    model.zero_grad()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, [optimizer], 1, 1)
    train(other, its, 1, 1)
    same(model, other)


def broken(*args: Any) -> Any:
    if dist.get_rank() == 0:
        raise torch.linalg.LinAlgError("no eigenvalues")
    return EIGH(*args)


EIGH = torch.linalg.eigh


def test_a_step_that_raised_on_one_rank_ends_on_all_and_training_goes_on() -> None:
    run_ranks(fail_once, 2, "flat")


def change_split() -> None:
    model, _ = build("whole")
    optimizer = LayerWise(model, muon, others)
    train(model, [optimizer], 1)
    optimizer.param_groups[0]["split"] = 2
    with pytest.raises(ValueError, match='"split" of a group was 1, and is 2'):
        train(model, [optimizer], 1)


def test_a_split_stays() -> None:
    run_ranks(change_split, 1)


def stepped_stacks(of_up: float) -> int:
    """Rank 2 has the ``up`` of each block. Returns how many matrices of stacks this rank steps."""
    model, _ = build("flat")
    optimizer = LayerWise(
        model, whitening, others, cost=lambda matrices: of_up if matrices.columns == 12 else 1.0
    )
    train(model, [optimizer], 1)
    return sum(len(states) for p, states in optimizer.state.items() if p.dim() == 3)


def test_ranks_are_balanced_by_cost() -> None:
    assert run_ranks(stepped_stacks, 3, 1000.0)[2] == 0
    found = run_ranks(stepped_stacks, 3, 0.0)
    assert min(found) > 0
    assert sum(found) == 9


class Slow(Whitening):
    """One rank thinks that matrices of 12 columns take long."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            if any(p.grad is not None and p.shape[1] == 12 for p in group["params"]):
                time.sleep(0.03 * dist.get_rank())


def measured_stacks() -> int:
    model, _ = build("flat")
    optimizer = LayerWise(model, Slow, others, cost="measured")
    train(model, [optimizer], 1)
    return sum(len(states) for p, states in optimizer.state.items() if p.dim() == 3)


def test_ranks_are_balanced_by_what_was_measured() -> None:
    found = run_ranks(measured_stacks, 3)
    assert found[2] == 0  # it has the matrices of 12 columns
    assert sum(found) == 9


def test_a_copy_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled: make one of the other model"):
        copy.deepcopy(LayerWise(Model(), muon))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: LayerWise(m.parameters(), muon), "LayerWise steps matrices, not a parameter"),
        (lambda m: LayerWise(m, muon, layer_wise={"*.none": True}), "matches no parameter"),
        (lambda m: LayerWise(m, muon, split={"head.weight": 2}), "split names 'head.weight'"),
        (lambda m: LayerWise(m.parameters(), muon, split={"x": 2}), "pass the model, or groups"),
        (lambda m: LayerWise(m, muon, cost="flops"), "cost='flops': use \"measured\""),
    ],
)
def test_mistakes(make: Callable[[nn.Module], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(Model())
