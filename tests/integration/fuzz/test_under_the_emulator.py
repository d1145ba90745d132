"""Everything runs on the emulated device, and nothing that it does is left unordered."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.checkpoint import stager
from fsdp_overlap.checkpoint.staged_save import StagedSave, StagingBuffers
from fsdp_overlap.comm import collectives, threads
from fsdp_overlap.comm.comm_streams import DeviceCommStream, DeviceWorkHandle
from fsdp_overlap.comm.host_copies import D2HCopy
from fsdp_overlap.desync.order_check import OrderCheck
from fsdp_overlap.engine import comm_context, hooks
from fsdp_overlap.engine.comm_context import CommContext
from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.options import ReduceOptions
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.saved_tensors import SavedForward
from fsdp_overlap.features.extensions.gather import ExtensionGather
from fsdp_overlap.features.hsdp.gradients import ReplicaReductions
from fsdp_overlap.features.hsdp.replica_reduction import ReplicaReduction
from fsdp_overlap.features.offload import ComputeCopy
from fsdp_overlap.features.outer_shard import OuterShard
from fsdp_overlap.features.quantized.collectives import QuantizedGather, QuantizedReduction
from fsdp_overlap.features.rows.collectives import PackedRows
from fsdp_overlap.fsdp_module import FSDPModule
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.optim import Muon, clip_grad_norm_
from fsdp_overlap.optim.exchange import Exchange
from fsdp_overlap.optim.layer_wise_batches import OwnBatch
from fsdp_overlap.optim.overlapped_steps import OverlappedSteps
from fsdp_overlap.optim.owner_groups import OwnerGroups
from fsdp_overlap.schedule.backward import GradReducer
from fsdp_overlap.schedule.prefetch import Prefetcher
from fsdp_overlap.schedule.scheduler import Schedule
from fsdp_overlap.tensor.flat_buffer import VersionCounters
from fsdp_overlap.tools.emulator import EmulatedDevice, active, fake_ranks, running
from fsdp_overlap.weights import WeightResharder, export, save
from fsdp_overlap.weights.exchange import WeightExchange
from support.defects import Defect
from support.emulated import Program, run
from support.emulated_modes import EXTENSIONS, MODES, OFFLOAD
from support.zoo import Model


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with fake_ranks(4):
        yield


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", MODES)
def test_nothing_is_left_unordered(name: str) -> None:
    device = run(MODES[name], index=1)
    assert not device.findings, "\n".join(map(str, dict.fromkeys(device.findings)))
    assert device.operations > 100


def aside(tensor: str, call: str) -> str:
    """``call`` on a stream of the device of ``tensor`` that waits for nobody."""
    return f"with (m := torch.get_device_module({tensor}.device)).stream(m.Stream()): {call}"


PLAIN = "prefetch 1, flat"
OFFLOADED = "edits after an evaluation of offloaded weights"
COPIES = "many units with copies"
DIVIDED = "accumulation among shards, divided"
SIDE = "the optimizer on a stream of its own"
HOOKS = "hooks on another stream"
UNEDITED = "forwards without edits"
EXCHANGED = "muon in rounds"
LAYER_WISE = "layer wise in rounds"
LAYER_WISE_OVERLAPPED = "layer_wise overlapped in backward, whole"
ROWS = "prefetch 1, rows"
COPIED = "torch._foreach_copy_(targets, sources)"
IN_ONE = "one launch, odd parameters"
TOGETHER = "all_gather_coalesced((outputs, inputs), group)"
BITS = "gathered in 8 bits, flat"
DECODED = "self._decode(gathered, full)"
ENCODED = "wire.encode_own(shard.to(full.device, non_blocking=True), own, full.dtype)"
BITS_BACK = "reduced in torch.float8_e5m2, flat"
ROWS_BACK = "reduced in torch.float8_e5m2, rows"
SUMMED = "wire.add_up(received.view(len(sizes), -1), mine, rank, total)"
SENT = "sent, mine = self._encode(gradients, group)"
KEPT_LOW = "gradients kept in bfloat16"
CAST = "mean = mean.to(self.param_group.grad_dtype)"
EXTENDED = "extensions"
PUT_IN = "weights put into a model that gathers ahead"
EXPORTED = "weights exported, prefetch 2"
SAVED = "saved beside training"
SKIPS = "the model of skips in a list"
TIED = "the model of parameters tied across units"
TAKEN = "_copy([own[at].view(dtype) for at, dtype in layout.ranges], sources)"

WEIGHTS = "weights saved on another stream"
CHOSEN = "streams_of(device).set_device(device)"
IN_THREADS = (
    "AdamW overlapped in backward, flat",
    "Muon overlapped in backward, whole",
    LAYER_WISE_OVERLAPPED,
    "watched for hangs",
    WEIGHTS,
)
"""Modes in which a thread of the library calls the device, each another thread."""

# Every line of the comm streams, work handles and releases that orders something.
DEFECTS = [
    Defect(
        DeviceWorkHandle,
        "wait",
        "self._device_module.current_stream().wait_event(self._event)",
        PLAIN,
    ),
    Defect(DeviceWorkHandle, "wait_on_host", "self._event.synchronize()", OFFLOADED),
    Defect(
        DeviceCommStream,
        "after_compute",
        "self.after_event(self._device_module.current_stream().record_event())",
        PLAIN,
    ),
    Defect(DeviceCommStream, "after_event", "self.stream.wait_event(event)", SIDE),
    Defect(DeviceCommStream, "after_work", "work.wait()", COPIES),
    Defect(
        DeviceCommStream,
        "before_compute",
        "self._device_module.current_stream().wait_stream(self.stream)",
        "a hook of reductions that raised and a reset",
    ),
    Defect(
        DeviceCommStream,
        "record_compute_event",
        "self._device_module.current_stream().record_event()",
        PLAIN,
        new="None",
    ),
    Defect(
        DeviceCommStream,
        "record_compute_event",
        "self._device_module.current_stream()",
        PLAIN,
        new="self.stream",
    ),
    Defect(
        DeviceCommStream,
        "allocate",
        "with self._device_module.stream(self.stream):",
        PLAIN,
        new="if True:",
    ),
    Defect(
        DeviceCommStream,
        "enqueue",
        ", self._device_module.stream(self.stream):",
        OFFLOADED,
        new=":",
    ),
    Defect(
        DeviceCommStream,
        "enqueue",
        "self.stream.record_event()",
        PLAIN,
        new="self._device_module.Event()",
    ),
    Defect(DeviceCommStream, "free", "self.after_event(after)", PLAIN),
    Defect(DeviceCommStream, "free", "compute.wait_event(after)", UNEDITED),
    Defect(DeviceCommStream, "free", "buffer.record_stream(compute)", UNEDITED),
    Defect(
        DeviceCommStream,
        "free",
        " or buffer.keeps_storage",
        f"{UNEDITED} with storage kept",
        new="",
    ),
    Defect(
        hooks,
        "before_reading_forward",
        "before_forward(owner, module, (), {})",
        TIED,
        new="owner.context.schedule.prefetcher.use(owner); owner.to_unsharded()",
    ),
    Defect(
        Schedule,
        "_end_unshards",
        "self.prefetcher.release(unit)",
        "read by hand",
        new="self._comm.free(unit, None)",
    ),
    Defect(Prefetcher, "begin_pass", "self._comm.after_compute()", PLAIN),
    Defect(Prefetcher, "_gather", "self._comm.after_compute()", "an edit past the event"),
    Defect(
        Prefetcher,
        "_gather",
        "state.synced_version != version or ",
        "an edit past the event",
        new="",
    ),
    Defect(
        Prefetcher,
        "_gather",
        " or unit.is_gathered",
        "a kept parameter read beside the optimizer",
        new="",
    ),
    Defect(Prefetcher, "before_step", "unit.wait()", "stepped twice"),
    Defect(Prefetcher, "release", "self._comm.record_compute_event()", PLAIN, new="None"),
    Defect(
        FSDPModule,
        "set_post_optim_event",
        "context.comm_context.all_gather_stream.after_event(event)",
        SIDE,
    ),
    Defect(ParamGroup, "wait", "self._work.wait()", PLAIN),
    Defect(DeviceWorkHandle, "abandon", "self.wait()", "the model of unused parameters"),
    *(
        Defect(ParamGroup, "free", "self._work.abandon()", mode)
        for mode in (
            "the model of unused parameters",
            "stepped while unsharded by hand",
            "finalized before a wait",
        )
    ),
    Defect(
        ParamGroup,
        "reset",
        "self.free(comm_stream, comm_stream.record_compute_event())",
        "a backward that raised and a reset",
        new="self.free(comm_stream, None)",
    ),
    Defect(OuterShard, "source", "self.wait_for_prepared()", DIVIDED),
    Defect(ParamGroup, "record_gather", "self.mesh_info.reading = self.reading = work", OFFLOADED),
    Defect(
        ComputeCopy,
        "refresh",
        "param_group.reading.wait_on_host()",
        "edits of offloaded weights that are gathered ahead",
    ),
    Defect(
        comm_context,
        "_issue",
        TOGETHER,
        IN_ONE,
        new=aside("outputs[0]", TOGETHER),
    ),
    Defect(OuterShard, "prepare", "comm_stream.after_compute()", DIVIDED),
    Defect(ReplicaReduction, "start", "comm_stream.after_compute()", COPIES),
    Defect(
        ReplicaReduction,
        "start",
        "append((work, total))",
        COPIES,
        new="append((work, None))",
    ),
    Defect(ReplicaReduction, "finish", "work.wait()", COPIES),
    Defect(ReplicaReduction, "finish_before", "comm_stream.after_work(work)", COPIES),
    Defect(ParamGroupGradients, "reduce", "comm_stream.after_compute()", PLAIN),
    Defect(ParamGroupGradients, "reduce", "comm_stream.after_compute()", "in pieces"),
    Defect(Prefetcher, "_gather", "self._comm.after_compute()", "stepped twice"),
    Defect(CommContext, "finish", "work.wait()", PLAIN),
    Defect(ReplicaReductions, "finish", "reduction.finish()", COPIES),
    Defect(
        GradReducer,
        "_may_fill",
        "if gradients in self._reading:",
        "finalized by hand after two backwards",
        new="if False:",
    ),
    Defect(
        GradReducer,
        "_ensure_input",
        "while gradients in self._reading:",
        "finalized by hand after two backwards",
        new="while False:",
    ),
    Defect(OrderCheck, "send", "comm_stream.after_compute()", COPIES),
    Defect(
        ReduceOptions,
        "call_hook",
        "self.hook_stream.wait_stream(comm_stream)",
        "hooks on another stream",
    ),
    Defect(
        ReduceOptions,
        "call_hook",
        "comm_stream.wait_stream(self.hook_stream)",
        "hooks on another stream",
    ),
    Defect(D2HCopy, "wait", "self.copied.synchronize()", "offloaded"),
    Defect(OverlappedSteps, "enqueue_step", "copy.wait()", "AdamW overlapped in backward, flat"),
    Defect(OverlappedSteps, "enqueue_step", "copy.wait()", LAYER_WISE_OVERLAPPED),
    # The gradient may be cast in the thread alone: it is not there yet when the step is planned.
    Defect(
        OwnBatch,
        "shards",
        "local_of(parameter.grad))",
        LAYER_WISE_OVERLAPPED,
        "local_of(parameter.grad).clone())",
    ),
    Defect(Exchange, "_enqueue", "self._comm_stream.after_compute()", EXCHANGED),
    Defect(Exchange, "_enqueue", "self._sent = source", EXCHANGED),
    Defect(Exchange, "run", "self._work.wait()", EXCHANGED),
    Defect(Exchange, "finish", "self._work.wait()", EXCHANGED),
    Defect(Exchange, "_enqueue", "self._comm_stream.after_compute()", LAYER_WISE),
    Defect(Exchange, "run", "self._work.wait()", LAYER_WISE),
    Defect(Exchange, "finish", "self._work.wait()", LAYER_WISE),
    Defect(Exchange, "_enqueue", "self._sent = source", LAYER_WISE),
    Defect(OwnerGroups, "abort", "comm_stream.before_compute()", "layer wise that raised"),
    Defect(collectives, "_launch", "end(work)", "one launch, ragged"),
    Defect(PackedRows, "all_gather", COPIED, ROWS, new=aside("full", COPIED)),
    Defect(PackedRows, "reduce_scatter", COPIED, ROWS, new=aside("gradients", COPIED)),
    Defect(QuantizedGather, "all_gather", DECODED, BITS, new=aside("full", DECODED)),
    Defect(QuantizedGather, "all_gather", ENCODED, BITS, new=aside("full", ENCODED)),
    Defect(QuantizedReduction, "reduce_scatter", SUMMED, BITS_BACK, new=aside("mine", SUMMED)),
    Defect(QuantizedReduction, "reduce_scatter", SUMMED, ROWS_BACK, new=aside("mine", SUMMED)),
    Defect(QuantizedReduction, "reduce_scatter", SENT, BITS_BACK, new=aside("gradients", SENT)),
    Defect(QuantizedReduction, "reduce_scatter", SENT, ROWS_BACK, new=aside("gradients", SENT)),
    Defect(ParamGroupGradients, "_accept", CAST, KEPT_LOW, new=aside("mean", CAST)),
    Defect(ExtensionGather, "_gather", TAKEN, EXTENDED, new=aside("full", TAKEN)),
    Defect(
        ExtensionGather,
        "_gather",
        "then()",
        EXTENDED,
        new=aside("full", "then()"),
    ),
    Defect(WeightExchange, "start", "self.comm_stream.after_compute()", EXPORTED),
    Defect(
        WeightResharder,
        "run",
        "model_context_of(unit).comm_context.all_gather_stream.before_compute()",
        PUT_IN,
    ),
    Defect(
        export,
        "handed_over",
        "tensor.record_stream(streams_of(tensor.device).current_stream())",
        EXPORTED,
    ),
    Defect(WeightExchange, "run", "work.wait()\n            yield", EXPORTED, new="yield"),
    Defect(
        WeightExchange,
        "run",
        "RuntimeError):\n                work.wait()",
        EXPORTED,
        new="OSError): pass",
    ),
    Defect(
        StagingBuffers,
        "after_compute",
        "self._streams[device].wait_stream(streams_of(device).current_stream(device))",
        f"{SAVED}, copied ahead",
    ),
    Defect(
        StagingBuffers,
        "before_compute",
        "streams_of(device).current_stream(device).wait_stream(stream)",
        SAVED,
    ),
    Defect(StagingBuffers, "copy", "source.record_stream(stream)", "a save that failed"),
    Defect(StagingBuffers, "copy", "on_device(source.device), ", "saved by a thread", new=""),
    Defect(StagedSave, "_wait_for", "with on_device(device):", "saved by a thread", new="if True:"),
    Defect(
        StagedSave, "_wait_for", "with on_device(device):", "peeked by a thread", new="if True:"
    ),
    *(Defect(threads, "choose_device", CHOSEN, mode) for mode in IN_THREADS),
    Defect(
        save._HostCopies,
        "pieces",
        "self._stream.wait_event(ready)",
        WEIGHTS,
    ),
    Defect(save._HostCopies, "pieces", "yield copied.wait()", WEIGHTS, new="yield copied.host"),
    Defect(StagedSave, "copy_remaining", "buffers.before_compute()", f"{SAVED}, copied ahead"),
    Defect(StagedSave, "_wait_for", "return copy.wait()", SAVED, new="return copy.host"),
    Defect(stager, "_copy_remaining", "save.copy_remaining()", SAVED),
    Defect(
        CommContext,
        "wait_for_prepared",
        "param_group.gatherer.wait_for_prepared()",
        "an edit after a forward that raised over divided copies",
    ),
    Defect(MeshInfo, "finish_reading", "self.reading.wait_on_host()", OFFLOADED),
    Defect(
        CommContext,
        "wait_for_comm_streams",
        "comm_stream.before_compute()",
        "a hook of reductions that raised and a reset",
    ),
]


@pytest.mark.parametrize("mode", [*IN_THREADS, "saved by a thread", "peeked by a thread"])
def test_threads_choose_their_device(mode: str) -> None:
    """A rank of a GPU other than the first makes no context on the first one."""
    with running(EmulatedDevice(index=1)) as device:
        MODES[mode]()
    assert not device.findings
    assert device.contexts == {1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "defect", DEFECTS, ids=lambda defect: f"{defect.owner.__name__}.{defect.method}: {defect.old}"
)
def test_every_planted_defect_is_found(defect: Defect) -> None:
    device = EmulatedDevice(index=1)
    # Operations on memory that is not there are not run.
    with defect.plant(), running(device), suppress(RuntimeError):
        MODES[defect.mode]()
    assert device.findings


READS_EARLY = Defect(
    SavedForward, "before_read", "schedule.before_backward(self.call)", SKIPS, new="False"
)


def test_reads_before_a_gather_are_refused_and_would_be_races() -> None:
    refused = pytest.raises(RuntimeError, match="at version 2147483648")
    with READS_EARLY.plant(), running(EmulatedDevice()), refused:
        MODES[SKIPS]()
    forbids = Defect(VersionCounters, "forbid_reads", "not self.are_forbidden", "", new="False")
    device = EmulatedDevice()
    with READS_EARLY.plant(), forbids.plant(), running(device), suppress(RuntimeError):
        MODES[SKIPS]()
    assert device.findings


class Keeps(nn.Linear):
    """Keeps a tensor whose backward reads the weight, and returns another."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x * self.weight
        return super().forward(x)


def reads_after_backward() -> None:
    """Of forward 3, which is not tracked, read what is kept once backward has freed it."""
    model = nn.Sequential(Keeps(4, 4), Keeps(4, 4)).to("emulated")
    ctx = FsdpContext()
    for module in (*model, model):
        fully_shard(module, ctx)
    x = torch.ones(4, 4, device="emulated", requires_grad=True)
    for _ in range(3):
        model(x).sum().backward(retain_graph=True)
    model[1].kept.sum().backward()


def test_reads_of_what_backward_has_freed_are_refused_and_would_be_found() -> None:
    refused = pytest.raises(RuntimeError, match="at version 2147483648")
    with running(EmulatedDevice()) as device, refused:
        reads_after_backward()
    assert not device.findings
    allows = Defect(ParamGroup, "free", "self.counters.forbid_reads()", "")
    device = EmulatedDevice()
    with allows.plant(), running(device), suppress(RuntimeError):
        reads_after_backward()
    assert device.findings


ORDERS = ("wait", "synchronize", "record_event", "stream(")


@pytest.mark.parametrize("owner", [DeviceWorkHandle, DeviceCommStream])
def test_no_line_of_the_lanes_that_orders_is_without_a_defect(owner: type) -> None:
    planted = [defect.old.strip(", :") for defect in DEFECTS if defect.owner is owner]
    for name, method in vars(owner).items():
        if not inspect.isfunction(method) or name == "__init__":
            continue
        lines = inspect.getsource(method).splitlines()[1:]
        for line in (line.strip() for line in lines if "#" not in line):
            if any(word in line for word in ORDERS):
                assert any(old in line for old in planted), f"{name}: {line}"


def steady(program: Program, steps: int = 3) -> list[str]:
    """Where the host waits in a step like those before."""
    inputs = [program.batch() for _ in range(steps + 1)]

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        program.backward(batch)
        clip_grad_norm_(program.model.parameters(), 1.0)
        program.step()

    for batch in inputs[:-1]:
        step(batch)
    active().syncs.clear()
    step(inputs[-1])
    return list(map(str, active().syncs))


STEADY: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "torch's AdamW, fused": {
        "optimizer": torch.optim.AdamW,
        "optimizer_options": {"fused": True},
    },
    "torch's AdamW": {"optimizer": torch.optim.AdamW},
    "Muon": {"optimizer": Muon},
    "Muon, whole matrices": {"optimizer": Muon, "layout": TensorAtomic()},
    "copies": {"dims": (2, 2), "reduce_dtype": torch.float64},
    "divided copies": {"dims": (2, 2), "shard_optimizer_over_replicas": True},
    "parts kept": {"shard_options": {"reshard_after_forward": 2}},
    "checkpointed": {"name": "checkpointed"},
    "extensions": EXTENSIONS,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", STEADY)
def test_a_steady_step_waits_for_the_device_nowhere(name: str) -> None:
    waits: list[str] = []
    run(lambda: waits.extend(steady(Program(**STEADY[name]))))
    assert waits == []


def test_a_check_that_was_read_before_it_arrived_would_be_a_wait() -> None:
    waits: list[str] = []
    with Defect(DeviceWorkHandle, "done", "self._event.query()", "", new="True").plant():
        run(lambda: waits.extend(steady(Program())))
    assert any("comm_streams.py" in wait for wait in waits)


def test_offloaded_a_step_waits_where_its_gradients_land_and_its_shards_are_read() -> None:
    waits: list[str] = []
    run(lambda: waits.extend(steady(Program(shard_options=dict(OFFLOAD)))))
    places = {wait.split(" at ")[1].split(":")[0] for wait in waits}
    # And where the norm of gradients on the host, which the mesh computes, goes back there.
    assert places == {
        f"fsdp_overlap/{name}.py"
        for name in ("comm/host_copies", "comm/comm_streams", "tensor/sums_and_norms")
    }


def test_a_set_of_gradients_that_changes_makes_nobody_wait() -> None:
    waits: list[str] = []

    def program() -> None:
        trained = Program(name="layers")
        trained.train(2)
        parameters = list(trained.model.parameters())
        for turn in range(4):
            active().syncs.clear()
            trained.backward()
            for parameter in parameters[turn % 2 :: 2]:
                parameter.grad = None
            trained.step()
            waits.extend(map(str, active().syncs))

    run(program)
    assert waits == []


def test_inputs_in_pinned_memory_are_moved_while_the_host_goes_on() -> None:
    waits: list[str] = []

    def program() -> None:
        trained = Program()
        trained.train(2)
        tokens = torch.zeros(3, 5, dtype=torch.long).pin_memory()
        active().syncs.clear()
        trained.model(tokens)
        waits.extend(map(str, active().syncs))

    run(program)
    assert waits == []


def test_sums_across_copies_are_not_kept_to_the_end() -> None:
    """In float64 they are no gradients yet, and take memory of their own."""
    shards: list[int] = []

    def most(layers: int) -> int:
        """Beside what is there after a step."""

        def program() -> None:
            build = partial(Model, layers=layers, width=64)
            trained = Program(build=build, dims=(2, 2), reduce_dtype=torch.float64)
            trained.train(2)
            shards.append(sum(b.shard.nbytes for u in trained.ctx.units for b in u.param_groups))
            at_rest.append(active().allocator.allocated)

        at_rest: list[int] = []
        return run(program).allocator.peak_allocated - at_rest[0]

    more = most(12) - most(6)
    gradients = shards[0] - shards[1]
    assert more < 1.5 * gradients  # the sums of six layers would be twice as much again
