"""Copies of offloaded shards in the dtype of compute: the same bits as a cast on the device, half
the bytes to it, and fresh after each edit."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_overlap import FsdpContext, PerTensor, QuantizedCommPolicy, TensorAtomic
from fsdp_overlap.features.offload import ComputeCopy, HostStorage
from fsdp_overlap.features.pinned_memory import empty_pinned
from fsdp_overlap.optim import AdamW, Muon, OverlapPolicy
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tools.emulator import EmulatedDevice, active, fake_ranks
from support.emulated import Program, run
from support.pretended_offload import pretending
from support.ranks import run_ranks
from support.twins import loss_of
from support.zoo import VOCABULARY, Model, shard_layers

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OFFLOADED: dict[str, Any] = {"mp_policy": LOW, "offload_policy": CPUOffloadPolicy()}


def without_copies() -> Any:
    return patch.object(HostStorage, "compute_copy", lambda storage, param_group: None)


def stale() -> Any:
    """A defect: a copy is made once, and no edit refreshes it."""
    refresh = ComputeCopy.refresh

    def refresh_once(self: ComputeCopy, param_group: Any) -> None:
        if self._version == -1:
            refresh(self, param_group)

    return patch.object(ComputeCopy, "refresh", refresh_once)


class Trained:
    """The plain model in float32, whose shards rest on what is taken for a host."""

    def __init__(self, optimizer: Any = AdamW, dims: Any = None, **options: Any) -> None:
        torch.manual_seed(7)
        context = {name: options.pop(name) for name in ("layout",) if name in options}
        with pretending():
            self.model: Any = Model().float()
            self.ctx = FsdpContext(dims, **context)
            shard_layers(self.model, self.ctx, mp_policy=LOW)
        what = self.model if optimizer is Muon else self.model.parameters()
        self.optimizer = optimizer(what, lr=0.05, **options)

    def forward(self) -> torch.Tensor:
        tokens, targets = torch.randint(VOCABULARY, (2, 3, 5))
        return loss_of(self.model(tokens).float(), targets)

    def step(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def copies(self) -> list[ComputeCopy]:
        groups = [group for unit in self.ctx.units for group in unit.param_groups]
        return [group.compute_copy for group in groups if group.compute_copy is not None]


def edit_by(edit: Callable[[Any], object]) -> Callable[[Trained], None]:
    def edit_all(trained: Trained) -> None:
        with torch.no_grad():
            for parameter in trained.model.parameters():
                edit(parameter)

    return edit_all


def load(trained: Trained) -> None:
    halved = {name: value * 0.5 for name, value in trained.model.state_dict().items()}
    trained.model.load_state_dict(halved)


def assign(trained: Trained) -> None:
    halved = {name: value * 0.5 for name, value in trained.model.state_dict().items()}
    trained.model.load_state_dict(halved, assign=True)


def replace_by_a_copy(trained: Trained) -> None:
    trained.model, trained.optimizer = copy.deepcopy((trained.model, trained.optimizer))
    edit_by(lambda parameter: parameter.mul_(0.5))(trained)


def fail_and_reset(trained: Trained) -> None:
    def refuse(*_: object) -> None:
        raise ArithmeticError("planned")

    hook = trained.model.layers[1].register_full_backward_hook(refuse)
    with pytest.raises(ArithmeticError):
        trained.forward().backward()
    hook.remove()
    trained.ctx.reset()
    edit_by(lambda parameter: parameter.mul_(0.5))(trained)
    trained.optimizer.zero_grad()


def freeze(trained: Trained) -> None:
    trained.model.layers[0].requires_grad_(False)
    edit_by(lambda parameter: parameter.add_(0.25))(trained)


EDITS: dict[str, Callable[[Trained], None]] = {
    "in place": edit_by(lambda parameter: parameter.mul_(0.5)),
    "data": edit_by(lambda parameter: parameter.data.mul_(0.5)),
    "detached": edit_by(lambda parameter: parameter.detach().mul_(0.5)),
    "local": edit_by(lambda parameter: parameter.to_local().mul_(0.5)),
    "foreach": lambda trained: torch._foreach_mul_(
        [parameter.detach() for parameter in trained.model.parameters()], 0.5
    ),
    "initialized": edit_by(partial(nn.init.constant_, val=0.125)),
    "loaded": load,
    "assigned": assign,
    "copied deeply": replace_by_a_copy,
    "reset": fail_and_reset,
    "frozen": freeze,
}


def trajectory(edit: Callable[[Trained], None] | None, **options: Any) -> list[torch.Tensor]:
    """Return losses and weights of some steps, with an edit and evaluations in between."""
    trained = Trained(**options)
    losses = []
    for index in range(4):
        losses.append(trained.step())
        if edit is not None and index == 1:
            finish_pending_steps()
            edit(trained)
        with torch.inference_mode() if index % 2 else torch.no_grad():
            losses.append(trained.forward().clone())
    finish_pending_steps()
    weights = [parameter.full_tensor().detach() for parameter in trained.model.parameters()]
    return [*losses, *weights]


def same_bits(edit: str | None, defect: Any = nullcontext, **options: Any) -> bool:
    how = None if edit is None else EDITS[edit]
    with without_copies():
        expected = trajectory(how, **options)
    with defect():
        found = trajectory(how, **options)
    return all(map(torch.equal, expected, found))


def check_edits() -> None:
    for name in EDITS:
        assert same_bits(name), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [1, 2])
def test_after_each_kind_of_edit_bits_are_those_of_a_cast_on_the_device(world_size: int) -> None:
    run_ranks(check_edits, world_size)


def check_that_stale_copies_are_found() -> None:
    for name in (None, *EDITS):
        assert not same_bits(name, stale), name


def test_a_copy_that_is_not_refreshed_is_found() -> None:
    run_ranks(check_that_stale_copies_are_found, 1)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch's AdamW": {"optimizer": torch.optim.AdamW},
    "torch's AdamW, fused": {"optimizer": partial(torch.optim.AdamW, fused=True)},
    "torch's SGD": {"optimizer": torch.optim.SGD},
    "Muon": {"optimizer": Muon},
    "AdamW, overlapped": {"overlap": OverlapPolicy()},
    "AdamW, clipped": {"overlap": OverlapPolicy(max_norm=0.1)},
    "AdamW, whole": {"layout": TensorAtomic()},
    "AdamW, rows": {"layout": PerTensor()},
    "Muon, overlapped": {
        "optimizer": Muon,
        "overlap": OverlapPolicy(),
        "layout": TensorAtomic(),
    },
}


def check_optimizers() -> None:
    for name, options in OPTIMIZERS.items():
        assert same_bits(None, **options), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_optimizer_refreshes_copies(world_size: int) -> None:
    run_ranks(check_optimizers, world_size)


def check_numbers() -> None:
    """Among them halves that round to even, denormal numbers, infinities and NaN."""
    bits = torch.arange(-(2**31), 2**31, 40961).to(torch.int32)
    values = bits.view(torch.float32)
    upper = bits.to(torch.int64) & 0xFFFFFFFF
    rounded = (upper + 0x7FFF + ((upper >> 16) & 1)) >> 16
    cast = values.to(torch.bfloat16)
    is_number = ~values.isnan()
    found = cast.view(torch.int16).to(torch.int64) & 0xFFFF
    assert torch.equal(found[is_number], rounded[is_number])
    assert cast[~is_number].isnan().all()


def test_the_host_rounds_to_the_nearest_even_as_devices_do() -> None:
    check_numbers()


def check_casts() -> None:
    casts: list[ComputeCopy] = []
    refresh = ComputeCopy.refresh

    def count(self: ComputeCopy, param_group: Any) -> None:
        before = self._version
        refresh(self, param_group)
        if self._version != before:
            casts.append(self)

    with patch.object(ComputeCopy, "refresh", count):
        for overlap in (None, OverlapPolicy(), OverlapPolicy(max_norm=0.1)):
            trained = Trained(overlap=overlap)
            for _ in range(2):
                trained.step()
            casts.clear()
            trained.step()
            with torch.no_grad():
                trained.forward()
                trained.forward()
            assert len(trained.copies) == len(trained.ctx.units)
            assert Counter(map(id, casts)) == dict.fromkeys(map(id, trained.copies), 2)


def test_a_shard_is_cast_once_after_each_edit() -> None:
    run_ranks(check_casts, 2)


def check_none() -> None:
    kept = (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.float32))
    for policy in kept:
        with pretending():
            model: Any = Model().float()
            ctx = FsdpContext()
            shard_layers(model, ctx, mp_policy=policy)
        model(torch.randint(VOCABULARY, (3, 5))).sum().backward()
        groups = [group for unit in ctx.units for group in unit.param_groups]
        assert all(group.compute_copy is None for group in groups)
    with pretending():
        model = Model().float()
        ctx = FsdpContext()
        shard_layers(model, ctx, mp_policy=LOW, comm_policy=QuantizedCommPolicy(torch.int8))
    model(torch.randint(VOCABULARY, (3, 5))).sum().backward()
    groups = [group for unit in ctx.units for group in unit.param_groups]
    assert all(group.compute_copy is None for group in groups)


def test_there_is_none_where_it_saves_nothing_or_something_else_than_a_cast_is_sent() -> None:
    run_ranks(check_none, 2)


def start_on_meta() -> None:
    with torch.device("meta"):
        model: Any = Model().float()
    with pretending():
        shard_layers(model, FsdpContext(), mp_policy=LOW)
    model.to_empty(device="cpu")
    found: list[torch.Tensor] = []

    def look(module: nn.Module, *_: object) -> None:
        found[:] = [parameter.detach().clone() for parameter in module.parameters()]

    model.layers[0].register_forward_hook(look)
    for value in (0.5, 0.25):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        model(torch.ones(1, 1, dtype=torch.int64))
        assert found
        assert all((weight == value).all() for weight in found)


def test_a_model_that_started_on_meta_has_copies_of_its_values() -> None:
    run_ranks(start_on_meta, 2)


# ---- on the emulated device ----


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_ranks(4):
        yield


def emulated(**options: Any) -> tuple[EmulatedDevice, list[int]]:
    """Return the device, and the bytes to it in a forward and a backward of the third step."""
    moved: list[int] = []

    def program() -> None:
        trained = Program(build=lambda: Model().float(), **options)
        trained.train(2)
        batch = trained.batch()
        before = active().copied_to_device
        loss = trained.forward(batch)
        middle = active().copied_to_device
        loss.backward()
        moved.extend((middle - before, active().copied_to_device - middle))
        trained.step()

    return run(program), moved


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("overlap", [None, OverlapPolicy()])
def test_half_the_bytes_travel_to_the_device(overlap: OverlapPolicy | None) -> None:
    _, others = emulated(shard_options={"mp_policy": LOW})  # which are not of shards
    device, moved = emulated(shard_options=OFFLOADED, optimizer_options={"overlap": overlap})
    with without_copies():
        _, before = emulated(shard_options=OFFLOADED, optimizer_options={"overlap": overlap})
    assert not device.findings
    for half, whole, rest in zip(moved, before, others, strict=True):
        assert 2 * (half - rest) == whole - rest > 0


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("mp_policy", [LOW, MixedPrecisionPolicy()])
def test_shards_and_copies_are_pinned_at_their_exact_sizes(
    mp_policy: MixedPrecisionPolicy,
) -> None:
    def program() -> None:
        trained = Program(
            build=lambda: Model().float(), shard_options={**OFFLOADED, "mp_policy": mp_policy}
        )
        with torch.no_grad():
            trained.forward()
        groups = [group for unit in trained.ctx.units for group in unit.param_groups]
        held = [group.shard for group in groups]
        held += [group.compute_copy.values for group in groups if group.compute_copy is not None]
        assert len(held) == len(groups) * (2 if mp_policy is LOW else 1)
        assert all(tensor.is_pinned() for tensor in held if tensor.numel())
        assert active().pinned == sum(tensor.nbytes for tensor in held)
        # Those of torch would take more.
        before = active().pinned
        others = [torch.empty_like(tensor, pin_memory=True) for tensor in held]
        assert active().pinned - before > sum(tensor.nbytes for tensor in others)

    run(program)


def test_pinned_memory_is_given_back_with_its_last_tensor() -> None:
    def program() -> None:
        memory = empty_pinned(1000, torch.float32, torch.device("emulated"))
        part = memory[10:20]
        del memory
        gc.collect()
        assert active().pinned == 4000
        part.zero_()
        del part
        gc.collect()
        assert active().pinned == 0

    assert not run(program).findings


def test_memory_that_cannot_be_pinned_is_said() -> None:
    def program() -> None:
        with (
            patch.object(EmulatedDevice, "pin", lambda *_: False),
            pytest.raises(RuntimeError, match=r"4000 bytes .* cannot be pinned .*pin_memory=False"),
        ):
            empty_pinned(1000, torch.float32, torch.device("emulated"))

    run(program)
