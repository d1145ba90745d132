"""Parameters that a loader assigns in place of sharded ones, placed alike, train as without it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torchs_distribute_tensor

from fsdp_overlap import Flat, FsdpContext, PerTensor, distribute_tensor, fully_shard
from fsdp_overlap.optim import AdamW, Muon, OverlapPolicy
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor
from support.ranks import run_ranks

SIZE = 5  # uneven over 2 ranks
X = torch.linspace(-1, 1, 4 * SIZE, dtype=torch.float64).view(4, SIZE)


class Head(nn.Module):
    """Holds its weight outside of the units of the layers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.rnn = nn.LSTM(SIZE, SIZE, batch_first=True)
        self.head = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(self.first(x)[:, None])[0][:, 0])
        return out


def pair(shard: Any = fully_shard, *, meta: bool = True) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    plain = Head().double()
    with torch.device("meta" if meta else "cpu"):
        model: Any = Head().double()
    for module in (model.first, model.rnn, model):
        shard(module)
    return model, plain


def place(value: torch.Tensor, like: Any) -> DTensor:
    rows = not isinstance(like, RaggedDTensor)
    distribute: Any = torchs_distribute_tensor if rows else distribute_tensor
    made: DTensor = distribute(value.detach(), like.device_mesh, like.placements)
    return made


def assign(model: Any, plain: nn.Module) -> list[nn.Parameter]:
    """Do what a loader does, by setattr."""
    made = {}
    for name, value in plain.named_parameters():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        made[name] = nn.Parameter(
            place(value, module._parameters[leaf]), requires_grad=value.requires_grad
        )
        setattr(module, leaf, made[name])
    return list(made.values())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool) -> None:
    mine = X.to(next(model.parameters()).dtype)
    mine = mine if whole else mine.chunk(dist.get_world_size())[dist.get_rank()]
    for _ in range(3):
        (model(mine).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def check(model: nn.Module, plain: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole: Any = one
        torch.testing.assert_close(whole.full_tensor(), other, msg=lambda m, n=name: f"{n}: {m}")


def sharders() -> Iterator[Callable[..., Any]]:
    yield torchs_fully_shard
    yield fully_shard
    for layout in (Flat(), PerTensor()):
        yield partial(fully_shard, ctx=FsdpContext(layout=layout))


def adopted() -> None:
    """Some frozen, of optimizers made before the first forward, also with states loaded by then."""
    for shard, meta in [(shard, meta) for meta in (True, False) for shard in sharders()]:
        model, plain = pair(shard, meta=meta)
        plain.first.weight.requires_grad_(False)
        stale = torch.optim.AdamW(model.parameters())
        given = assign(model, plain)
        optimizer = torch.optim.AdamW(given, lr=0.1)
        given[1].grad = torch.zeros_like(given[1])
        optimizer.step()  # states of zeros, as torch's set_optimizer_state_dict() makes them
        state = optimizer.state[given[1]]
        train(model, optimizer, whole=False)
        its = torch.optim.AdamW(plain.parameters(), lr=0.1)
        plain.first.bias.grad = torch.zeros_like(plain.first.bias)
        its.step()
        train(plain, its, whole=True)
        check(model, plain)
        assert {*map(id, model.parameters())} == {*map(id, given)}
        assert optimizer.state[given[1]] is state
        assert state["step"] == 4
        if shard is not torchs_fully_shard:
            for parameter in stale.param_groups[0]["params"]:
                parameter.grad = None
            by = "the model was given memory" if meta else "an assignment"
            with pytest.raises(RuntimeError, match=f"AdamW was made before {by}"):
                stale.step()
            check(copy.deepcopy(model), plain)


def test_what_a_loader_assigns_trains() -> None:
    run_ranks(adopted, 2)


def of_ours() -> None:
    """Optimizers that want parameters of this library, made before the first forward."""
    for make in (
        partial(AdamW, overlap=OverlapPolicy()),
        lambda params: Muon([p for p in params if p.ndim == 2], lr=0.1),
    ):
        found = []
        for loads in (True, False):
            model, plain = pair(partial(fully_shard, ctx=FsdpContext()), meta=loads)
            if loads:
                assign(model, plain)
            else:
                model.load_state_dict(plain.state_dict())
            train(model, make(model.parameters()), whole=False)
            found.append([parameter.full_tensor() for parameter in model.parameters()])
        assert all(map(torch.equal, *found))


def test_optimizers_of_this_library_are_made_of_what_was_assigned() -> None:
    run_ranks(of_ours, 2)


def tied() -> None:
    """As transformers ties the head to the embedding, which is of another unit, when it has loaded
    the weight. With FSDP2 such a tie trains wrong on a CPU."""
    overlapped = partial(AdamW, overlap=OverlapPolicy())
    cases = [(late, make) for late in (False, True) for make in (torch.optim.AdamW, overlapped)]
    for late, make in cases:
        for shard in [*sharders()][1:]:
            torch.manual_seed(0)
            ends = [nn.Linear(SIZE, SIZE, bias=False) for _ in range(2)]
            plain = nn.Sequential(ends[0], nn.Tanh(), ends[1]).double()
            model: Any = copy.deepcopy(plain).to("meta")
            for module in (model[0], model):
                shard(module)
            if late:
                model.to_empty(device="cpu")
                model.load_state_dict(plain.state_dict())
            else:
                assign(model, plain)
            for each in (model, plain):
                each[2].weight = each[0].weight
            assert model.state_dict().keys() == plain.state_dict().keys()
            train(model, make(model.parameters(), lr=0.1), whole=False)
            train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), whole=True)
            check(model, plain)
            assert model[0].weight is model[2].weight
            with pytest.raises(RuntimeError, match=r"tied after fully_shard\(\)"):
                copy.deepcopy(model)
            with pytest.raises(RuntimeError, match="tied to that of another unit"):
                model.float()


def test_a_weight_that_is_tied_to_one_of_another_unit_is_one() -> None:
    run_ranks(tied, 2)


def in_another_dtype() -> None:
    for meta in (True, False):
        for shard in sharders():
            model, plain = pair(shard, meta=meta)
            optimizer = torch.optim.SGD(assign(model, plain.float()), lr=0.1)
            train(model, optimizer, whole=False)
            train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), whole=True)
            check(model, plain)


def test_a_unit_is_loaded_in_another_dtype() -> None:
    run_ranks(in_another_dtype, 2)


def refused() -> None:
    """By what differs, before the parameter is used."""
    mesh = init_device_mesh("cpu", (2,))
    other = init_device_mesh("cpu", (1, 2))
    shard = partial(fully_shard, ctx=FsdpContext(mesh, layout=PerTensor()))
    whole = torch.ones(SIZE, SIZE, dtype=torch.float64)
    rows = Shard(0)
    cases = {
        r"a Parameter that is not sharded": nn.Parameter(whole),
        r"one of shape \(4, 5\), not \(5, 5\)": torchs_distribute_tensor(whole[1:], mesh),
        r"one of placements \(Replicate\(\),\), not \(Shard": torchs_distribute_tensor(
            whole, mesh, [Replicate()]
        ),
        r"one of mesh .*, not ": torchs_distribute_tensor(whole, other, [Replicate(), rows]),
        r"one of local shape \(1, 5\), not \([23], 5\)": DTensor.from_local(
            whole[:1], mesh, [rows], shape=whole.shape, stride=whole.stride()
        ),
        r"gives parameter 'weight' of Linear as torch.float32": torchs_distribute_tensor(
            whole.float(), mesh, [rows]
        ),
    }
    for message, value in cases.items():
        model, plain = pair(shard, meta=False)
        model.load_state_dict(plain.state_dict())
        before = model.first.weight
        model.first.weight = nn.Parameter(value) if value.is_leaf else value
        with pytest.raises(RuntimeError, match=message):
            model(X)
        model.first.weight = before
        torch.testing.assert_close(model(X), plain(X))
    model.first.weight = nn.Parameter(place(whole, before))
    with pytest.raises(RuntimeError, match="either its unit has run or weights are tied"):
        model(X)
    twice = [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)]
    twice[1].weight = twice[0].weight
    both = nn.Sequential(*twice).double()
    shard(both)
    for each in twice:
        each.weight = nn.Parameter(place(whole, before))
    with pytest.raises(RuntimeError, match="either its unit has run or weights are tied"):
        both(X)


def test_what_is_not_placed_alike_is_refused_by_what_differs() -> None:
    run_ranks(refused, 2)
