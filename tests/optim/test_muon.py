"""Muon: as torch's, whole models, every layout, and what it communicates."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_overlap import BlockAtomic, Flat, FsdpContext, TensorAtomic, fully_shard
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.optim import AdamW, Muon, exchange, orthogonalization
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import Twins, same
from support.zoo import Model, shard_layers

LAYOUTS: dict[str, LayoutRule] = {
    "flat": Flat(),
    "blocks": BlockAtomic(rows=2),
    "whole": TensorAtomic(),
    "mixed": lambda fqn, spec: TensorAtomic() if "up" in fqn else Flat(),
}
EXACT = {"ns_dtype": torch.float64}


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.3, "momentum": 0.5},
        {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        {
            "ns_coefficients": (2.0, -1.5, 0.5),
            "eps": 1e-3,
            "ns_steps": 3,
            "adjust_lr_fn": "original",
        },
    ],
)
def test_matrices_are_stepped_as_by_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pair = [nn.Sequential(nn.Linear(6, 9, False), nn.Linear(9, 9, False), nn.Linear(9, 2, False))]
    pair.append(copy.deepcopy(pair[0]))
    # torch's multiplies in bfloat16, everywhere.
    ours = Muon(pair[0].parameters(), lr=0.1, **options, ns_dtype=torch.bfloat16)
    theirs = torch.optim.Muon(pair[1].parameters(), lr=0.1, **options)
    for step in range(4):
        batch = torch.randn(5, 6)
        for model, optimizer in zip(pair, (ours, theirs), strict=True):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        for mine, its in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-3 * 0.1)
        if step == 1:  # each goes on from the other's state
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, theirs)]
            ours.load_state_dict(states[1])
            theirs.load_state_dict(states[0])


def step_by_gradients_of_any_size() -> None:
    """To the bit as by gradients of ordinary size."""
    for layout, dtype in product((Flat(), TensorAtomic()), (torch.float32, torch.bfloat16)):
        found = []
        for power in (0, -100, -34, 100):  # of two: from 1e-30 to 1e30
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 9, False), nn.Linear(9, 4, False)).to(dtype)
            fully_shard(model, FsdpContext(layout=layout))
            optimizer = Muon(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.eye(6, dtype=dtype)).square().sum().backward()
                for parameter in model.parameters():
                    parameter.grad.mul_(2.0**power)
                optimizer.step()
            found.append(torch.cat([p.full_tensor().flatten() for p in model.parameters()]))
        for each in found:
            assert torch.equal(each, found[0])


def test_small_and_large_gradients_make_whole_steps() -> None:
    run_ranks(step_by_gradients_of_any_size, 2)


# Training


def train(layout: str, names: list[str], options: dict[str, Any]) -> None:
    # So small that several rounds and batches are needed.
    with (
        patch.object(exchange, "ROUND_ELEMENTS", 60),
        patch.object(orthogonalization, "_CPU_ELEMENTS", 150),
    ):
        train_in_parts(layout, names, options)


def train_in_parts(layout: str, names: list[str], options: dict[str, Any]) -> None:
    exchanges = 0
    for name in names:
        twins = Twins.of(name, optimizer=Muon, layout=LAYOUTS[layout], **EXACT, **options)
        for batch in twins.batches(3):
            twins.backward(*batch)
            with CommDebugMode() as issued:
                twins.step()
            assert layout != "whole" or not issued.get_total_counts()
            assert set(map(str, issued.get_comm_counts())) <= {"c10d.alltoall_base_"}
            exchanges += issued.get_total_counts()
            twins.check_parameters()
    assert exchanges or layout != "flat" or dist.get_world_size() < 3


NAMES = [
    "layers",
    "root only",
    "tied parameters",
    "frozen and partly frozen units",
    "unused on some ranks",
    "odd parameters",
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("flat", 1),
        ("flat", 2),
        ("flat", 4),
        ("whole", 3),
        ("whole", 4),
        ("blocks", 3),
        ("mixed", 4),
    ],
)
def test_training_equals_unsharded_training(layout: str, world_size: int) -> None:
    run_ranks(train, world_size, layout, NAMES, {})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_matrices_are_stepped_as_unsharded(layout: str) -> None:
    for options in (
        {"split": {"*.up.weight": 3, "*.down.weight": (1, 3, 2)}},
        {"algorithms": {"head.*": "adamw", "*.up.weight": "adamw", "layers.0.up.weight": "muon"}},
        {"adamw": {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True}, "nesterov": False},
    ):
        run_ranks(train, 3, layout, ["layers"], options)


class Experts(nn.Module):
    """Stacked experts ``[E, m, n]``, all of which see every row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(ExpertLayer() for _ in range(2))
        self.head = nn.Linear(6, 13, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ExpertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(5, 6, 4) / 3)
        self.down = nn.Parameter(torch.randn(5, 4, 6) / 3)
        self.mix = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.einsum("...i,eio->...eo", x, self.up))
        return self.mix(x) + torch.einsum("...eo,eoi->...i", hidden, self.down)


def train_experts(layout: str) -> None:
    twins = Twins(Experts, shard_layers, optimizer=Muon, layout=LAYOUTS[layout], **EXACT)
    twins.train(3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_stacked_experts_are_batches_of_matrices(layout: str, world_size: int) -> None:
    run_ranks(train_experts, world_size, layout)


def owners(layout: str) -> tuple[list[tuple[int, int]], int]:
    """The matrices that this rank orthogonalized in a step, and the collectives it took."""
    seen: list[tuple[int, int]] = []
    original = orthogonalization.orthogonalize

    def spy(matrices: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.extend([tuple(matrices.shape[1:])] * len(matrices))
        return original(matrices, *args)

    model = Model(layers=4)
    ctx = FsdpContext(layout=LAYOUTS[layout])
    ctx.plan_layout([*model.layers, model])
    shard_layers(model, ctx)
    optimizer = Muon(model, ns_dtype=torch.float32)  # else ranks agree on one, once
    model(torch.zeros(1, 2, dtype=torch.int64)).square().mean().backward()
    orthogonalization.orthogonalize = spy  # type: ignore[assignment]
    with CommDebugMode() as issued:
        optimizer.step()
    orthogonalization.orthogonalize = original
    return seen, issued.get_total_counts()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_matrix_is_orthogonalized_by_one_rank(layout: str) -> None:
    ranks = run_ranks(owners, 4, layout)
    assert Counter(shape for seen, _ in ranks for shape in seen) == {(6, 18): 8}
    shares = [len(seen) for seen, _ in ranks]
    assert max(shares) <= (3 if layout == "mixed" else 2), shares
    collectives = {count for _, count in ranks}
    assert collectives == ({0} if layout == "whole" else {2})


# Which parameters


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.places = nn.Embedding(8, 8)
        self.patches = nn.Conv1d(3, 8, 2)
        self.square = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.ones(2, 8, 8))
        self.register_parameter("frozen", nn.Parameter(torch.ones(4, 4).int(), False))
        self.positions = nn.Parameter(torch.ones(1, 4, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)


def algorithms(optimizer: Muon, model: nn.Module) -> dict[str, str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: group["algorithm"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_embeddings_head_convolutions_and_vectors_go_to_adamw() -> None:
    model = Everything()
    found = algorithms(Muon(model), model)
    assert {name for name, algorithm in found.items() if algorithm == "muon"} == {
        "square.weight",
        "experts",
    }
    assert found.keys() == dict(model.named_parameters()).keys()
    model.head.weight = model.words.weight
    assert algorithms(Muon(model), model)["square.weight"] == "muon"


def sharded_algorithms() -> dict[str, str]:
    model = Everything()
    fully_shard(model.square, ctx := FsdpContext())
    fully_shard(model, ctx)
    return algorithms(Muon(model), model)


def test_the_choice_is_the_same_sharded() -> None:
    model = Everything()
    assert run_ranks(sharded_algorithms, 2) == [algorithms(Muon(model), model)] * 2


def test_the_choice_can_be_changed_by_name() -> None:
    model = Everything()
    found = algorithms(
        Muon(model, algorithms={"*.weight": "muon", "square.*": "adamw", "norm.*": "adamw"}), model
    )
    assert found["words.weight"] == found["patches.weight"] == found["head.weight"] == "muon"
    assert found["square.weight"] == found["norm.weight"] == "adamw"


def test_groups_have_options_of_their_own() -> None:
    model = Everything()
    optimizer = Muon(
        [
            {"params": [model.square.weight], "lr": 0.5, "split": 2},
            {"params": [model.norm.weight], "algorithm": "adamw", "lr": 0.25},
        ],
        lr=0.1,
        adamw={"betas": (0.5, 0.6)},
    )
    optimizer.add_param_group({"params": [model.head.weight]})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25, 0.1]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    assert Muon(model).param_groups[-1]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithms": {"nothing.*": "muon"}},
            r"'nothing.\*' matches no parameter; there are exp",
        ),
        ({"algorithms": {"head.weight": "sgd"}}, "use 'muon' or 'adamw'"),
        ({"algorithms": {"norm.weight": "muon"}}, r"not a parameter of shape \(8,\)"),
        ({"split": {"square.weight": 3}}, "split=3 does not divide the 8 rows"),
        ({"split": {"square.weight": (3, 4)}}, r"split=\(3, 4\) makes 7 rows"),
        ({"split": {"words.weight": 2}}, "names 'words.weight', for which algorithm is 'adamw'"),
        ({"ns_coefficients": "cubic"}, "use 'quintic' or 'polar_express'"),
        ({"ns_coefficients": (1.0, 2.0)}, "3 numbers"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"adjust_lr_fn": "rms"}, 'use "original" or "match_rms_adamw"'),
        ({"ns_coefficients": ()}, "3 numbers"),
        ({"ns_dtype": torch.int32}, "ns_dtype=torch.int32"),
        ({"split": {"square.weight": [3, 4]}}, r"split=\(3, 4\) makes 7 rows"),
        ({"lr": -1.0}, "lr=-1.0: must not be negative"),
        ({"adamw": {"lr": -1.0}}, "Invalid learning rate"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Muon(Everything(), **options)


def test_wrong_parameters_are_refused() -> None:
    model = Everything()
    with pytest.raises(ValueError, match="pass the model"):
        Muon(model.parameters(), split={"square.weight": 2})
    with pytest.raises(ValueError, match="not contiguous"):
        Muon([nn.Parameter(torch.ones(2, 3).t())])
    with pytest.raises(ValueError, match="complex64"):
        Muon([nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))])
    with pytest.raises(ValueError, match='use "muon" or "adamw"'):
        Muon([{"params": [model.square.weight], "algorithm": "sgd"}])
    optimizer = Muon([model.square.weight])
    with pytest.raises(ValueError, match="matrices"):
        optimizer.add_param_group({"params": [model.norm.bias]})
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optimizer.add_param_group({"params": [model.norm.bias], "algorithm": "adamw", "lr": -1.0})
    assert len(optimizer.param_groups) == 1


def foreign() -> None:
    model = nn.Linear(4, 4)
    fsdp2_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(TypeError, match=r"shard it by fsdp_overlap\.fully_shard"):
        Muon(model)


def test_parameters_of_fsdp2_are_refused() -> None:
    run_on_fake_group(foreign, 2)


# Schedulers, states, copies


def scheduled() -> None:
    twins = Twins.of("layers", optimizer=Muon, layout=TensorAtomic(), **EXACT)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        for optimizer in (twins.optimizer, twins.twin_optimizer)
    ]
    for batch in twins.batches(4):
        twins.backward(*batch)
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
        twins.check_parameters()


def test_schedulers_work() -> None:
    run_ranks(scheduled, 2)


def copied() -> None:
    model, optimizer = experts(Flat())
    steps(model, optimizer, [0])
    pair = copy.deepcopy((model, optimizer))
    for each in ((model, optimizer), pair):
        steps(*each, [1, 2])
    for mine, its in zip(model.parameters(), pair[0].parameters(), strict=True):
        assert mine is not its
        same(its.full_tensor(), mine.full_tensor(), "copy")


def test_a_copy_of_model_and_optimizer_trains_on() -> None:
    run_ranks(copied, 3)


def test_states_of_other_optimizers() -> None:
    model = Everything()
    chosen = {"algorithm": "muon", "params": [model.square.weight], "split": 2}
    optimizer = Muon([chosen, {"algorithm": "adamw", "params": [model.norm.weight]}])
    others = [torch.optim.Muon([model.square.weight]), torch.optim.AdamW([model.norm.weight])]
    for parameter in (model.square.weight, model.norm.weight):
        parameter.grad = torch.ones_like(parameter)
    for other in others:
        other.step()
    states = [other.state_dict() for other in others]
    both = {
        "state": {0: states[0]["state"][0], 1: states[1]["state"][0]},
        "param_groups": [
            g | {"params": [i]} for i, s in enumerate(states) for g in s["param_groups"]
        ],
    }
    optimizer.load_state_dict(both)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    assert optimizer.param_groups[0]["split"] == 2
    optimizer.step()
    both["param_groups"].reverse()
    for index, group in enumerate(both["param_groups"]):
        group["params"] = [index]
    with pytest.raises(ValueError, match="to be stepped by muon, but was saved by another"):
        optimizer.load_state_dict(both)


def save(folder: str, layout: str) -> list[torch.Tensor]:
    """Three steps; returns the parameters two steps after the checkpoint."""
    model, optimizer = experts(LAYOUTS[layout])
    steps(model, optimizer, [0, 1, 2])
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    steps(model, optimizer, [3, 4])
    return [parameter.full_tensor() for parameter in model.parameters()]


def load(folder: str, layout: str) -> list[torch.Tensor]:
    model, optimizer = experts(LAYOUTS[layout])
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    steps(model, optimizer, [3, 4])
    return [parameter.full_tensor() for parameter in model.parameters()]


def experts(layout: LayoutRule) -> tuple[Experts, Muon]:
    torch.manual_seed(0)
    model = Experts().double()
    ctx = FsdpContext(layout=layout)
    ctx.plan_layout([*model.layers, model])
    shard_layers(model, ctx)
    return model, Muon(model, lr=0.1, **EXACT)


def steps(model: nn.Module, optimizer: Muon, seeds: list[int]) -> None:
    """The same batch on every rank, so that the number of ranks does not matter."""
    for seed in seeds:
        tokens = torch.randint(13, (3, 4), generator=torch.Generator().manual_seed(seed))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_checkpoints_move_between_worlds_and_spreads_of_experts(tmp_path: Path) -> None:
    [expected, *_] = run_ranks(save, 2, str(tmp_path), "whole")
    for world_size, layout in ((3, "whole"), (4, "whole"), (4, "flat"), (1, "blocks")):
        for found in run_ranks(load, world_size, str(tmp_path), layout):
            for name, (mine, its) in enumerate(zip(found, expected, strict=True)):
                same(mine, its, str(name))


def low_precision(layout: str) -> None:
    """bf16 compute, fp32 shards and states; bf16 moments where asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    ctx = FsdpContext(layout=LAYOUTS[layout])
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for layer in model:
        fully_shard(layer, ctx, mp_policy=policy)
    fully_shard(model, ctx, mp_policy=policy)
    optimizer = Muon(model, adamw={"moment_dtype": torch.bfloat16})
    losses = []
    for _ in range(6):
        loss = (model(torch.eye(8)).float() - torch.eye(8)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        state = optimizer.state[parameter]
        if parameter.dim() == 2:
            assert state["momentum_buffer"].dtype == torch.float32
        else:
            assert state["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_matrices_than_ranks_in_low_precision(layout: str) -> None:
    run_ranks(low_precision, 4, layout)


def lost() -> None:
    """Gradients that are missing here and there, from step to step."""
    twins = Twins.of("layers", optimizer=Muon, layout=Flat(), **EXACT)
    for step, batch in enumerate(twins.batches(4)):
        twins.backward(*batch)
        for model in (twins.model, twins.twin):
            for index, parameter in enumerate(model.parameters()):
                if (index + step) % 3 == 0:
                    parameter.grad = None
        twins.step()
        twins.check_parameters()


def test_parameters_without_a_gradient_stay() -> None:
    run_ranks(lost, 3)


def test_both_adamws_of_the_library_are_one() -> None:
    """What Muon steps by AdamW is what AdamW steps."""
    torch.manual_seed(0)
    pair = [nn.LayerNorm(5), nn.LayerNorm(5)]
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.3}
    optimizers = [Muon(pair[0], adamw=options), AdamW(pair[1].parameters(), **options)]
    for model, optimizer in zip(pair, optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(5.0)).square().sum().backward()
            optimizer.step()
    assert torch.equal(pair[0].weight, pair[1].weight)
