"""What is enqueued, waited for and freed before what, on recording comm streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext
from fsdp_overlap.comm.comm_streams import ComputeEvent, HostCommStream
from fsdp_overlap.schedule.stats import Stats
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.recorded import GATHER, REDUCE, Entry, Recorded, RecordingCommStream, layer, position
from support.twins import NAMES, Twins
from support.zoo import Checkpointed, Model, SharedLayer, shard_layers


def next_gather_before_release() -> None:
    forward, backward = Recorded().passes()
    for index in range(2):
        after = position(forward, "enqueue", layer(index + 1))
        assert after < position(forward, "free", layer(index))
    for index in (2, 1):
        after = position(backward, "enqueue", layer(index - 1))
        assert after < position(backward, "free", layer(index))


def test_next_all_gather_is_enqueued_before_release() -> None:
    run_on_fake_group(next_gather_before_release, 2)


def second_gather_after_release() -> None:
    forward, backward = Recorded().passes()
    assert position(forward, "free", layer(0)) < position(forward, "enqueue", layer(2))
    assert position(backward, "free", layer(2)) < position(backward, "enqueue", layer(0))


def test_the_gather_after_next_is_enqueued_after_release() -> None:
    run_on_fake_group(second_gather_after_release, 2)


def without_prediction() -> None:
    recorded = Recorded()
    recorded.ctx.lazy_init()
    recorded.ctx.schedule.order.registered = ()
    forward = recorded.recorded(recorded.forward)
    for index in range(2):
        enqueued = position(forward, "enqueue", layer(index + 1))
        assert enqueued < position(forward, "free", layer(index))
    assert recorded.ctx.stats.prefetch_hits == 0


def test_delayed_release_alone_overlaps_where_no_order_is_known() -> None:
    run_on_fake_group(without_prediction, 2)


COMPUTE = "compute"


def record_compute(model: Model, log: list[Entry]) -> None:
    """Makes each layer write down when it computes, in forward and in backward."""

    def note(layer: str) -> None:
        log.append(Entry(COMPUTE, COMPUTE, "", layer))

    def record_backward(output: torch.Tensor, layer: str) -> None:
        # The gradient of what is inside of the layer is there after the schedule has heard of the
        # layer's, and before the layer's parameters are read.
        if output.requires_grad:
            output.register_hook(lambda gradient: note(layer))

    for index, block in enumerate(model.layers):
        name = layer(index)
        block.norm.register_forward_pre_hook(lambda *_, name=name: note(name))
        block.down.register_forward_hook(lambda *given, name=name: record_backward(given[2], name))


def waits_for_its_own() -> None:
    recorded = Recorded()
    record_compute(recorded.model, recorded.log)
    forward, backward = (
        [
            (entry.action, entry.label)
            for entry in log
            if entry.comm_stream in (GATHER, COMPUTE)
            and entry.action in ("enqueue", "wait", COMPUTE)
        ]
        for log in recorded.passes()
    )
    assert forward == [
        ("enqueue", "Model"),
        ("enqueue", layer(0)),
        ("wait", "Model"),
        ("enqueue", layer(1)),
        ("wait", layer(0)),
        (COMPUTE, layer(0)),
        ("enqueue", layer(2)),
        ("wait", layer(1)),
        (COMPUTE, layer(1)),
        ("wait", layer(2)),
        (COMPUTE, layer(2)),
    ]
    # The root and the last layer were kept.
    assert backward == [
        ("enqueue", layer(1)),
        (COMPUTE, layer(2)),
        ("enqueue", layer(0)),
        ("wait", layer(1)),
        (COMPUTE, layer(1)),
        ("wait", layer(0)),
        (COMPUTE, layer(0)),
    ]


def test_compute_waits_for_its_own_all_gather_only() -> None:
    run_on_fake_group(waits_for_its_own, 2)


def gather_before_reduce() -> None:
    _, backward = Recorded().passes()
    for index in (2, 1):
        enqueued = position(backward, "enqueue", layer(index - 1))
        assert enqueued < position(backward, "enqueue", layer(index), REDUCE)


def test_next_all_gather_is_enqueued_before_reduce_scatter() -> None:
    run_on_fake_group(gather_before_reduce, 2)


def reduce_order() -> None:
    _, backward = Recorded().passes()
    reduced = [
        entry.label for entry in backward if entry.comm_stream == REDUCE and entry.kind == REDUCE
    ]
    enqueued = reduced[: len(reduced) // 2]
    assert list(dict.fromkeys(reduced)) == [layer(2), layer(1), layer(0), "Model"]
    assert enqueued[0] == layer(2)


def test_reduce_scatters_run_in_the_reverse_of_forward() -> None:
    run_on_fake_group(reduce_order, 2)


def reduce_at_once() -> None:
    """A layer's reduce-scatter is enqueued before the next layer's buffer is freed, and two at most
    are waited for late."""
    _, backward = Recorded().passes()
    for index in (2, 1):
        enqueued = position(backward, "enqueue", layer(index), REDUCE)
        assert enqueued < position(backward, "free", layer(index - 1))
    in_flight = 0
    for entry in backward:
        if entry.comm_stream == REDUCE and entry.kind == REDUCE:
            in_flight += {"enqueue": 1, "wait": -1}[entry.action]
            assert in_flight <= 2
    assert in_flight == 0


def test_reduce_scatters_are_enqueued_as_buckets_complete() -> None:
    run_on_fake_group(reduce_at_once, 2)


def most_alive(prefetch: int, iterations: int) -> None:
    recorded = Recorded(prefetch, lambda: Model(layers=6))
    recorded.ctx.stats.reset()
    for _ in range(iterations):
        recorded.step()
    # The root is kept from its forward to the end of backward.
    assert recorded.ctx.stats.peak_full_buffers <= prefetch + 1 + 1
    assert recorded.ctx.stats.peak_reduce_inputs <= min(1 + prefetch, 2)
    assert recorded.ctx.stats.current_full_buffers == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_full_buffers_never_exceed_prefetch_and_one(prefetch: int) -> None:
    run_on_fake_group(most_alive, 2, prefetch, 3)


class Reordered(Model):
    """Another order in every pass."""

    def __init__(self) -> None:
        super().__init__(layers=6)
        self.turn = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        self.turn += 1
        for index in range(6):
            x = self.layers[index * (self.turn % 5 + 1) % 7 % 6](x)
        return self.head(x)


def most_alive_dynamic(prefetch: int) -> None:
    recorded = Recorded(prefetch, Reordered)
    for _ in range(6):
        recorded.step()
        assert recorded.ctx.stats.current_full_buffers == 0
    assert recorded.ctx.stats.peak_full_buffers <= prefetch + 1 + 1
    assert recorded.ctx.stats.prefetches_unused > 0 or prefetch == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_wrong_predictions_stay_within_the_same_memory(prefetch: int) -> None:
    run_on_fake_group(most_alive_dynamic, 2, prefetch)


def learns_again() -> None:
    recorded = Recorded(build=lambda: Model(layers=4))
    model = recorded.model
    recorded.step()
    model.layers = nn.ModuleList([model.layers[index] for index in (2, 0, 3, 1)])
    recorded.step()
    recorded.ctx.stats.reset()
    recorded.step()
    # All but the root's, which comes first.
    assert recorded.ctx.stats.prefetch_misses == 1
    assert recorded.ctx.stats.prefetch_hits == 8
    assert recorded.ctx.stats.prefetches_unused == 0


def test_a_new_order_is_learned_in_one_pass() -> None:
    run_on_fake_group(learns_again, 2)


def separate(separate_reduce_scatter_group: bool) -> None:
    ctx = FsdpContext(separate_reduce_scatter_group=separate_reduce_scatter_group)
    model = Model()
    shard_layers(model, ctx)
    model(torch.zeros(1, 1, dtype=torch.int64))
    assert (ctx.groups.gather is not ctx.groups.reduce) == separate_reduce_scatter_group
    assert ctx.comm_context.all_gather_stream is not ctx.comm_context.reduce_scatter_stream


@pytest.mark.parametrize("separate_reduce_scatter_group", [True, False])
def test_lanes_have_groups_of_their_own(separate_reduce_scatter_group: bool) -> None:
    run_on_fake_group(separate, 2, separate_reduce_scatter_group)


def lazily_made() -> None:
    for mesh, comm_streams in (((2,), {GATHER, REDUCE}), ((2, 1), {GATHER, REDUCE, "all_reduce"})):
        ctx = FsdpContext(init_device_mesh("cpu", mesh, mesh_dim_names=NAMES[-len(mesh) :]))
        made: list[str] = []
        ctx.comm_stream_factory = lambda name, device, made=made: (
            made.append(name) or HostCommStream()
        )
        groups = set(dist.distributed_c10d._world.pg_map)
        model = Model()
        shard_layers(model, ctx)
        assert made == []
        assert set(dist.distributed_c10d._world.pg_map) == groups
        for _ in range(2):
            model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
            used = ctx.groups
            assert sorted(made) == sorted(comm_streams)  # each once
            # Of one rank, the mesh's own serves.
            own = {used.gather, used.reduce} if len(mesh) == 1 else {used.replicas}
            assert own <= set(dist.distributed_c10d._world.pg_map) - groups


def test_lanes_and_groups_are_made_at_first_use() -> None:
    run_ranks(lazily_made, 2)


def counts(
    build: Callable[[], nn.Module], gathers: int, reduces: int, with_gradients: bool
) -> None:
    recorded = Recorded(build=build)
    recorded.step()
    for _ in range(2):
        recorded.ctx.stats.reset()
        with torch.set_grad_enabled(with_gradients):
            loss = recorded.forward()
        if with_gradients:
            loss.backward()
        stats = recorded.ctx.stats
        assert (stats.all_gathers, stats.reduce_scatters) == (gathers, reduces)
        assert stats.order_checks == with_gradients


def five_layers() -> nn.Module:
    return Model(layers=5)


@pytest.mark.parametrize(
    ("build", "gathers", "reduces", "with_gradients"),
    [
        (five_layers, 1 + 5 + 4, 6, True),
        (five_layers, 6, 0, False),
        (Checkpointed, 1 + 3 + 2, 4, True),
        # 0, 1, 0, 0, 1: a unit that is expected next is not freed, also while another runs twice.
        (SharedLayer, 1 + 2 + 1, 3, True),
    ],
)
def test_one_all_gather_a_use_and_one_reduce_scatter_a_backward(
    build: Callable[[], nn.Module], gathers: int, reduces: int, with_gradients: bool
) -> None:
    run_on_fake_group(counts, 2, build, gathers, reduces, with_gradients)


def bytes_counted() -> None:
    twins = Twins.of("root only")
    twins.ctx.stats.reset()
    twins.backward(*next(twins.batches(1)))
    [unit] = twins.ctx.units
    nbytes = unit.param_groups[0].plan.numel * 8
    assert twins.ctx.stats.all_gather_bytes == nbytes
    assert twins.ctx.stats.reduce_scatter_bytes == nbytes
    assert "all-gathers 1 (0.0 MiB), reduce-scatters 1" in repr(twins.ctx.stats)


def test_bytes_are_counted() -> None:
    run_ranks(bytes_counted, 2)


class Wandering(Model):
    """Layers 0, 1, 0 in one pass, 0, 1, 2 in another."""

    order: tuple[int, ...] = (0, 1, 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x)


class MarkingCommStream(RecordingCommStream):
    """Notes which frees wait for compute."""

    def record_compute_event(self) -> str:
        return "compute"

    def free(self, label: str, buffer: FlatBuffer, after: ComputeEvent, waits: bool = True) -> None:
        self.log.append(Entry(self.name, "free after", str(after), label))
        super().free(label, buffer, after, waits)


def used_then_kept_in_vain() -> None:
    """What was used and then kept for a use that did not come is freed after the compute on it."""
    recorded = Recorded(build=Wandering)
    recorded.ctx.comm_stream_factory = lambda name, device: MarkingCommStream(name, recorded.log)
    with torch.no_grad():
        recorded.forward()
        recorded.model.order = (0, 1, 2)
        log = recorded.recorded(recorded.forward)
    freed = [entry.kind for entry in log if (entry.action, entry.label) == ("free after", layer(0))]
    # The second time it was gathered ahead, and nothing computed with it.
    assert freed == ["compute", "None"]


def test_a_used_buffer_is_always_freed_after_its_compute() -> None:
    run_on_fake_group(used_then_kept_in_vain, 2)


def test_statistics_are_counted_anew_and_not_replaced() -> None:
    """In place of others they would count a part alone."""
    with pytest.raises(AttributeError, match="stats"):
        FsdpContext().stats = Stats()  # type: ignore[misc]
