"""Programs of training on the emulated device, one for each way in which a model can be trained."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_overlap import FsdpContext, PerTensor, QuantizedCommPolicy, fully_shard
from fsdp_overlap.checkpoint import ShardStager
from fsdp_overlap.engine import grads
from fsdp_overlap.features.desync_monitor import DesyncMonitor
from fsdp_overlap.layout import BlockAtomic, Flat, LayoutRule, TensorAtomic
from fsdp_overlap.layout import plan as planner
from fsdp_overlap.optim import AdamW, LayerWise, Muon, OverlapPolicy, clip_grad_norm_, exchange
from fsdp_overlap.tools.emulator import Stream, current_stream, fake_ranks, stream
from fsdp_overlap.weights import WeightResharder, export_weights, save, save_weights
from fsdp_overlap.weights import exchange as weights_exchange
from support.emulated import Program, trained
from support.experts import ROWS, WIDTH, Moe
from support.extensions import Rounded, with_matrices_of
from support.nccl_like import chosen_as_for_nccl
from support.tensor_parallel import LENGTH, WORDS, Transformer, loss_of, parallelize, shard
from support.zoo import ZOO, Model

LAYOUTS: dict[str, LayoutRule] = {
    "flat": Flat(),
    "blocks": BlockAtomic(rows=2),
    "whole": TensorAtomic(),
}
LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OFFLOAD = {"offload_policy": CPUOffloadPolicy()}

MODES: dict[str, Callable[[], object]] = {}


def mode(program: Callable[[], object]) -> Callable[[], object]:
    MODES[program.__name__.replace("_", " ")] = program
    return program


@mode
def muon_in_rounds() -> None:
    with patch.object(exchange, "ACCELERATOR_ROUND_ELEMENTS", 60):
        for dims in ((4,), (2, 2)):  # matrices that are cut, and copies of whole ones
            Program(dims=dims, optimizer=Muon, build=partial(Model, layers=6)).train(1)


def as_nccl(program: Callable[[], object]) -> None:
    with chosen_as_for_nccl():
        program()


for name in ZOO:
    if name != "without a context":  # whose mesh is that of all ranks
        MODES[f"the model of {name}"] = trained(name=name)
for prefetch in (0, 1, 2):
    for name, layout in LAYOUTS.items():
        MODES[f"prefetch {prefetch}, {name}"] = trained(prefetch=prefetch, layout=layout)
for name, layout in LAYOUTS.items():
    for optimizer in (Muon, torch.optim.AdamW, torch.optim.SGD):
        title = f"{optimizer.__module__.split('.')[0]} {optimizer.__name__}, {name}"
        MODES[title] = trained(optimizer=optimizer, layout=layout)
MODES["one launch, odd parameters"] = partial(as_nccl, trained(name="odd parameters"))
for title, layout in {"flat": Flat(), "rows": PerTensor()}.items():
    MODES[f"one launch, frozen parameters, {title}"] = partial(
        as_nccl, trained(name="frozen and partly frozen units", layout=layout)
    )
MODES["one launch, ragged"] = partial(as_nccl, trained(layout=TensorAtomic()))
MODES["prefetch 1, rows"] = trained(layout=PerTensor())
MODES["Muon, rows"] = trained(optimizer=Muon, layout=PerTensor())


def layer_wise(model: nn.Module, lr: float, **options: Any) -> LayerWise:
    return LayerWise(model, partial(torch.optim.Muon, lr=lr), **options)


@mode
def layer_wise_in_rounds() -> None:
    with patch.object(exchange, "ACCELERATOR_ROUND_ELEMENTS", 60):
        for dims in ((4,), (2, 2)):
            Program(dims=dims, optimizer=layer_wise).train(1)


@mode
def layer_wise_that_raised() -> None:
    """New tensors get the memory of buffers that exchanges under way may still use."""
    left = 0

    class Raising(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nonlocal left
            left -= 1
            if not left:
                raise ArithmeticError("planned")
            return super().step(closure)

    def layer_wise(model: nn.Module, lr: float) -> LayerWise:
        return LayerWise(model, partial(Raising, lr=lr))

    with patch.object(exchange, "ACCELERATOR_ROUND_ELEMENTS", 60):
        for steps in (1, 2):
            program: Any = Program(optimizer=layer_wise)
            program.train(1)
            program.backward()
            left = steps
            with suppress(ArithmeticError):
                program.optimizer.step()
            assert not left
            gc.collect()
            for size in range(8, 400, 4):
                program.kept = [torch.zeros(size, device="emulated") for _ in range(3)]


@mode
def layer_wise_loaded_before_a_step() -> None:
    """Offloaded: states lie where matrices are stepped."""
    options: Any = {"optimizer": layer_wise, "shard_options": dict(OFFLOAD)}
    trained_one = Program(**options)
    trained_one.train(1)
    loaded = Program(**options)
    # Of this rank alone: ranks that are not there have nothing to send.
    own = torch.optim.Optimizer.state_dict(trained_one.optimizer)
    loaded.optimizer.load_state_dict(copy.deepcopy(own))
    loaded.train(1)


for name, layout in {**LAYOUTS, "rows": PerTensor()}.items():
    MODES[f"layer-wise, {name}"] = trained(optimizer=layer_wise, layout=layout)
MODES["layer-wise, copies"] = trained(optimizer=layer_wise, dims=(2, 2))
MODES["layer-wise, offloaded"] = trained(optimizer=layer_wise, shard_options=dict(OFFLOAD))
for dims in ((2, 2), (4, 1), (1, 4)):
    for divides in (False, True):
        for dtype in (None, torch.float64):
            MODES[f"copies {dims}, divided {divides}, reduced in {dtype}"] = trained(
                dims=dims, shard_optimizer_over_replicas=divides, reduce_dtype=dtype
            )
MODES["copies, ragged"] = trained(dims=(2, 2), layout=TensorAtomic())
MODES["divided copies, ragged"] = trained(
    dims=(2, 2), layout=TensorAtomic(), shard_optimizer_over_replicas=True
)
MODES["parts kept"] = trained(shard_options={"reshard_after_forward": 2})
MODES["parts kept, ragged"] = trained(
    shard_options={"reshard_after_forward": 2}, layout=TensorAtomic()
)
MODES["kept between forward and backward"] = trained(shard_options={"reshard_after_forward": False})
for name, layout in {**LAYOUTS, "rows": PerTensor()}.items():
    MODES[f"gathered in 8 bits, {name}"] = trained(
        shard_options={"comm_policy": QuantizedCommPolicy(torch.float8_e4m3fn)}, layout=layout
    )
for name, layout in {"flat": Flat(), "rows": PerTensor()}.items():
    for codes in (torch.float8_e5m2, torch.bfloat16):
        MODES[f"reduced in {codes}, {name}"] = trained(
            shard_options={"comm_policy": QuantizedCommPolicy(reduce_dtype=codes)}, layout=layout
        )
MODES["gathered in 8 bits, offloaded"] = trained(
    shard_options={"comm_policy": QuantizedCommPolicy(torch.int8), **OFFLOAD}
)


EXTENSIONS: dict[str, Any] = {
    "build": partial(with_matrices_of, Rounded, Model),
    "layout": PerTensor(),
}
MODES["extensions"] = trained(**EXTENSIONS)
MODES["extensions with copies"] = trained(**EXTENSIONS, dims=(2, 2))
MODES["extensions, offloaded"] = trained(**EXTENSIONS, shard_options=dict(OFFLOAD))
MODES["extensions in bfloat16, kept"] = trained(
    **EXTENSIONS, shard_options={"mp_policy": LOW, "reshard_after_forward": False}
)
MODES["in bfloat16"] = trained(shard_options={"mp_policy": LOW})
MODES["offloaded"] = trained(shard_options=dict(OFFLOAD))
MODES["offloaded, torch's AdamW"] = trained(
    shard_options=dict(OFFLOAD), optimizer=torch.optim.AdamW
)
MODES["offloaded, Muon"] = trained(shard_options=dict(OFFLOAD), optimizer=Muon)
OVERLAPS = {
    "in backward": OverlapPolicy(),
    "in little memory": OverlapPolicy(buffer_bytes=0),
    "clipped": OverlapPolicy(max_norm=0.1),
    "clipped by the norm before": OverlapPolicy(max_norm=0.1, use_previous_norm=True),
}
for name, policy in OVERLAPS.items():
    for optimizer in (AdamW, Muon, layer_wise):
        for kind, options in {
            "flat": {},
            "whole": {"layout": TensorAtomic()},
            "divided": {"dims": (2, 2), "shard_optimizer_over_replicas": True},
            "skips": {"name": "skips in a list"},
            "kept": {"name": "checkpointed"},
        }.items():
            MODES[f"{optimizer.__name__} overlapped {name}, {kind}"] = trained(
                optimizer=optimizer,
                optimizer_options={"overlap": policy},
                shard_options=dict(OFFLOAD),
                **options,
            )
LOW_OFFLOADED: dict[str, Any] = {"mp_policy": LOW, **OFFLOAD}
for kind, options in {
    "flat": {},
    "rows": {"layout": PerTensor()},
    "whole": {"layout": TensorAtomic()},
    "copies": {"dims": (2, 2)},
    "divided": {"dims": (2, 2), "shard_optimizer_over_replicas": True},
    "overlapped": {"optimizer_options": {"overlap": OverlapPolicy()}},
    "overlapped, clipped": {"optimizer_options": {"overlap": OverlapPolicy(max_norm=0.1)}},
    "overlapped, Muon": {"optimizer": Muon, "optimizer_options": {"overlap": OverlapPolicy()}},
}.items():
    MODES[f"offloaded in bfloat16, {kind}"] = trained(shard_options=dict(LOW_OFFLOADED), **options)
MODES["offloaded in bfloat16, parts kept"] = trained(
    shard_options={"reshard_after_forward": 2, **LOW_OFFLOADED}
)
MODES["offloaded, not pinned"] = trained(
    shard_options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}
)


def in_pieces(program: Callable[[], object]) -> None:
    """With a first unit of several pieces, small as it is."""
    with patch.object(planner, "MIN_SHARD_BYTES", 1):
        program()


MODES["in pieces"] = partial(in_pieces, trained())
MODES["in pieces, copies"] = partial(in_pieces, trained(dims=(2, 2)))
MODES["in pieces, rows"] = partial(in_pieces, trained(layout=PerTensor()))


def stepped_twice() -> None:
    program = Program(optimizer_options={"prefetch_next_forward": True})
    for _ in range(2):
        program.backward()
        program.optimizer.step()
        program.step()


def stepped_unsharded() -> None:
    """A unit is unsharded by hand, and what was gathered for the next forward is freed unread."""
    program = Program(optimizer_options={"prefetch_next_forward": True}, prefetch=2)
    for _ in range(3):
        program.backward()
        program.optimizer.step()
    program.model.unshard()
    program.optimizer.step()


def finalized_before_a_wait() -> None:
    """What was gathered before gradients are finalized is freed unread, the last of it first."""
    program = Program(prefetch=2)
    program.train(2)
    program.model.set_manual_backward_finalization(True)
    program.backward()
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.mul_(0.5)
    program.ctx.start_param_sync()
    program.model.finalize_backward()
    program.step()


MODES["stepped twice"] = stepped_twice
MODES["stepped while unsharded by hand"] = stepped_unsharded
MODES["finalized before a wait"] = finalized_before_a_wait
for optimizer in (AdamW, Muon):
    MODES[f"{optimizer.__name__} gathers for the next forward"] = trained(
        optimizer=optimizer, optimizer_options={"prefetch_next_forward": True}
    )


def at_stage(stage: int, starts: bool) -> None:
    program = Program()
    program.model.set_zero_stage(stage)
    for _ in range(3):
        for is_last in (False, True):
            program.model.set_is_last_backward(is_last)
            program.backward()
        program.step()
        if starts:
            program.ctx.start_param_sync()


for stage in (1, 2, 3):
    for starts in (False, True):
        MODES[f"stage {stage}, starts gathers: {starts}"] = partial(at_stage, stage, starts)


def accumulates(dims: tuple[int, ...], verb: str, **options: Any) -> None:
    program = Program(dims=dims, **options)
    for _ in range(3):
        for is_last in (False, False, True):
            getattr(program.model, verb)(is_last)
            program.backward()
        clip_grad_norm_(program.model.parameters(), 1.0)
        program.step()


MODES["accumulation"] = partial(accumulates, (4,), "set_requires_gradient_sync")
MODES["accumulation, copies"] = partial(accumulates, (2, 2), "set_requires_gradient_sync")
MODES["accumulation among shards"] = partial(accumulates, (2, 2), "set_requires_all_reduce")
MODES["accumulation among shards, divided"] = partial(
    accumulates, (2, 2), "set_requires_all_reduce", shard_optimizer_over_replicas=True
)


def kept_in_bfloat16(**options: Any) -> None:
    program = Program(reduce_dtype=torch.float32, **options)
    for parameter in program.model.parameters():
        parameter.grad_dtype = torch.bfloat16
    for _ in range(3):
        for is_last in (False, True):
            program.model.set_requires_gradient_sync(is_last)
            program.backward()
        clip_grad_norm_(program.model.parameters(), 1.0)
        program.step()


MODES["gradients kept in bfloat16"] = kept_in_bfloat16
MODES["gradients kept in bfloat16, rows"] = partial(kept_in_bfloat16, layout=PerTensor())
MODES["gradients kept in bfloat16, copies"] = partial(kept_in_bfloat16, dims=(2, 2))
MODES["gradients kept in bfloat16, offloaded"] = partial(
    kept_in_bfloat16, shard_options=dict(OFFLOAD)
)


@mode
def large_gradients_leave_at_once() -> None:
    with patch.object(grads, "LARGE_BYTES", 0):
        Program(prefetch=0).train()
        Program(dims=(2, 2), name="a layer that runs several times").train()


@mode
def many_units_with_copies() -> None:
    Program(build=lambda: Model(layers=8), dims=(2, 2), reduce_dtype=torch.float64).train()


@mode
def edits_after_an_evaluation_of_offloaded_weights() -> None:
    program = Program(shard_options=dict(OFFLOAD))
    with torch.no_grad():
        for _ in range(3):
            program.forward()
            for parameter in program.model.parameters():
                parameter.zero_()


@mode
def edits_of_offloaded_weights_that_are_gathered_ahead() -> None:
    """The next unit's, which is gathered again, while the first gather may still read its copy."""
    program = Program(shard_options=dict(LOW_OFFLOADED))
    following = list(program.model.layers[1].parameters())

    def edit(*_: object) -> None:
        with torch.no_grad():
            for parameter in following:
                parameter.mul_(0.5)

    program.model.layers[0].register_forward_hook(edit)
    with torch.no_grad():
        for _ in range(3):
            program.forward()


@mode
def evaluation_between() -> None:
    program = Program(name="branches")
    for _ in range(3):
        program.train(1)
        with torch.no_grad():
            program.forward()


@mode
def storage_kept() -> None:
    program = Program()
    program.model.set_keep_unsharded_storage(True)
    program.train()


@mode
def forwards_without_edits() -> None:
    """On streams of their own, so that nothing but a gather's buffer leads from one to the next."""
    program = Program()
    for _ in range(4):
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            program.forward()


@mode
def forwards_without_edits_with_storage_kept() -> None:
    program = Program()
    program.model.set_keep_unsharded_storage(True)
    with torch.no_grad():
        for _ in range(4):
            program.forward()


@mode
def gradients_of_gradients() -> None:
    program = Program()
    for _ in range(3):
        tokens, _ = program.batch()
        scores = program.model(tokens)
        (first,) = torch.autograd.grad(scores.square().sum(), scores, create_graph=True)
        (scores.sum() + first.square().sum()).backward()
        program.step()


@mode
def backward_that_creates_a_graph() -> None:
    program = Program()
    for _ in range(3):
        program.forward().backward(create_graph=True)
        program.step()


@mode
def finalized_by_hand() -> None:
    program = Program()
    program.model.set_manual_backward_finalization(True)
    for _ in range(3):
        program.backward()
        program.model.finalize_backward(async_op=True).wait()
        program.step()


@mode
def finalized_by_hand_after_two_backwards() -> None:
    for size in (0, grads.LARGE_BYTES):
        with patch.object(grads, "LARGE_BYTES", size):
            program = Program(build=lambda: Model(layers=1))
            program.model.set_manual_backward_finalization(True)
            for _ in range(3):
                program.backward()
                program.backward()
                program.model.finalize_backward(async_op=True).wait()
                program.step()


@mode
def a_kept_parameter_read_beside_the_optimizer() -> None:
    program, side = Program(), Stream()
    program.model.set_zero_stage(2)
    for _ in range(3):
        program.backward()
        side.wait_stream(current_stream())
        with stream(side):
            program.step()
        for unit in program.ctx.units:
            for parameter in unit.param_groups[0].parameters:
                parameter.detach().sum()
        program.model.set_post_optim_event(side.record_event())


@mode
def prefetched_by_hand() -> None:
    program = Program()
    layers = program.model.layers
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers[index + 1 : index + 3]))
        layer.set_modules_to_backward_prefetch(list(layers[max(index - 2, 0) : index]))
    program.train()


@mode
def unsharded_by_hand() -> None:
    program = Program()
    for _ in range(3):
        handle = program.model.layers[1].unshard(async_op=True)
        program.forward()
        assert handle is not None
        handle.wait()
        program.model.layers[1].reshard()
        program.train(1)


class ReadsLayer(Model):
    """Reads the weight of a layer that it does not run."""

    layers: Any

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.layers[1].unshard()
        penalty = self.layers[1].up.weight.square().sum()
        x = self.layers[2](self.layers[0](self.embedding(tokens)))
        return self.head(x) + penalty


@mode
def read_by_hand() -> None:
    program = Program(build=ReadsLayer)
    program.model.set_reshard_after_backward(False, recurse=False)
    program.train(1)
    for _ in range(3):  # gathers wait for no edit
        program.backward()
    assert program.ctx.stats.current_full_buffers == 1  # the root's


def alike(mine: Any, group: dist.ProcessGroup, *_: Any) -> list[Any]:
    """Return what ranks that are not there would tell: all the same as this one."""
    return [mine] * group.size()


def exported(ranks: list[int] | None, prefetch: int) -> None:
    program = Program()
    with (
        patch.object(weights_exchange, "gather_objects", alike),
        patch.object(weights_exchange, "all_equal", lambda *_: True),  # without a wait of the host
    ):
        for _ in range(2):
            program.train(1)
            pieces = export_weights(program.model, ranks=ranks, prefetch=prefetch, piece_bytes=300)
            kept = [weight for _, weight in pieces]

            def use_and_free(*_: object, kept: list[torch.Tensor] = kept) -> None:
                for weight in kept:
                    weight.add_(1)
                kept.clear()

            # Gathers of the units that follow may take this memory.
            hook = program.model.layers[0].register_forward_hook(use_and_free)
            program.train(1)
            hook.remove()
            for number, (_, weight) in enumerate(
                export_weights(program.model, ranks=ranks, prefetch=prefetch, piece_bytes=300)
            ):
                weight.mul_(2)
                if number == 2:  # more of this shard is on its way
                    break
            with torch.no_grad():
                for parameter in program.model.parameters():
                    parameter.mul_(0.5)
            program.train(1)


for prefetch in (0, 2):
    MODES[f"weights exported, prefetch {prefetch}"] = partial(exported, None, prefetch)
    MODES[f"weights exported to one rank, prefetch {prefetch}"] = partial(exported, [0], prefetch)
    MODES[f"weights exported to another, prefetch {prefetch}"] = partial(exported, [3], prefetch)


@mode
def weights_put_into_a_model_that_gathers_ahead() -> None:
    program = Program(optimizer_options={"prefetch_next_forward": True})
    whole = {n: torch.ones(p.shape, device="emulated") for n, p in program.model.named_parameters()}

    def tell(found: list[str], mine: str, group: Any) -> None:
        found[:] = [mine] * len(found)

    with (
        patch.object(weights_exchange, "gather_objects", alike),
        patch("torch.distributed.all_gather_object", tell),
    ):
        resharding = WeightResharder(whole, program.model, piece_bytes=300)
        for _ in range(2):
            program.train(2)
            for weight in whole.values():
                weight.mul_(0.5)
            resharding.run()
            for weight in whole.values():
                weight.add_(1)
    program.train(1)


def written(value: Any, name: str = "") -> Iterator[None]:
    """Take what is staged as a writer does, a piece each time."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from written(each, f"{name}.{key}")
    elif isinstance(value, DTensor):
        for item in value.__create_write_items__(name, value):  # type: ignore[no-untyped-call]
            value.__get_tensor_shard__(item.index).add_(1)  # type: ignore[no-untyped-call]
            yield


def saved_beside_training(room: int, **options: Any) -> None:
    """``room``: for how many bytes of copies that are made ahead. The writer takes a few pieces
    before the optimizer's step, and the others after it."""
    program = Program(**options)
    program.train(2)
    stager = ShardStager(room)
    for _ in range(2):
        staged = stager.stage(
            {"model": program.model.state_dict(), "optimizer": program.optimizer.state_dict()}
        )
        pieces = written(staged.result())
        program.backward()
        for _ in range(4):
            next(pieces)
        stager._buffers.max_bytes = 1 << 20  # else the step would wait for a writer in vain
        program.step()
        program.backward()
        assert len(list(pieces)) > 10
        stager._buffers.max_bytes = room
        program.step()


MODES["saved beside training"] = partial(saved_beside_training, 0)
MODES["saved beside training, copied ahead"] = partial(saved_beside_training, 1 << 20)
MODES["saved beside training, some copied ahead"] = partial(saved_beside_training, 600)
MODES["saved beside training, Muon"] = partial(saved_beside_training, 600, optimizer=Muon)
MODES["saved beside training, divided"] = partial(
    saved_beside_training, 600, dims=(2, 2), shard_optimizer_over_replicas=True
)
MODES["saved beside training, rows"] = partial(saved_beside_training, 600, layout=PerTensor())
MODES["saved beside training, offloaded"] = partial(
    saved_beside_training, 600, shard_options=dict(OFFLOAD)
)


@mode
def saved_by_a_thread() -> None:
    """As an asynchronous save is. Its current device is the first one."""
    program = Program()
    program.train(2)
    staged = ShardStager(0).stage({"optimizer": program.optimizer.state_dict()})
    taken = ThreadPoolExecutor(1).submit(lambda: list(written(staged.result())))
    assert len(taken.result()) > 10
    program.train(1)


@mode
def peeked_by_a_thread() -> None:
    """As the checksums of what other ranks write are made."""
    program = Program()
    program.train(2)
    staged = ShardStager().stage({"model": program.model.state_dict()})

    def peek() -> None:
        for name, value in staged.result()["model"].items():
            for item in value.__create_write_items__(name, value):
                value.peek(item.index)

    ThreadPoolExecutor(1).submit(peek).result()
    program.train(1)


@mode
def watched_for_hangs() -> None:
    program, polled = Program(), threading.Event()
    program.train(1)
    context = program.ctx

    class Monitor(DesyncMonitor):
        def poll(self) -> None:
            super().poll()
            polled.set()

    streams = partial(getattr, context.comm_context, "comm_streams")
    monitor = Monitor(context.device, streams, context.error_monitor, 0.5, bool)
    assert polled.wait(10)
    monitor.end()
    program.train(1)


@mode
def weights_saved_on_another_stream() -> None:
    """A thread writes them, which has a stream of its own."""
    program = Program()
    program.train(2)
    side = Stream()
    side.wait_stream(current_stream())
    to_bytes = save.bytes_of

    def read(values: torch.Tensor) -> Any:
        values.clone()  # which the device sees, unlike a read by address
        return to_bytes(values)

    with (
        TemporaryDirectory() as folder,
        stream(side),
        patch.object(save, "_SLOT_BYTES", 64),
        patch.object(save, "bytes_of", read),
    ):
        save_weights(program.model, folder)
    current_stream().wait_stream(side)
    program.train(1)


@mode
def a_save_that_failed() -> None:
    program = Program()
    program.train(2)
    staged = ShardStager().stage({"optimizer": program.optimizer.state_dict()}).result()
    with pytest.raises(RuntimeError, match="needs async_checkpointer_type"):
        pickle.dumps(staged)
    program.optimizer.state.clear()  # the next step takes its memory
    program.train(1)


@mode
def state_dicts_and_edits() -> None:
    program = Program()
    program.train(2)
    whole = {name: value.full_tensor() for name, value in program.model.state_dict().items()}
    assert whole
    program.model.load_state_dict(program.model.state_dict())
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.mul_(0.5)
            parameter.to_local().add_(1.0)
    program.train(2)


@mode
def the_optimizer_on_a_stream_of_its_own() -> None:
    program, side = Program(), Stream()
    for _ in range(3):
        program.backward()
        side.wait_stream(current_stream())
        with stream(side):
            program.step()
        program.model.set_post_optim_event(side.record_event())


@mode
def an_edit_past_the_event() -> None:
    """Also of a single range, by the tensor that lies in it."""
    program = Program()
    for _ in range(3):
        program.backward()
        program.step()
        program.model.set_post_optim_event(current_stream().record_event())
        with torch.no_grad():
            for parameter in program.model.parameters():
                parameter.to_local().mul_(0.5)


@mode
def an_edit_in_the_middle_of_a_pass() -> None:
    program = Program()
    later = list(program.model.layers[-1].parameters())

    def edit(*_: object) -> None:
        with torch.no_grad():
            for parameter in later:
                parameter.to_local().mul_(0.5)

    program.model.layers[0].register_forward_hook(edit)
    with torch.no_grad():
        for _ in range(3):
            program.forward()


@mode
def training_on_another_stream() -> None:
    program, side = Program(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        program.train()


@mode
def a_forward_on_another_stream() -> None:
    program, side = Program(), Stream()
    for _ in range(3):
        side.wait_stream(current_stream())
        with stream(side):
            loss = program.forward()
        loss.backward()
        program.step()


@mode
def hooks_on_another_stream() -> None:
    program, side = Program(), Stream()
    program.model.set_all_reduce_hook(lambda reduced: reduced.mul_(1.0), stream=side)
    program.train()


def parallel(**options: Any) -> None:
    mesh = init_device_mesh("emulated", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(Transformer().to("emulated"), mesh["tp"])
    shard(model, FsdpContext(mesh["dp"]), **options)
    optimizer = AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        tokens, targets = torch.randint(WORDS, (2, 3, LENGTH), device="emulated")
        loss_of(model, tokens, targets).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def on_fake_groups(program: Callable[..., object], *args: Any, **options: Any) -> None:
    """Functional collectives need a process group of C++."""
    with fake_ranks(4, "cpu:fake,emulated:fake"):
        program(*args, **options)


MODES["tensor parallelism"] = partial(on_fake_groups, parallel)
MODES["tensor parallelism in bfloat16"] = partial(on_fake_groups, parallel, mp_policy=LOW)


def experts(layout: LayoutRule, with_dtensors: bool) -> None:
    whole = init_device_mesh("emulated", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("emulated", (2, 2), mesh_dim_names=("shard", "ep"))
    with torch.device("emulated"):
        model = Moe(grid["ep"], with_dtensors)
    ctx = FsdpContext(whole, layout=layout)
    for layer in model:
        fully_shard(layer.experts, ctx, mesh=grid["shard"])
        fully_shard(layer, ctx)
    fully_shard(model, ctx)
    optimizer = AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH, dtype=torch.double, device="emulated")
        model(x).square().mean().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


MODES["experts"] = partial(on_fake_groups, experts, Flat(), False)
MODES["experts as DTensors"] = partial(on_fake_groups, experts, Flat(), True)


class PlannedError(Exception):
    pass


def fail(*_: object) -> None:
    raise PlannedError


@mode
def a_forward_that_raised_and_a_reset() -> None:
    program = Program()
    program.train(2)
    hook = program.model.layers[1].register_forward_hook(fail)
    with pytest.raises(PlannedError):
        program.forward()
    hook.remove()
    program.ctx.reset()
    program.train(2)


@mode
def an_edit_after_a_forward_that_raised_over_divided_copies() -> None:
    """Some units did not run, so nobody read what was put together of their shards."""
    program = Program(dims=(2, 2), shard_optimizer_over_replicas=True)
    program.train(2)
    hook = program.model.layers[0].register_forward_hook(fail)
    with pytest.raises(PlannedError):
        program.forward()
    hook.remove()
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.zero_()
    program.ctx.reset()
    program.train(2)


@mode
def a_backward_that_raised_and_a_reset() -> None:
    program = Program(dims=(2, 2))
    program.train(2)
    hook = program.model.layers[0].register_full_backward_hook(fail)
    with pytest.raises(PlannedError):
        program.backward()
    hook.remove()
    program.ctx.reset()
    program.model.layers[2].unshard()
    program.model.zero_grad()
    program.train(2)


@mode
def a_hook_of_reductions_that_raised_and_a_reset() -> None:
    program = Program(dims=(2, 2), reduce_dtype=torch.float64)
    program.train(2)
    program.model.layers[1].set_all_reduce_hook(fail)
    with pytest.raises(PlannedError):
        program.backward()
    program.model.layers[1].set_all_reduce_hook(lambda _: None)
    program.ctx.reset()
    program.model.zero_grad()
    program.train(2)
