"""What differs elsewhere than in the tensors that modules and optimizers hand on is found too."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_overlap.debug import record
from fsdp_overlap.recording.recording import Key, Recording
from fsdp_overlap.tools.comparison import differences
from fsdp_overlap.tools.comparison.differences import Comparison, compare

WIDTH = 8
CLEAN = "none"


class _Net(nn.Module):
    """Its parameters are of no module that is called, its mean is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])
        self.bias = nn.Parameter(torch.zeros(WIDTH))  # of which the next one takes the gradient
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.loss = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return self.frozen(self.norm(x + self.bias))


@dataclass
class _Training:
    fault: str = CLEAN
    steps: int = 3
    in_bfloat16: bool = False
    model: _Net = field(default_factory=_Net)

    def run(self) -> None:
        torch.manual_seed(0)
        averaged, criterion = deepcopy(self.model).requires_grad_(False), nn.MSELoss()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, 0.01)
        for _ in range(self.steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.in_bfloat16):
                loss = criterion(self.model(torch.randn(4, WIDTH)), torch.ones(4, WIDTH))
            (loss + 0.5 * (self.fault == "loss")).backward()
            self._spoil(self.model.weights[1].grad)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                averaged.bias.lerp_(self.model.bias, 0.1)
                for old, new in zip(averaged.weights, self.model.weights, strict=True):
                    old.lerp_(new, 0.1).mul_(1.5 if self.fault == "average" else 1)
                averaged(torch.randn(4, WIDTH))

    @torch.no_grad()
    def _spoil(self, gradient: torch.Tensor | None) -> None:
        assert gradient is not None
        if self.fault == "gradient":
            gradient.copy_(torch.linspace(-1, 1, WIDTH**2).view(WIDTH, WIDTH))
        elif self.fault == "rounding":
            gradient.mul_(1 + 1e-6)
        elif self.fault == "bfloat16":
            gradient.add_(gradient.roll(1), alpha=1e-3)
        elif self.fault == "buffer":
            assert self.model.norm.running_mean is not None
            self.model.norm.running_mean.add_(1)
        elif self.fault == "frozen":
            self.model.frozen.weight.mul_(1.5)


def _recording(
    folder: Path, fault: str = CLEAN, steps: int = 3, in_bfloat16: bool = False
) -> Recording:
    torch.manual_seed(1)
    training = _Training(fault, steps, in_bfloat16)
    with record(folder):
        training.run()
    return Recording.read(folder)


def _compared(folder: Path, fault: str) -> Comparison:
    return compare(_recording(folder / "a"), _recording(folder / "b", fault))


@pytest.mark.parametrize(
    ("fault", "kind", "name", "cause"),
    [
        ("loss", "loss", "", "compute"),
        ("buffer", "buffer", "norm.running_mean", "compute"),
        ("gradient", "gradient", "weights.1", "reduction"),
        ("average", "evaluated weight", "_Net.weights.0", "compute"),
        ("frozen", "parameter", "frozen.weight", "wrong weight"),
    ],
)
def test_a_fault_elsewhere(fault: str, kind: str, name: str, cause: str, tmp_path: Path) -> None:
    found = _compared(tmp_path, fault).unexplained
    assert found is not None
    assert (found.kind, found.name, found.cause) == (kind, name, cause), found.text
    assert found.step == int(fault == "frozen")  # after that step


def test_rounding_is_no_fault_elsewhere(tmp_path: Path) -> None:
    # After some steps AdamW makes large steps of gradients that are rounding errors.
    a, b = _recording(tmp_path / "a", steps=6), _recording(tmp_path / "b", "rounding", 6)
    comparison = compare(a, b)
    assert not comparison.is_equal
    assert comparison.unexplained is None, comparison.text


def test_integers_differ_by_no_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "_GROWTH", 1e6)
    a = _recording(tmp_path / "a", steps=6, in_bfloat16=True)
    b = _recording(tmp_path / "b", "bfloat16", steps=6, in_bfloat16=True)
    assert compare(a, b).unexplained is None
    key = Key("buffer", "norm.num_batches_tracked", 0, 0)
    b.ranks[0][5].tensors[key] = b.ranks[0][4].tensors[key]
    found = compare(a, b).unexplained
    assert found is not None
    assert (found.step, found.name, found.cause) == (5, key.name, "compute")


def test_steps_that_one_lacks_are_named(tmp_path: Path) -> None:
    comparison = compare(_recording(tmp_path / "a", steps=3), _recording(tmp_path / "b", steps=1))
    assert comparison.is_equal
    assert "Not compared: 2 later steps, which only A has" in comparison.text


def _on_ranks(recording: Recording, ranks: int) -> Recording:
    return Recording(recording.torch, [deepcopy(recording.ranks[0]) for _ in range(ranks)])


def test_rounding_of_compute_on_another_number_of_ranks(tmp_path: Path) -> None:
    one = _recording(tmp_path / "a", in_bfloat16=True)
    other = _recording(tmp_path / "b", "bfloat16", in_bfloat16=True)
    comparison = compare(one, _on_ranks(other, 2))
    assert not comparison.is_equal
    assert comparison.unexplained is None, comparison.text


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gradient_that_one_run_lacks(ranks: int, tmp_path: Path) -> None:
    recording = _recording(tmp_path)
    one, other = _on_ranks(recording, 2), _on_ranks(recording, ranks)
    lacking = other.ranks[1:] if ranks == 2 else other.ranks
    for rank in lacking:
        del rank[1].tensors[Key("gradient", "weights.1", 0, 0)]
    found = compare(one, other).unexplained
    assert found is not None
    assert (found.step, found.cause, found.name) == (1, "absent", "weights.1")
    assert found.ranks == ((1,) if ranks == 2 else ())


def test_replicas_of_some_ranks_that_differ_in_both(tmp_path: Path) -> None:
    recording = _on_ranks(_recording(tmp_path / "a"), 3)
    spoiled = _recording(tmp_path / "b", "gradient")
    key = Key("gradient", "weights.1", 0, 0)
    recording.ranks[1][0].tensors[key] = spoiled.ranks[0][0].tensors[key]
    del recording.ranks[2][0].tensors[key]
    assert compare(recording, recording).is_equal
