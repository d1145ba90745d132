"""Training on real ranks, on the emulated device: right values, and nothing left unordered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_overlap import PerTensor
from fsdp_overlap.layout import BlockAtomic, Flat, LayoutRule, TensorAtomic
from fsdp_overlap.optim import AdamW, Muon, OverlapPolicy, clip_grad_norm_
from fsdp_overlap.tools.emulator import EmulatedDevice, IssuedCollective, compare_issued, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND
from support.emulated_twins import Trained
from support.extensions import Same, with_matrices_of
from support.ranks import run_ranks
from support.twins import COPIES, Twins, layer_wise, same
from support.zoo import Model, shard_layers

LAYOUTS: dict[str, LayoutRule] = {
    "flat": Flat(),
    "blocks": BlockAtomic(rows=2),
    "whole": TensorAtomic(),
    "rows": PerTensor(),
}
DIVIDED: dict[str, Any] = {**COPIES, "shard_optimizer_over_replicas": True}
MUON: dict[str, Any] = {"optimizer": Muon, "ns_dtype": torch.double}

PROGRAMS: dict[int, dict[str, Callable[[], object]]] = {2: {}, 4: {}}
"""By the number of ranks."""


def layers(options: dict[str, Any], **twins: Any) -> Twins:
    """The plain model, sharded with ``options``."""
    return Trained(Model, partial(shard_layers, **options), **twins)


def train(name: str = "layers", steps: int = 2, **options: Any) -> None:
    Trained.of(name, **options).train(steps)


def train_and_gather() -> None:
    """As all others do, but compares whole parameters and gradients."""
    Twins.of("layers", device="emulated").train(2)


PROGRAMS[2]["whole tensors compared"] = train_and_gather


def train_with(options: dict[str, Any], **twins: Any) -> None:
    layers(options, **twins).train(2)


# Those whose gradients or passes are not plain; the order of all is looked at on one rank.
MODELS = (
    "nested units",
    "frozen and partly frozen units",
    "unused on some ranks",
    "skipped on some ranks",
    "views edited in place",
    "a layer that runs several times",
    "parameters tied across units",
    "checkpointed, reentrant",
    "checkpointed groups, reentrant",
    "odd parameters",
    "dynamic order",
)
for name in MODELS:
    # The last of them takes several passes to run the layers in each of its orders.
    PROGRAMS[2][f"the model of {name}"] = partial(train, name, 3 if name == "dynamic order" else 2)
for prefetch, layout in ((0, TensorAtomic()), (2, BlockAtomic(rows=2))):  # and 1 in all others
    PROGRAMS[2][f"prefetch {prefetch}"] = partial(train, prefetch=prefetch, layout=layout)
for name, layout in LAYOUTS.items():
    PROGRAMS[2][f"AdamW, {name}"] = partial(train, optimizer=AdamW, layout=layout)
    # Whole matrices need no exchange.
    PROGRAMS[2][f"Muon, {name}"] = partial(train, layout=layout, **MUON)


def at_stage(stage: int, starts: bool) -> None:
    twins = Trained.of("layers")
    twins.model.set_zero_stage(stage)
    for _ in range(2):
        for index, batch in enumerate(twins.batches(2)):
            twins.model.set_is_last_backward(index == 1)
            twins.backward(*batch)
        twins.check_gradients()
        twins.step()
        if starts:
            twins.ctx.start_param_sync()
    twins.check_parameters()


for stage, starts in ((1, True), (2, False), (2, True)):  # all six are looked at on one rank
    PROGRAMS[2][f"stage {stage}, starts gathers: {starts}"] = partial(at_stage, stage, starts)


def accumulates(verb: str, **options: Any) -> None:
    """And clips what it has accumulated."""
    twins = Trained.of("layers", **options)
    for step in range(2):
        for index, batch in enumerate(twins.batches(2)):
            getattr(twins.model, verb)(index == 1)
            twins.backward(*batch)
        twins.check_gradients()
        clip: Any = clip_grad_norm_ if step else nn.utils.clip_grad_norm_
        norm = clip(twins.model.parameters(), 0.1)
        same(norm, nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1), "norm")
        twins.check_gradients()
        twins.check_rest()
        twins.step()
        twins.check_parameters()


PROGRAMS[2]["accumulation"] = partial(accumulates, "set_requires_gradient_sync")
PROGRAMS[2]["accumulation, ragged"] = partial(
    accumulates, "set_requires_gradient_sync", layout=TensorAtomic()
)
for name, options in {"copies": COPIES, "divided copies": DIVIDED}.items():
    for verb in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        PROGRAMS[4][f"accumulation, {name}, {verb}"] = partial(accumulates, verb, **options)
    PROGRAMS[4][name] = partial(train, **options)
    PROGRAMS[4][f"{name}, ragged"] = partial(train, layout=TensorAtomic(), **options)
    PROGRAMS[4][f"{name}, Muon"] = partial(train, layout=BlockAtomic(rows=2), **options, **MUON)


def extensions(options: dict[str, Any], **twins: Any) -> None:
    build = partial(with_matrices_of, Same, Model)
    Trained(build, partial(shard_layers, **options), layout=PerTensor(), **twins).train(3)


for ranks, meshes in ((2, {}), (4, COPIES)):
    PROGRAMS[ranks]["extensions"] = partial(extensions, {}, **meshes)
    PROGRAMS[ranks]["extensions, kept"] = partial(
        extensions, {"reshard_after_forward": False}, **meshes
    )
PROGRAMS[2]["extensions, offloaded"] = partial(extensions, {"offload_policy": CPUOffloadPolicy()})


def reduced_in_float32(**twins: Any) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    trained = layers({"mp_policy": policy}, **twins)
    for _ in range(2):
        trained.backward(*next(trained.batches(1)))
    for (name, parameter), twin in trained.pairs():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.double, name
        assert twin.grad is not None
        whole = parameter.grad.full_tensor()
        expected = twin.grad.to(whole.device)
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)


for name, options in {"copies": COPIES, "divided copies": DIVIDED}.items():
    PROGRAMS[4][f"{name}, reduced in float32"] = partial(reduced_in_float32, **options)
PROGRAMS[2]["reduced in float32"] = reduced_in_float32
for name, layout in LAYOUTS.items():
    PROGRAMS[4][f"parts kept, {name}"] = partial(
        train_with, {"reshard_after_forward": 2}, layout=layout
    )
PROGRAMS[4]["Muon, exchanged"] = partial(train, layout=BlockAtomic(rows=2), **MUON)
PROGRAMS[2]["kept until backward"] = partial(train_with, {"reshard_after_forward": False})
OFFLOADED: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
for name, options in {
    "AdamW": {"optimizer": AdamW},
    "torch's AdamW": {},
    "ragged": {"layout": TensorAtomic()},
    "Muon": MUON,
}.items():
    PROGRAMS[2][f"offloaded, {name}"] = partial(train_with, OFFLOADED, **options)
PROGRAMS[4]["offloaded, copies"] = partial(train_with, OFFLOADED, **COPIES)


def overlapped(policy: OverlapPolicy, **options: Any) -> None:
    """Gradients are used before they can be compared."""
    trained = layers(OFFLOADED, overlap=policy, **options)
    trained.twin_optimizer.overlapped = None
    for _ in range(4):
        trained.backward(*next(trained.batches(1)))
        if policy.max_norm is not None:
            nn.utils.clip_grad_norm_(trained.twin.parameters(), policy.max_norm)
        trained.step()
        trained.check_parameters()


for name, policy in {
    "in backward": OverlapPolicy(buffer_bytes=1000),
    "clipped": OverlapPolicy(max_norm=0.1),
}.items():
    PROGRAMS[2][f"overlapped {name}, AdamW"] = partial(overlapped, policy, optimizer=AdamW)
    PROGRAMS[2][f"overlapped {name}, Muon"] = partial(
        overlapped, policy, layout=TensorAtomic(), **MUON
    )
    PROGRAMS[2][f"overlapped {name}, LayerWise"] = partial(
        overlapped,
        policy,
        layout=TensorAtomic(),
        optimizer=layer_wise,
        factory=torch.optim.AdamW,
    )
    PROGRAMS[4][f"overlapped {name}, divided copies"] = partial(
        overlapped, policy, optimizer=AdamW, **DIVIDED
    )


def state_dicts() -> None:
    """Of a model and its optimizer, whole and sharded, into other layouts."""
    saved = Trained.of("layers", optimizer=AdamW)
    saved.train(1)
    whole = StateDictOptions(full_state_dict=True)
    model = get_model_state_dict(saved.model, options=whole)
    optimizer = get_optimizer_state_dict(saved.model, saved.optimizer, options=whole)
    loaded = Trained.of("layers", optimizer=AdamW, layout=TensorAtomic())
    set_model_state_dict(loaded.model, model, options=whole)
    set_optimizer_state_dict(loaded.model, loaded.optimizer, optimizer, options=whole)
    saved.model.load_state_dict(saved.model.state_dict())
    for tokens, targets in saved.batches(2):
        for twins in (saved, loaded):
            twins.losses(tokens, targets)[0].backward()
            twins.optimizer.step()
            twins.optimizer.zero_grad()
    for one, other in zip(saved.model.parameters(), loaded.model.parameters(), strict=True):
        same(one.full_tensor(), other.full_tensor(), "loaded")  # type: ignore[attr-defined]


PROGRAMS[2]["state dicts"] = state_dicts


def none_where_a_unit_did_not_run() -> None:
    """And zeros where it did: to know that no rank has a gradient would take waiting."""
    twins = Trained.of("unused parameters")
    twins.backward(*next(twins.batches(1)))
    never_ran = list(twins.model.layers[3].parameters())
    assert all(parameter.grad is None for parameter in never_ran)
    spare = twins.model.layers[1].spare
    assert not spare.grad.full_tensor().any()
    same(spare.grad.full_tensor(), torch.zeros_like(spare.grad.full_tensor()), "spare")


def copied_twice() -> None:
    """With its optimizer, and with gradients that the next step takes. torch copies what the first
    copy consists of."""
    twins = Trained.of("layers", optimizer=AdamW, layout=PerTensor())
    twins.train(1)
    for _ in range(2):
        twins.backward(*next(twins.batches(1)))
        twins.model, twins.optimizer = copy.deepcopy((twins.model, twins.optimizer))
        twins.step()
        twins.check_parameters()


PROGRAMS[2]["copied twice"] = copied_twice


def whole_rows() -> None:
    """torch gathers them by a functional collective, and is to wait for what it brings."""
    twins = Twins.of("layers", device="emulated", layout=PerTensor())
    expected = {name: tensor.clone() for name, tensor in twins.twin.state_dict().items()}
    for name, tensor in twins.model.state_dict().items():
        same(tensor.full_tensor(), expected[name], name)


PROGRAMS[2]["whole tensors of rows"] = whole_rows
PROGRAMS[2]["gradients of nothing"] = none_where_a_unit_did_not_run


def run_all(only: str = "") -> dict[str, tuple[list[str], list[IssuedCollective]]]:
    """What the model found in each program, and what this rank issued there."""
    seen = {}
    for name, program in PROGRAMS[dist.get_world_size()].items():
        if only in name:
            with running(EmulatedDevice()) as device:
                try:
                    program()
                except Exception as error:
                    error.add_note(f"in {name!r}")
                    raise
            seen[name] = list(dict.fromkeys(map(str, device.findings))), device.issued
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("world_size", PROGRAMS)
def test_training_equals_unsharded_training_and_all_of_it_is_ordered(world_size: int) -> None:
    ranks = run_ranks(run_all, world_size, backend=BACKEND, timeout=300)
    for name in PROGRAMS[world_size]:
        seen = [rank[name] for rank in ranks]
        assert [found for found, _ in seen] == [[]] * world_size, name
        assert all(issued for _, issued in seen), name
        assert compare_issued([issued for _, issued in seen]) is None, name
