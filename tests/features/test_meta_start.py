"""Models built on the meta device: sharded, given memory, then initialized or loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_overlap import Flat, FsdpContext, PerTensor, RaggedDTensor, fully_shard, patch_fsdp2
from fsdp_overlap.layout import LayoutRule
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import WIDTH, ZOO, Model, shard_layers

MODELS = [
    "layers",
    "nested units",
    "without a context",
    "tied parameters",
    "frozen and partly frozen units",
    "odd parameters",
    "recurrent",
]


def initialize(model: nn.Module) -> None:
    torch.manual_seed(9)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        else:
            for parameter in module.parameters(recurse=False):
                nn.init.zeros_(parameter)


def start(name: str) -> None:
    build, shard = ZOO[name]
    with torch.device("meta"):
        model = build()
    shard(model, FsdpContext())
    model.to_empty(device="cpu")
    initialize(model)
    plain = build()
    initialize(plain)
    for (fqn, parameter), expected in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert isinstance(parameter, RaggedDTensor), fqn
        assert parameter.requires_grad == expected.requires_grad, fqn
        assert torch.equal(parameter.full_tensor(), expected), fqn


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_initialization_is_that_of_the_whole_model(world_size: int) -> None:
    for name in MODELS:
        run_ranks(start, world_size, name)


def train(name: str) -> None:
    """Twins whose sharded model started on the meta device and loaded the other's weights."""
    build, shard = ZOO[name]

    def build_on_meta() -> nn.Module:
        with torch.device("meta"):
            return build()

    twins = Twins(build, shard)
    model = build_on_meta().double()
    ctx = FsdpContext()
    shard(model, ctx)
    model.to_empty(device="cpu").load_state_dict(twins.twin.state_dict())
    twins.model, twins.ctx = model, ctx
    twins.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    twins.train(3)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "tied parameters"])
def test_a_model_that_started_on_meta_trains_as_any_other(name: str) -> None:
    run_ranks(train, 2, name)


INITIALIZERS: dict[str, dict[str, Any]] = {
    "uniform_": {"a": -2.0},
    "normal_": {"std": 0.3},
    "trunc_normal_": {"std": 0.3},
    "constant_": {"val": 0.5},
    "ones_": {},
    "xavier_uniform_": {},
    "xavier_normal_": {},
    "kaiming_uniform_": {},
    "kaiming_normal_": {},
}


def initializers_alone() -> tuple[nn.Parameter, nn.Parameter]:
    sharded = fully_shard(nn.Linear(5, 3, bias=False), FsdpContext()).weight
    plain = nn.Linear(5, 3, bias=False).weight
    for name, options in INITIALIZERS.items():
        for weight in (sharded, plain):
            torch.manual_seed(4)
            assert getattr(nn.init, name)(weight, **options) is weight
        assert torch.equal(sharded.full_tensor(), plain), name
    return sharded, plain


def initializers() -> None:
    sharded, plain = initializers_alone()
    for name in ("normal_", "uniform_", "exponential_", "bernoulli_", "random_"):
        for weight in (sharded, plain):
            torch.manual_seed(4)
            getattr(weight.data, name)()
        assert torch.equal(sharded.full_tensor(), plain), name
        generators = [torch.Generator().manual_seed(6) for _ in range(2)]
        for weight, generator in zip((sharded, plain), generators, strict=True):
            getattr(weight.data[1:], name)(generator=generator)
        assert torch.equal(sharded.full_tensor(), plain), f"{name} of some rows"
    for make in (torch.rand_like, torch.randn_like):
        results = []
        for weight in (sharded, plain):
            torch.manual_seed(4)
            results.append(make(weight.detach()))
        assert torch.equal(results[0].full_tensor(), results[1])
    embeddings = [nn.Embedding(4, 3, padding_idx=1) for _ in range(2)]
    fully_shard(embeddings[0], FsdpContext())
    for embedding in embeddings:
        torch.manual_seed(4)
        embedding.reset_parameters()
    assert torch.equal(embeddings[0].weight.full_tensor(), embeddings[1].weight)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_initializers_draw_what_they_draw_for_the_whole(world_size: int) -> None:
    run_ranks(initializers, world_size)


def replaced_initializers() -> None:
    """As transformers does, whose functions come back as what torch says was called."""
    originals = {name: getattr(nn.init, name) for name in INITIALIZERS}

    def replacement(name: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            return originals[name](tensor, *args, **options)

        call.__name__ = name
        return call

    try:
        for name in originals:
            setattr(nn.init, name, replacement(name))
        with torch.no_grad():
            initializers_alone()
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


def test_functions_in_the_place_of_torchs_initializers_draw_the_same() -> None:
    run_ranks(replaced_initializers, 2)


def peak_bytes(prof: profile) -> int:
    now = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def peak() -> tuple[int, int, int]:
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(128, 128) for _ in range(2))) for _ in range(12))
        )
    ctx = FsdpContext()
    for layer in model:
        fully_shard(layer, ctx)
    fully_shard(model, ctx)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model.to_empty(device="cpu")
        initialize(model)
    sizes = [sum(p.numel() * 4 for p in layer.parameters()) for layer in model]
    shards = sum(p.to_local().nbytes for p in model.parameters())
    return peak_bytes(prof), shards, sizes[0]


def test_starting_on_meta_never_holds_more_than_the_shards_and_one_unit() -> None:
    for measured, shards, unit in run_ranks(peak, 4):
        # Building a block's full buffer touches it once, before it is freed; and small change.
        assert shards < measured < shards + 1.1 * unit, (measured, shards, unit)


def on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    shard_layers(model, FsdpContext())
    with pytest.raises(RuntimeError, match=r"on the meta device: call to_empty\(device=...\)"):
        model(torch.zeros(1, 2, dtype=torch.int64))
    state = {key: torch.ones(value.shape) for key, value in model.state_dict().items()}
    with (
        pytest.warns(UserWarning, match="no-op"),
        pytest.raises(RuntimeError, match=r"no memory: call to_empty\(device=...\)"),
    ):
        model.load_state_dict(state)
    with pytest.raises(NotImplementedError, match="to_empty"):
        model.to("cpu")
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"its shards are on cpu and cannot move to meta"):
        model.to_empty(device="meta")
    model.to("cpu").load_state_dict(state)
    model.layers[0].requires_grad_(False)
    assert torch.equal(model.head.bias.full_tensor(), torch.ones(13))
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    for parameter in model.layers.parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad)
    assert model.head.bias.grad.device.type == "cpu"


def test_a_model_without_memory_says_what_to_do() -> None:
    run_ranks(on_meta, 2)


def gives_a_part_memory(layout: LayoutRule) -> None:
    with torch.device("meta"):
        model = Model()
    shard_layers(model, FsdpContext(layout=layout))
    with pytest.raises(RuntimeError, match=r"or cast a unit, or to_empty\(\) it, before it runs"):
        model.layers[0].down.to_empty(device="cpu")
    model.to_empty(device="cpu")
    initialize(model)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("layout", [Flat(), PerTensor()])
def test_a_part_of_a_unit_is_given_no_memory(layout: LayoutRule) -> None:
    run_ranks(gives_a_part_memory, 2, layout)


def half_on_meta() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    module.bias = nn.Parameter(torch.zeros(WIDTH, device="meta"))
    with pytest.raises(ValueError, match="'bias' of Linear is on meta, 'weight' on cpu: put all"):
        fully_shard(module, FsdpContext())
    assert type(module) is nn.Linear


def test_a_unit_partly_on_meta_is_refused() -> None:
    run_ranks(half_on_meta, 1)


def forgets(name: str, on: int) -> None:
    with torch.device("meta"):
        model = Model()
    shard_layers(model, FsdpContext())
    model.to_empty(device="cpu")
    for fqn, parameter in model.named_parameters():
        if not fqn.startswith(name):
            nn.init.ones_(parameter)
        elif dist.get_rank() != on:
            parameter.to_local().fill_(1)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    mine, theirs = r"gave to '\w+\.\w+' of unit 'layers\.1'", "given different weights, or none"
    whose = mine if dist.get_rank() == on else theirs
    with pytest.raises(RuntimeError, match=whose):
        model(tokens)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model(tokens)


@pytest.mark.parametrize(("ranks", "on"), [(1, 0), (2, 0), (2, 1)])
def test_memory_that_nobody_wrote_is_refused_by_name(ranks: int, on: int) -> None:
    run_ranks(forgets, ranks, "layers.1.", on)


def forgets_as_in_fsdp2() -> None:
    """As PyTorch's own example of FSDP2, which trains nan."""
    with patch_fsdp2():
        from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

        with torch.device("meta"):
            model = Model()
        for module in (*model.layers, model):
            fully_shard_of_torch(module)
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"nothing was written .* and \d+ more: initialize it"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def test_so_it_is_in_place_of_fsdp2() -> None:
    run_ranks(forgets_as_in_fsdp2, 2)
