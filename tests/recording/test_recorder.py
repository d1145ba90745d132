"""A recorder writes each step, leaves the program as it is, and lets go of it at the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset

from fsdp_overlap.debug import record
from fsdp_overlap.recording import sketch
from fsdp_overlap.recording.recording import Key, RankStep, Recording
from fsdp_overlap.tools.comparison.differences import compare


class _Net(nn.Module):
    def __init__(self, repeats: bool | None = None) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4)
        self._repeats = repeats  # whether by the reentrant checkpoint

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.first(x)).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._repeats is None:
            return self._body(x)
        output = checkpoint(self._body, x, use_reentrant=self._repeats)
        assert isinstance(output, torch.Tensor)
        return output


def _train(
    model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(3, 4, requires_grad=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _steps(folder: Path) -> list[RankStep]:
    [steps] = Recording.read(folder).ranks
    return steps


def _names(step: RankStep, kind: str) -> list[str]:
    return [key.name for key in step.tensors if key.kind == kind]


@pytest.mark.parametrize("repeats", [None, True, False])
def test_a_program_computes_the_same_bits_with_and_without(
    tmp_path: Path, repeats: bool | None
) -> None:
    torch.manual_seed(0)
    plain = _Net(repeats)
    losses = _train(plain, 3)
    torch.manual_seed(0)
    with record(tmp_path):
        recorded = _Net(repeats)
        assert _train(recorded, 3) == losses
    for one, other in zip(plain.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = _steps(tmp_path)
    assert [step.losses for step in steps] == [[pytest.approx(loss)] for loss in losses]
    weights = ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert all(_names(step, "weight") == weights for step in steps)
    assert [_names(step, "initial weight") for step in steps] == [weights, [], []]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    model = _Net()
    backward, state = torch.autograd.backward, torch.get_rng_state()
    with record(tmp_path):
        assert torch.equal(torch.get_rng_state(), state)
        _train(model, 1)
    assert torch.autograd.backward is backward
    assert not modules._global_forward_hooks
    assert not modules._global_forward_pre_hooks
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    _train(model, 1)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size
    weight = weakref.ref(model.first.weight)
    del model
    gc.collect()
    assert weight() is None


def test_events_come_in_the_order_of_execution(tmp_path: Path) -> None:
    with record(tmp_path):
        _train(_Net(), 1)
    [step] = _steps(tmp_path)
    kinds = list(dict.fromkeys(key.kind for key in step.tensors))
    assert kinds == [
        *("initial weight", "input", "parameter", "output"),
        *("local gradient", "gradient", "weight"),
    ]
    assert _names(step, "output") == ["first", "drop", "last"]  # the whole's is that of its last


def test_recording_begins_in_the_middle_and_ends_after_its_steps(tmp_path: Path) -> None:
    model = _Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    _train(model, 2, optimizer)
    with record(tmp_path, steps=2):
        _train(model, 4, optimizer)
    assert len(_steps(tmp_path)) == 2


def test_evaluation_between_steps_is_left_out(tmp_path: Path) -> None:
    model = _Net()
    with record(tmp_path):
        for _ in range(2):
            _train(model, 1)
            with torch.no_grad():
                model.eval()(torch.randn(3, 4))
            model.train()
    steps = _steps(tmp_path)
    assert len(steps) == 2
    assert all(_names(step, "output") == ["first", "drop", "last"] for step in steps)


def test_an_error_in_a_forward_leaves_the_next_one_a_whole_model(tmp_path: Path) -> None:
    model = _Net()
    with record(tmp_path):
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        _train(model, 1)
    [step] = _steps(tmp_path)
    assert _names(step, "input") == [""]
    assert _names(step, "output") == ["first", "drop", "last"]


def test_backwards_and_optimizers_of_one_step(tmp_path: Path) -> None:
    model = _Net()
    first = torch.optim.AdamW(model.first.parameters())
    last = torch.optim.SGD(model.last.parameters(), 0.1)
    with record(tmp_path):
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(3, 4)).square().mean().backward()
            for optimizer in (first, last):
                optimizer.step()
                optimizer.zero_grad()
    for step in _steps(tmp_path):
        assert len(step.losses) == 3
        assert Key("local gradient", "last.bias", 0, 2) in step.tensors
        assert len(_names(step, "weight")) == 4


def test_a_closure_is_a_step(tmp_path: Path) -> None:
    model = _Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x = torch.randn(3, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with record(tmp_path):
        for _ in range(3):
            optimizer.step(closure)  # type: ignore[arg-type]
    assert len(_steps(tmp_path)) == 3


def test_two_models_of_a_class_have_names_of_their_own(tmp_path: Path) -> None:
    first, second, third = _Net(), _Net(), _Net()
    with record(tmp_path):
        _train(nn.ModuleList([first])[0], 1)
        x = torch.randn(3, 4)
        optimizer = torch.optim.SGD([*second.parameters(), *third.parameters()], 0.1)
        nn.MSELoss()(second(x), third(x)).backward()
        optimizer.step()
    names = _names(_steps(tmp_path)[1], "weight")
    assert len(set(names)) == 8
    assert names[0] == "_Net.first.weight"
    assert names[4] == "_Net-2.first.weight"


def test_a_model_that_is_gone_keeps_its_name(tmp_path: Path) -> None:
    with record(tmp_path):
        for _ in range(2):
            _train(_Net(), 1)
            gc.collect()
    assert _names(_steps(tmp_path)[1], "weight")[0] == "_Net.first.weight"


def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    def losses() -> Iterator[Any]:
        while True:
            yield nn.MSELoss()

    model = _Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counts = []
    with record(tmp_path):
        for step, loss in zip(range(30), losses(), strict=False):
            loss(model(torch.randn(3, 4)), torch.zeros(3, 4)).backward()
            optimizer.step()
            if step in (9, 29):
                gc.collect()
                counts.append(sum(isinstance(each, weakref.ref) for each in gc.get_objects()))
    assert counts[1] - counts[0] < 20


def test_a_file_of_each_rank_before_ranks_have_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with record(tmp_path):
            _train(_Net(), 1)
    assert len(Recording.read(tmp_path).ranks) == 2


def test_the_program_changes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with record("folder"):
        monkeypatch.chdir(tmp_path / "other")
        _train(_Net(), 1)
    assert len(_steps(tmp_path / "folder")) == 1


def test_what_torch_func_transforms_is_no_step(tmp_path: Path) -> None:
    model = _Net()

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    model.eval()
    weights = {name: each.detach() for name, each in model.named_parameters()}
    with record(tmp_path):
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.randn(3, 4))
        _train(model.train(), 1)
    [step] = _steps(tmp_path)
    assert _names(step, "output") == ["first", "drop", "last"]


def test_what_has_no_values_is_no_step(tmp_path: Path) -> None:
    model = _Net()
    with record(tmp_path):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.randn(3, 4))
        _train(model, 1)
    [step] = _steps(tmp_path)
    assert _names(step, "output") == ["first", "drop", "last"]


def test_kept_tensors_are_saved_whole(tmp_path: Path) -> None:
    model = _Net()
    with record(tmp_path, keep="last"):
        _train(model, 1)
    paths = (tmp_path / "tensors/rank-0/step-0").glob("*-weight-last.weight-0.pt")
    path = max(paths, key=lambda path: int(path.name.split("-")[0]))
    [(offsets, values)] = torch.load(path)
    assert offsets == (0, 0)
    assert torch.equal(values, model.last.weight)


def test_selective_checkpoints_save_what_they_would_save(tmp_path: Path) -> None:
    """Products are saved in order, so that one of a recording would take the place of another."""
    saved = [torch.ops.aten.mm.default]

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = (nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 64, bias=False))
        model = nn.Sequential(*layers)
        contexts = partial(create_selective_checkpoint_contexts, saved)
        x = torch.randn(32, 64, requires_grad=True)
        for _ in range(2):
            checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
            assert x.grad is not None
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    with record(tmp_path), patch.object(sketch, "_BATCH", 1):
        recorded = gradients()
    assert len(recorded) == 3
    assert all(map(torch.equal, recorded, expected))
    assert "local gradient" in (tmp_path / "rank-0.jsonl").read_text()


def test_what_cannot_be_recorded_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
    with record(tmp_path):
        model(torch.tensor([[1, 2]])).sum().backward()
    recording = Recording.read(tmp_path)
    names = ["local gradient 0.weight", "gradient 0.weight"]
    assert recording.ranks[0][0].left_out == names
    text = compare(recording, recording).text
    assert text.startswith("Equal to the bit")
    assert "Not compared: 2 tensors without plain values, as local gradient 0.weight" in text


def test_compiled_regions_stay_whole(tmp_path: Path) -> None:
    model = _Net()
    model.last = torch.compile(  # type: ignore[assignment]
        nn.Sequential(model.last, nn.Tanh()), fullgraph=True, backend="eager"
    )
    with record(tmp_path):
        _train(model, 2)
    assert len(_steps(tmp_path)) == 2
    assert "last.0.weight" in _names(_steps(tmp_path)[0], "weight")


class _Doubled(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self._transform = nn.Sequential(nn.Identity(), nn.ReLU())

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._transform(torch.ones(4))


def test_workers_of_data_loaders_record_nothing(tmp_path: Path) -> None:
    model = _Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record(tmp_path):
        for _ in range(2):
            loader = DataLoader(_Doubled(), 2, num_workers=1, multiprocessing_context="fork")
            for x in loader:
                model(x).square().mean().backward()
                optimizer.step()
    assert len(_steps(tmp_path)) == 2
    assert (tmp_path / "rank-0.jsonl").read_text().count('"kind": "end"') == 2


def test_an_error_in_an_optimizer_leaves_the_next_steps_whole(tmp_path: Path) -> None:
    model = _Net()
    optimizer = torch.optim.LBFGS(model.parameters())

    def fails() -> float:
        raise ValueError("no loss")

    with record(tmp_path):
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(fails)
        for _ in range(2):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step(lambda: 0.0)
    assert [len(_names(step, "weight")) for step in _steps(tmp_path)] == [4, 4]


def test_backward_from_edges_and_of_a_generator(tmp_path: Path) -> None:
    model = _Net()
    with record(tmp_path):
        for _ in range(2):
            loss = model(torch.randn(3, 4)).square().mean()
            torch.autograd.backward(get_gradient_edge(loss), torch.ones(()))
            loss = model(torch.randn(3, 4)).square().mean()
            torch.autograd.backward(each for each in (loss,))  # type: ignore[arg-type]
    [step] = _steps(tmp_path)
    assert len(step.losses) == 2
    assert len(_names(step, "local gradient")) == 16
