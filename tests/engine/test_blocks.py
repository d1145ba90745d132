"""What `find_blocks` picks in models that are not of transformers, which test_transformers has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_overlap import find_blocks
from support.zoo import Block, Model


class Named(Model):
    """Says itself what its blocks are, as a part of a larger model."""

    _no_split_modules = ("Block", "Absent")

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()


def names(model: nn.Module) -> list[str]:
    found = {module: name for name, module in model.named_modules()}
    return [found[block] for block in find_blocks(model)]


def test_members_of_module_lists_are_blocks() -> None:
    assert names(Model()) == ["layers.0", "layers.1", "layers.2"]
    both = nn.Transformer(8, 2, 1, 1, dim_feedforward=8, batch_first=True)
    assert names(both) == ["encoder.layers.0", "decoder.layers.0"]


def test_what_the_model_names_comes_before_its_lists() -> None:
    assert names(Named()) == ["layers.0", "layers.1", "layers.2", "first"]
    assert names(nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]), Named())) == [
        *(f"1.layers.{index}" for index in range(3)),
        "1.first",
    ]


def test_the_outermost_blocks_are_taken() -> None:
    model = Model()
    model.layers[0].inner = nn.ModuleList([Block()])
    assert names(model) == ["layers.0", "layers.1", "layers.2"]


def test_lists_and_modules_without_parameters_are_no_blocks() -> None:
    model = nn.Module()
    scales = nn.ParameterList([nn.Parameter(torch.ones(1))])
    model.stages = nn.ModuleList([nn.ModuleList([nn.ReLU(), Block()]), nn.ModuleDict(), scales])
    assert names(model) == ["stages.0.1"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_shares_a_parameter_with_the_outside_is_left_to_the_root(device: str) -> None:
    with torch.device(device):
        model = Model()
    model.layers[1].up.weight = nn.Parameter(torch.empty(18, 6, device=device))
    model.other = nn.Linear(6, 18, device=device)
    model.other.weight = model.layers[1].up.weight
    assert names(model) == ["layers.0", "layers.2"]


def test_what_lies_within_a_module_that_shares_may_be_a_block() -> None:
    model = Model()
    outer = nn.Module()
    outer.embedding, outer.parts = model.embedding, nn.ModuleList([Block(), Block()])
    model.layers = nn.ModuleList([outer])
    assert names(model) == ["layers.0.parts.0", "layers.0.parts.1"]


def test_a_module_used_by_several_blocks_is_no_part_of_one() -> None:
    model = Model()
    model.layers[0].down = model.layers[1].down
    assert names(model) == ["layers.2"]


def test_a_block_that_is_run_several_times_is_one() -> None:
    model = Model()
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    assert names(model) == ["layers.0"]


def test_parameters_shared_within_a_block_are_no_matter() -> None:
    model = Model()
    model.layers[0].norm.weight = model.layers[0].norm.bias
    assert names(model) == ["layers.0", "layers.1", "layers.2"]


def test_a_model_without_blocks_is_an_error_that_says_what_it_has() -> None:
    with pytest.raises(ValueError, match=r"Linear has no blocks: no members of .* are \{\}\. Call"):
        find_blocks(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"its children are \{'0': 'ReLU', '1': 'Linear'\}"):
        find_blocks(nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    named = Named()
    named.layers, named.first = nn.ModuleList(), nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"no modules of the classes \['Absent', 'Block'\], which"):
        find_blocks(named)
    model = Model(layers=2)
    model.layers[0].up = model.layers[1].up
    with pytest.raises(ValueError, match=r"layers\.0, layers\.1 share parameters or modules with"):
        find_blocks(model)
