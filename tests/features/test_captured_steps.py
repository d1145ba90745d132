"""Whole steps in CUDA graphs: captured and replayed on the emulated device."""

from __future__ import annotations

import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from fsdp_overlap.checkpoint import ShardStager
from fsdp_overlap.comm.comm_streams import REPLAY
from fsdp_overlap.desync.order_check import OrderCheck
from fsdp_overlap.features.cuda_graphs import graphs, watching
from fsdp_overlap.features.cuda_graphs.captured_steps import (
    CapturedSteps,
    CapturedWorkHandle,
    CommStreamInCapture,
    ReplayedSteps,
)
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.optim import AdamW, Muon, OverlapPolicy, clip_grad_norm_
from fsdp_overlap.optim.adamw import KernelCall
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tools.emulator import (
    CUDAGraph,
    EmulatedDevice,
    Stream,
    current_stream,
    fake_ranks,
    graph,
    running,
    stream,
)
from fsdp_overlap.tools.emulator.nccl_like import BACKEND
from support.captured import OPTIMIZERS, replay_steps
from support.defects import Defect
from support.emulated import Program
from support.emulated_twins import Trained
from support.pages import TESTS
from support.ranks import run_ranks
from support.twins import COPIES, loss_of
from support.zoo import Model, shard_layers

Batch = tuple[torch.Tensor, torch.Tensor]


class Side:
    """One of two models that are trained alike, with its inputs at addresses that stay."""

    def __init__(
        self,
        microbatches: int,
        prepare: Callable[[nn.Module], object] | None,
        shard: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.twins = Trained(partial(Model, layers=2), partial(shard_layers, **shard), **options)
        if prepare is not None:
            prepare(self.twins.model)
        self.microbatches = microbatches
        self.inputs = list(self.twins.batches(microbatches))

    def fill(self, batches: Sequence[Batch]) -> None:
        for static, batch in zip(self.inputs, batches, strict=True):
            for target, source in zip(static, batch, strict=True):
                target.copy_(source)

    def step(self) -> list[torch.Tensor]:
        """What is captured. Returns losses and the norm of gradients."""
        twins, found = self.twins, []
        twins.optimizer.zero_grad()
        for index, (tokens, targets) in enumerate(self.inputs):
            if self.microbatches > 1:
                twins.model.set_requires_gradient_sync(index == self.microbatches - 1)
            loss = loss_of(twins.model(twins.mine(tokens)), twins.mine(targets))
            loss.backward()
            found.append(loss.detach())
        found.append(clip_grad_norm_(twins.model.parameters(), 0.1))
        twins.optimizer.step()
        return found

    def gradients(self) -> list[Any]:
        return [parameter.grad for parameter in self.twins.model.parameters()]

    def held(self, gradients: Sequence[Any]) -> list[torch.Tensor]:
        """Parameters, ``gradients`` and states of the optimizer that this rank holds."""
        twins = self.twins
        parameters: list[Any] = list(twins.model.parameters())
        states = [
            state
            for parameter in parameters
            for state in twins.optimizer.state[parameter].values()
            if isinstance(state, torch.Tensor)
        ]
        tensors = [*parameters, *gradients, *states]
        return [getattr(each, "_local_tensor", each).detach() for each in tensors]

    def evaluate(self) -> torch.Tensor:
        with torch.no_grad():
            scores: torch.Tensor = self.twins.model(self.twins.mine(self.inputs[0][0]))
        return scores

    def step_twin(self) -> None:
        twins = self.twins
        for tokens, targets in self.inputs:
            twins.twin_backward(twins.twin_loss(tokens, targets))
        nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
        # Of a capturable step numbers differ a little, and torch has none for the host's memory.
        adam = sys.modules[torch.optim.Adam.__module__]
        with patch.object(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"]):
            twins.twin_step()


def replayed(
    replays: int = 7,
    microbatches: int = 1,
    prepare: Callable[[nn.Module], object] | None = None,
    shard: dict[str, Any] | None = None,
    has_twin: bool = True,
    **options: Any,
) -> None:
    """Replays steps of one model, and runs the same of another one eagerly."""
    with running(EmulatedDevice()) as device:
        eager, captured = (Side(microbatches, prepare, shard or {}, options) for _ in range(2))
        batches = list(eager.twins.batches((replays + 2) * microbatches))
        steps = [batches[at : at + microbatches] for at in range(0, len(batches), microbatches)]
        for step in steps[:2]:
            for side in (eager, captured):
                side.fill(step)
                side.step()
            eager.step_twin()
        captured.twins.ctx.release_unsharded()
        step_graph = CUDAGraph()
        with graph(step_graph):
            found = captured.step()
        gradients = captured.gradients()  # a replay writes these, also after an eager step
        for index, step in enumerate(steps[2:]):
            for side in (eager, captured):
                side.fill(step)
            expected = eager.step()
            if index % 7 == 5:  # now and then a step that is not replayed
                now, its = captured.step(), captured.gradients()
            else:
                waits = len(device.syncs)
                step_graph.replay()
                now, its = found, gradients
                assert len(device.syncs) == waits
            assert all(map(torch.equal, now, expected)), index
            alike = zip(captured.held(its), eager.held(eager.gradients()), strict=True)
            assert all(torch.equal(one, other) for one, other in alike), index
            if index % 4 == 0:
                assert torch.equal(captured.evaluate(), eager.evaluate()), index
            eager.step_twin()
            if has_twin:
                eager.twins.check_parameters()
        assert not device.findings, "\n".join(map(str, device.findings[:5]))


def keep_after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)


TORCH: dict[str, Any] = {"optimizer": torch.optim.AdamW, "capturable": True, "foreach": True}
OURS: dict[str, Any] = {"optimizer": AdamW}
MUON: dict[str, Any] = {"optimizer": Muon, "ns_dtype": torch.double}
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

PROGRAMS: dict[str, tuple[int, dict[str, Any]]] = {
    "torch's AdamW, prefetch 2": (2, {**TORCH, "prefetch": 2, "replays": 20}),
    "accumulation, kept after backward": (
        2,
        {**OURS, "prepare": keep_after_backward, "microbatches": 2, "replays": 20},
    ),
    "Muon, resharded after forward": (
        2,
        {**MUON, "shard": {"reshard_after_forward": True}, "replays": 20},
    ),
    "torch's AdamW, in rows, kept after forward": (
        2,
        {**TORCH, "layout": PerTensor(), "shard": {"reshard_after_forward": False}},
    ),
    "prefetch 0, mixed precision": (
        2,
        {**OURS, "prefetch": 0, "shard": {"mp_policy": LOW}, "has_twin": False},
    ),
    "Muon, in rows, accumulation": (2, {**MUON, "layout": PerTensor(), "microbatches": 2}),
    "copies, accumulation": (4, {**OURS, **COPIES, "microbatches": 2}),
    "divided copies, whole matrices": (
        4,
        {**OURS, **COPIES, "shard_optimizer_over_replicas": True, "layout": TensorAtomic()},
    ),
    "parts kept": (4, {**OURS, "shard": {"reshard_after_forward": 2}}),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", PROGRAMS)
def test_replayed_steps_equal_eager_ones(name: str) -> None:
    world_size, options = PROGRAMS[name]
    run_ranks(partial(replayed, **options), world_size, backend=BACKEND)


# ---- on one rank ----


class OneStep:
    """A model on the one rank that there is, its inputs, and a graph for its step."""

    def __init__(self, steps: int = 2, dims: tuple[int, ...] = (1,), **options: Any) -> None:
        self.program = Program(dims=dims, **options)
        self.model, self.ctx = self.program.model, self.program.ctx
        self.inputs = self.program.batch()
        self.graph = CUDAGraph()
        for _ in range(steps):
            self.step()

    def step(self) -> torch.Tensor:
        self.program.optimizer.zero_grad()
        loss = self.program.forward(self.inputs)
        loss.backward()
        self.program.optimizer.step()
        return loss.detach()

    def capture(self, step: Callable[[], object] | None = None) -> None:
        with graph(self.graph):
            (step or self.step)()

    def evaluate(self) -> torch.Tensor:
        with torch.no_grad():
            return self.program.forward(self.inputs)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with fake_ranks(1), running(EmulatedDevice()) as device:
        yield device


def before_any_step() -> tuple[OneStep, str]:
    return OneStep(steps=0), "run two whole ones"


def gathered_for_next() -> tuple[OneStep, str]:
    return OneStep(optimizer_options={"prefetch_next_forward": True}), r"ctx\.release_unsharded\(\)"


def kept_whole() -> tuple[OneStep, str]:
    one = OneStep()
    one.model.set_reshard_after_backward(False)
    one.step()
    return one, "full buffer from before the capture"


def kept_storage() -> tuple[OneStep, str]:
    one = OneStep()
    one.model.set_keep_unsharded_storage(True)
    one.step()
    return one, "set_keep_unsharded_storage"


def offloaded() -> tuple[OneStep, str]:
    return OneStep(shard_options={"offload_policy": CPUOffloadPolicy()}), "offloaded"


def half_a_step() -> tuple[OneStep, str]:
    one = OneStep()
    one.model.set_requires_gradient_sync(False)
    one.program.backward(one.inputs)
    one.model.set_requires_gradient_sync(True)
    return one, "gradients are not reduced"


def after_a_forward() -> tuple[OneStep, str]:
    one = OneStep()
    one.loss = one.program.forward(one.inputs)  # type: ignore[attr-defined]
    return one, "forward whose backward has not run"


def by_gloo() -> tuple[OneStep, str]:
    one = OneStep()
    one.ctx.mesh_infos[0].order_check.confirms = True
    return one, "gloo"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "prepare",
    [
        before_any_step,
        gathered_for_next,
        kept_whole,
        kept_storage,
        offloaded,
        half_a_step,
        after_a_forward,
        by_gloo,
    ],
)
def test_what_cannot_be_captured_is_refused_before_anything_changed(
    device: EmulatedDevice, prepare: Callable[[], tuple[OneStep, str]]
) -> None:
    one, reason = prepare()
    before = [parameter.detach().to_local().clone() for parameter in one.model.parameters()]
    with pytest.raises(RuntimeError, match=rf"(?s)cannot be right: .*{reason}.*Nothing was"):
        one.capture(one.evaluate if prepare is before_any_step else None)
    after = [parameter.detach().to_local() for parameter in one.model.parameters()]
    assert all(map(torch.equal, before, after))
    if prepare is after_a_forward:
        one.loss.backward()  # type: ignore[attr-defined]
    one.step()
    assert not device.findings


def test_a_capture_that_replays_do_not_tell_of_is_refused(device: EmulatedDevice) -> None:
    one = OneStep()
    with stream(Stream()):
        inspect.unwrap(CUDAGraph.capture_begin)(one.graph)
        with pytest.raises(RuntimeError, match=r"not begun by torch\.cuda"):
            one.step()
        inspect.unwrap(CUDAGraph.capture_end)(one.graph)


def test_states_of_optimizers_are_not_made_in_a_capture(device: EmulatedDevice) -> None:
    one, other = OneStep(), OneStep()
    one.program.optimizer.state.clear()
    other.model.embedding.requires_grad_(False)  # other parameters are stepped than before
    for each in (one, other):
        with pytest.raises(RuntimeError, match="before the capture, step the optimizer once"):
            each.capture()


def test_a_forward_that_is_captured_alone_is_refused(device: EmulatedDevice) -> None:
    one, twin = OneStep(), OneStep()
    with pytest.raises(RuntimeError, match="forward whose backward has not run: capture whole"):
        one.capture(partial(one.program.forward, one.inputs))
    with pytest.raises(RuntimeError, match="not captured"):
        one.graph.replay()
    assert torch.equal(one.step(), twin.step())
    assert torch.equal(one.step(), twin.step())
    assert not device.findings


def test_a_backward_that_is_captured_alone_is_refused(device: EmulatedDevice) -> None:
    one = OneStep()
    with stream(Stream()):
        loss = one.program.forward(one.inputs)
        one.graph.capture_begin()
        with pytest.raises(RuntimeError, match=r"without its forward.*make_graphed_callables"):
            loss.backward()
        one.graph.capture_end()


def test_gathers_without_a_forward_are_captured_and_leave_nothing(device: EmulatedDevice) -> None:
    one, twin = OneStep(), OneStep()
    for gather in (one.model.unshard, one.ctx.start_param_sync, one.ctx.finish_param_sync):
        one.capture(gather)
        assert torch.equal(one.step(), twin.step())
        one.ctx.release_unsharded()
    one.capture(lambda: (one.model.unshard(async_op=True), one.step()))
    one.graph.replay()
    twin.step()
    assert torch.equal(one.evaluate(), twin.evaluate())
    assert not device.findings


def test_torch_graphs_no_sharded_model_as_a_callable() -> None:
    with fake_ranks(1):
        model: Any = nn.Linear(4, 4)
        fully_shard(model, FsdpContext(init_device_mesh("cpu", (1,))))
        with pytest.raises(AssertionError, match="must not have hooks"):
            torch.cuda.make_graphed_callables(model, (torch.ones(1, 4),))


def test_a_step_that_raised_in_a_capture_leaves_a_context_that_resets(
    device: EmulatedDevice,
) -> None:
    one, twin = OneStep(), OneStep()

    def step() -> None:
        one.program.forward(one.inputs).backward()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        one.capture(step)
    one.ctx.reset()
    for _ in range(2):
        assert torch.equal(one.step(), twin.step())
    one.capture()
    one.graph.replay()
    twin.step()
    assert torch.equal(one.evaluate(), twin.evaluate())
    assert not device.findings


def preceding(one: OneStep) -> list[Any]:
    """What comm streams know that their streams wait for."""
    comm_streams: Any = one.ctx.comm_context.comm_streams
    return [
        event
        for comm_stream in comm_streams
        for event in (
            *comm_stream.preceding,
            *(each for some in comm_stream.launched for each in some.waits),
        )
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_no_events_that_nobody_may_ask(
    device: EmulatedDevice, fails: bool
) -> None:
    one = OneStep()
    with stream(Stream()):
        one.graph.capture_begin()
        one.step()
        if fails:
            with pytest.raises(RuntimeError, match="Unsupported"):
                current_stream().synchronize()
        with pytest.raises(RuntimeError, match="Invalidated") if fails else nullcontext():
            one.graph.capture_end()
    one.step()
    assert all(event.query() is not None for event in preceding(one))


def test_replays_are_counted_and_leave_nothing_else(device: EmulatedDevice) -> None:
    one = OneStep()
    one.capture()
    comm_streams: Any = one.ctx.comm_context.comm_streams
    counts = [comm_stream.count for comm_stream in comm_streams]
    for _ in range(3):
        one.graph.replay()
    assert [
        comm_stream.count - before for comm_stream, before in zip(comm_streams, counts, strict=True)
    ] == [3, 3]
    assert {comm_stream.launched[-1].kind for comm_stream in comm_streams} == {REPLAY}
    before = len(preceding(one))
    one.graph.replay()
    assert len(preceding(one)) == before


def test_steps_without_a_capture_prepare_for_none(device: EmulatedDevice) -> None:
    one, other = OneStep(), OneStep()
    assert one.ctx._captures is other.ctx._captures is None
    one.capture()
    assert None not in (one.ctx._captures, other.ctx._captures)
    assert OneStep().ctx._captures is None  # until the next


def test_a_capture_that_does_not_begin_leaves_the_monitor_its_queries(
    device: EmulatedDevice,
) -> None:
    one = OneStep()  # watches
    with pytest.raises(RuntimeError, match="non-default stream"):
        one.graph.capture_begin()
    assert not graphs.querying.locked()


def test_a_capture_does_not_end_the_queries_of_another_thread(device: EmulatedDevice) -> None:
    one = OneStep()
    assert graphs.querying.acquire(timeout=1)
    with patch.object(watching, "QUERIES_SECONDS", 0.1):
        one.capture()
    assert graphs.querying.locked()
    graphs.querying.release()


def test_graphs_of_several_steps_may_share_a_pool(device: EmulatedDevice) -> None:
    one, other = OneStep(), OneStep()
    one.capture()
    evaluation = CUDAGraph()
    with graph(evaluation, pool=one.graph.pool()):
        found = one.evaluate()
    for _ in range(2):
        one.graph.replay()
        other.step()
        evaluation.replay()
        assert torch.equal(found, other.evaluate())
    assert not device.findings


def test_a_forward_without_gradients_is_captured_alone(device: EmulatedDevice) -> None:
    one, other = OneStep(), OneStep()
    found: list[torch.Tensor] = []
    one.capture(lambda: found.append(one.evaluate()))
    for _ in range(3):
        one.graph.replay()
        # A communicator is used by one thing after the other.
        comm_stream: Any = one.ctx.comm_context.all_gather_stream
        assert device.current.clock.items() <= comm_stream.stream.queue.clock.items()
        assert torch.equal(found[0], other.evaluate())
        one.step()  # which the next replay must see
        other.step()
    assert not device.findings


def step_alone(one: OneStep) -> None:
    """Captures the step of the optimizer, and replays it where eager gradients are."""
    one.program.backward(one.inputs)
    one.capture(one.program.optimizer.step)


def test_weights_that_are_kept_are_stale_after_a_replay(device: EmulatedDevice) -> None:
    one, other = OneStep(), OneStep()
    for each in (one, other):
        each.model.set_reshard_after_backward(False)
        each.model.set_reshard_after_forward(False)
        each.program.optimizer.zero_grad()
    step_alone(one)
    other.program.backward(other.inputs)
    for _ in range(3):
        assert torch.equal(one.evaluate(), other.evaluate())  # gathers, and keeps what it gathered
        one.graph.replay()
        other.program.optimizer.step()
    assert torch.equal(one.evaluate(), other.evaluate())
    assert not device.findings


def test_a_replay_between_forward_and_backward_is_an_edit(device: EmulatedDevice) -> None:
    one = OneStep()
    one.capture()
    loss = one.program.forward(one.inputs)
    one.graph.replay()
    with pytest.raises(RuntimeError, match="modified between its forward and its backward"):
        loss.backward()


def test_a_save_under_way_has_the_weights_from_before_a_replay(device: EmulatedDevice) -> None:
    one = OneStep()
    one.capture()
    weight = one.model.head.weight
    before = weight.full_tensor()
    staged: Any = ShardStager().stage({"weight": weight}).result()["weight"]
    one.graph.replay()
    [item] = staged.__create_write_items__("weight", staged)
    assert torch.equal(
        staged.__get_tensor_shard__(item.index).flatten().cpu(), before.flatten().cpu()
    )
    assert not torch.equal(before, weight.full_tensor())
    assert not device.findings


def write_beside(one: OneStep) -> None:
    """Captures a step while a thread writes an asynchronous save: a part before, most of it
    meanwhile."""
    staged = ShardStager().stage({"model": one.model.state_dict()}).result()["model"]
    pieces = [
        (value, item.index)
        for name, value in staged.items()
        for item in value.__create_write_items__(name, value)
    ]
    assert len(pieces) > 4

    def write(some: Any) -> None:
        for value, index in some:
            value.__get_tensor_shard__(index)

    with ThreadPoolExecutor(1) as writer:
        writer.submit(write, pieces[:2]).result()

        def step() -> None:
            one.step()
            writer.submit(write, pieces[2:]).result()

        one.capture(step)


def step_beside(one: OneStep) -> None:
    """Captures a step while a thread steps the shards of another model."""
    overlap = {"overlap": OverlapPolicy()}
    offload = {"offload_policy": CPUOffloadPolicy()}
    other = Program(dims=(1,), shard_options=offload, optimizer_options=overlap)
    other.train(2)
    captures, run = threading.Event(), KernelCall.run

    def late(call: KernelCall) -> None:
        if threading.current_thread().name == "host step":
            captures.wait(0.5)
        run(call)

    with patch.object(KernelCall, "run", late):
        other.backward()
        other.step()

        def step() -> None:
            one.step()
            captures.set()
            finish_pending_steps()

        try:
            one.capture(step)
        finally:
            other.ctx.reset()
    other.train(1)


BESIDE: dict[Callable[[OneStep], None], str] = {
    write_beside: "_finish_copies",
    step_beside: "finish_pending_steps",
}
"""By the program: what a capture calls first, so that it succeeds."""


@pytest.mark.parametrize("run", BESIDE)
def test_a_capture_waits_for_what_other_threads_ask_of_the_device(
    device: EmulatedDevice, run: Callable[[OneStep], None]
) -> None:
    one, twin = OneStep(), OneStep()
    run(one)
    one.graph.replay()
    twin.step()
    assert torch.equal(one.evaluate(), twin.evaluate())
    assert not device.findings


@pytest.mark.parametrize("run", BESIDE)
def test_without_that_wait_the_capture_ends(
    device: EmulatedDevice, run: Callable[[OneStep], None]
) -> None:
    one = OneStep()
    calls = [call for call in graphs.before_capture if call.__name__ != BESIDE[run]]
    refused = pytest.raises(RuntimeError, match=r"cudaErrorStreamCapture(Unsafe|Invalidated)")
    with patch.object(graphs, "before_capture", calls), refused:
        run(one)


def test_no_other_thread_begins_to_ask_the_device_in_a_capture(device: EmulatedDevice) -> None:
    one = OneStep()
    other = Program(
        dims=(1,),
        shard_options={"offload_policy": CPUOffloadPolicy()},
        optimizer_options={"overlap": OverlapPolicy()},
    )
    other.backward()

    def begin() -> None:
        with pytest.raises(
            RuntimeError, match=r"save begins while .* before the capture, or after"
        ):
            ShardStager().stage({"model": one.model.state_dict()})
        with pytest.raises(RuntimeError, match="overlap= steps offloaded shards while a CUDA"):
            other.optimizer.step()
        one.step()

    one.capture(begin)
    one.graph.replay()
    other.step()
    other.train(1)
    assert not device.findings


def test_overlapped_steps_of_shards_on_the_device_are_captured(device: EmulatedDevice) -> None:
    one, plain = OneStep(optimizer_options={"overlap": OverlapPolicy()}), OneStep()
    one.capture()
    for _ in range(2):
        one.graph.replay()
        plain.step()
    assert torch.equal(one.evaluate(), plain.evaluate())
    assert not device.findings


def test_a_graph_ends_with_its_groups_and_its_model(device: EmulatedDevice) -> None:
    one = OneStep()
    one.capture()
    one.ctx.reset()
    with pytest.raises(RuntimeError, match=r"ctx\.reset\(\) has renewed: capture"):
        one.graph.replay()
    for _ in range(2):
        one.step()
    one.capture()
    one.graph.replay()
    captured = one.graph
    del one
    with pytest.raises(RuntimeError, match="model is gone"):
        captured.replay()


@pytest.mark.parametrize("optimizer", [AdamW, Muon])
def test_a_replay_follows_a_learning_rate_on_the_device(
    device: EmulatedDevice, optimizer: Any
) -> None:
    rate = torch.full((), 0.01, device="emulated")
    one, other = OneStep(optimizer=optimizer), OneStep(optimizer=optimizer)
    for group in one.program.optimizer.param_groups:
        group["lr"] = rate
    one.capture()
    for value in (0.1, 0.0, 0.02):
        rate.fill_(value)
        one.graph.replay()
        for group in other.program.optimizer.param_groups:
            group["lr"] = value
        other.step()
        torch.testing.assert_close(one.evaluate(), other.evaluate())


@pytest.mark.slow
def test_the_program_of_gpus_is_right_here_too(device: EmulatedDevice) -> None:
    for name in OPTIMIZERS:
        replay_steps(name, "emulated", replays=5)
    assert not device.findings


def test_the_example_in_the_documents_runs(device: EmulatedDevice) -> None:
    page = (TESTS.parent / "docs" / "cuda_graphs.md").read_text()
    [example] = re.findall(r"```python\n(batch = .*?graph\.replay.*?)```", page, re.DOTALL)
    program = Program(dims=(1,))
    names = {
        "torch": torch,
        "model": program.model,
        "optimizer": program.optimizer,
        "clip_grad_norm_": clip_grad_norm_,
        "loss_of": lambda scores: scores.square().mean(),
        "batches": iter([program.batch()[0] for _ in range(5)]),
    }
    exec(example.replace("torch.cuda", "torch.emulated"), names)
    loss: Any = names["loss"]
    assert loss.isfinite()
    assert not device.findings


# ---- each line that makes it right is left out, and missed ----


MISSED = {
    "comm streams are not forked": Defect(
        CapturedSteps, "_begin", "comm.let_comm_streams_wait()", ""
    ),
    "comm streams are not joined": Defect(
        CapturedSteps, "_end", "comm.wait_for_comm_streams()", ""
    ),
    "a captured event is asked": Defect(
        CapturedWorkHandle, "done", "not self._is_under_way()", "", new="self._event.query()"
    ),
    "events keep memory back": Defect(
        CommStreamInCapture, "__init__", "comm_stream.max_kept_back = 0", ""
    ),
    "the host reads an order check": Defect(
        OrderCheck, "validate_and_sync", " or not self.is_enabled", "", new=""
    ),
    "compute does not wait for comm streams before a replay": Defect(
        ReplayedSteps, "before", "comm.wait_for_comm_streams()", ""
    ),
    "replays are no edits": Defect(ReplayedSteps, "after", "param_group.edits.record_values()", ""),
    "what was captured counts as gathered": Defect(
        CapturedSteps, "capture_ends", "unit.mark_stale()", ""
    ),
}


def captured_and_mixed(dims: tuple[int, ...], **options: Any) -> None:
    """Replays, steps and evaluations in turn."""
    one, other = OneStep(dims=dims, **options), OneStep(dims=dims, **options)
    one.evaluate()
    one.ctx.release_unsharded()
    one.capture()
    for _ in range(3):
        one.ctx.start_param_sync()
        one.graph.replay()
        other.step()
        assert torch.equal(one.evaluate(), other.evaluate()) or len(dims) > 1
        one.step()
        other.step()
    for each in (one, other):
        each.model.set_reshard_after_forward(False)
        each.step()
    one.ctx.release_unsharded()
    one.capture(one.evaluate)
    assert torch.equal(one.evaluate(), other.evaluate()) or len(dims) > 1


def test_divided_shards_are_put_together_in_replays() -> None:
    with fake_ranks(4), running(EmulatedDevice()) as device:
        one = OneStep(dims=(2, 2), shard_optimizer_over_replicas=True)
        one.evaluate()  # they are together now
        one.capture(one.evaluate)
        device.issued.clear()
        one.graph.replay()
        kinds = [each.kind for each in device.issued]
        assert len(kinds) == 2 * len(one.ctx.units)
        assert not device.findings


def test_steps_that_gather_ahead_without_a_graph_may_come_between(device: EmulatedDevice) -> None:
    captured_and_mixed((1,), optimizer_options={"prefetch_next_forward": True})
    assert not device.findings


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:module forward hook")
@pytest.mark.parametrize("name", [None, *MISSED])
def test_every_line_that_makes_replays_right_is_needed(name: str | None) -> None:
    faults: list[object] = []
    for dims in ((1,), (2, 2)):  # one rank has values, and several check their order
        defect = MISSED[name].plant() if name is not None else nullcontext()
        with fake_ranks(math.prod(dims)), running(EmulatedDevice()) as device, defect:
            try:
                captured_and_mixed(dims)
            except (AssertionError, RuntimeError) as error:
                faults.append(error)
            faults += device.findings
    assert bool(faults) == (name is not None), faults
