"""Predict steps whose shards, gradients and optimizer states rest on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fsdp_overlap.blocks import find_blocks
from fsdp_overlap.layout import Flat
from fsdp_overlap.optim import OverlapPolicy
from fsdp_overlap.tools.simulator.costs import Costs
from fsdp_overlap.tools.simulator.hardware import Fabric, Host
from fsdp_overlap.tools.simulator.models import model_of, on_meta
from fsdp_overlap.tools.simulator.simulate import Prediction, simulate
from fsdp_overlap.tools.simulator.training import Training

AT_REST = 4
"""Bytes of an element of a shard, of its gradient and of each moment: float32."""
OF_ADAMW = 7 * AT_REST
"""Bytes that a step reads and writes for an element: four tensors are read, three are written."""
FORWARD = {"none": 1 / 3, "selective": 2 / 7, "full": 1 / 4}
"""The share of forward in compute, by what is recomputed in backward."""
STEPS = 4  # until the steps are alike


class OffloadedUnit(NamedTuple):
    """What a unit takes in a step, in seconds. ``fetch``: from the host until it is gathered;
    ``send``: from the end of its backward until its gradient is on the host; ``step``: on the host,
    beside copies; ``cast``: of the shard, by the host, to the dtype that is gathered."""

    fetch: float
    forward: float
    backward: float
    send: float
    step: float
    cast: float = 0.0


@dataclass(frozen=True)
class OffloadPrediction:
    """A step of training with ``CPUOffloadPolicy()``, in seconds and bytes.

    Args:
        in_step: the seconds of a step if the optimizer steps after backward.
        overlapped: with ``OverlapPolicy()``.
        clipped: with ``OverlapPolicy(max_norm=...)``.
        compute: seconds of compute alone.
        copies: of copies to the device, the direction that takes longer.
        optimizer: of the optimizer, beside copies.
        memory: the most bytes on a device, without what the allocator keeps.
        host_memory: the bytes of a rank on the host.
    """

    in_step: float
    overlapped: float
    clipped: float
    compute: float
    copies: float
    optimizer: float
    memory: int
    host_memory: int


def predict_offload(
    training: Training,
    costs: Costs,
    host: Host,
    resident: Prediction,
    buffer_bytes: int = OverlapPolicy().buffer_bytes,
) -> OffloadPrediction:
    """Predict ``training`` with all that rests on ``host``.

    The compute of a block is that of the ``resident`` prediction of the same training, and of one
    with a single block. Copies, steps and compute wait for each other as they do in training.

    Raises:
        ValueError: the step has another optimizer than AdamW or another option that is not
            modelled, or the model has no two equal blocks.
    """
    plain = replace(
        training,
        optimizer="adamw",
        microbatches=1,
        replicas=1,
        expert_parallel=1,
        tensor_parallel=1,
        context_parallel=1,
        blocks_per_unit=1,
        layout=Flat(),
        implicit_units=False,
        dtype=torch.float32,
        reshard_after_forward=None,
    )
    model = on_meta(model_of(training.model))
    if plain != training or training.stage != 3 or model is None:
        raise ValueError(
            "offloading is predicted of AdamW in float32 at stage 3, of one microbatch, of blocks "
            "that are a flat unit each, and without replicas or ranks that share experts, products "
            "or sequences: leave the other options out"
        )
    blocks = find_blocks(model)
    if training.blocks is not None:
        blocks = blocks[: training.blocks]
    if len(blocks) < 2:
        raise ValueError(
            f"offloading is predicted from equal blocks, of which {training.model} has "
            f"{len(blocks)}: it must have 2 or more"
        )
    in_block = sum(parameter.numel() for parameter in blocks[0].parameters())
    of_blocks = sum(p.numel() for block in find_blocks(model) for p in block.parameters())
    in_root = sum(parameter.numel() for parameter in model.parameters()) - of_blocks
    one = simulate(replace(training, blocks=1).program, training.gpus, costs)
    device = costs.device
    rate = device.memory_bandwidth * device.memory_efficiency / OF_ADAMW * training.gpus
    block = (resident.compute - one.compute) / (len(blocks) - 1)
    compute = [one.compute - block - in_root / rate, *[block - in_block / rate] * len(blocks)]
    share = FORWARD[training.checkpointing]
    memory = host.memory_bandwidth / min(training.gpus, costs.fabric.ranks_a_node)
    sent = min(AT_REST, training.param_dtype.itemsize)
    of_copy = sent if sent < AT_REST else 0  # of the shard
    of_cast = AT_REST + sent if of_copy else 0
    # What moves beside steps: the shard for forward and for backward, the gradient, and casts.
    of_copies = 2 * sent + AT_REST + of_cast
    units = [
        OffloadedUnit(
            fetch=sent * held / host.copy_bandwidth
            + _on_link(costs.fabric, training.gpus, training.param_dtype.itemsize * numel),
            forward=share * seconds,
            backward=(1 - share) * seconds,
            send=AT_REST * held / host.copy_bandwidth
            + _on_link(costs.fabric, training.gpus, training.reduce_dtype.itemsize * numel),
            step=(OF_ADAMW + of_copies) * held / memory,
            cast=of_cast * held / memory,
        )
        for numel, seconds in zip([in_root, *[in_block] * len(blocks)], compute, strict=True)
        for held in [numel / training.gpus]
    ]
    slots = max(2, buffer_bytes // (AT_REST * in_block // training.gpus))
    alone = sum(unit.step for unit in units) * OF_ADAMW / (OF_ADAMW + of_copies)
    activations = max(usage.nbytes["activations"] for usage in resident.usage)
    prefetched = in_root + (1 + training.prefetch) * in_block
    reduced = in_block + max(in_block, in_root)
    elements = (in_root + in_block * len(blocks)) // training.gpus
    return OffloadPrediction(
        in_step=_steady(units, training.prefetch, slots, "in step", alone),
        overlapped=_steady(units, training.prefetch, slots, "overlapped"),
        clipped=_steady(units, training.prefetch, slots, "clipped"),
        compute=sum(unit.forward + unit.backward for unit in units),
        copies=sum(unit.fetch for unit in units) + sum(unit.fetch for unit in units[1:]),
        optimizer=sum(unit.step for unit in units),
        memory=activations
        + training.param_dtype.itemsize * prefetched
        + training.reduce_dtype.itemsize * reduced,
        host_memory=(4 * AT_REST + of_copy) * elements,
    )


def _on_link(fabric: Fabric, ranks: int, nbytes: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter of ``nbytes``, far above latencies."""
    if ranks == 1:
        return 0.0
    link = fabric.within if ranks <= fabric.ranks_a_node else fabric.between
    if link is None:
        raise ValueError(f"{fabric.name} has {fabric.ranks_a_node} ranks; got {ranks}")
    return nbytes * (ranks - 1) / ranks / (link.bandwidth * link.efficiency.at(ranks))


def _steady(
    units: Sequence[OffloadedUnit], prefetch: int, slots: int, how: str, alone: float = 0.0
) -> float:
    """Return the seconds of a step once steps are alike. ``units``: the root, then the blocks, in
    the order of forward. ``alone``: seconds of the optimizer without copies beside it."""
    timeline = _Timeline(units, prefetch, slots if how == "overlapped" else len(units))
    ends = []
    for _ in range(STEPS):
        timeline.run_pass(range(len(units)), is_backward=False)
        timeline.run_pass(range(len(units))[::-1], is_backward=True)
        if how != "overlapped":  # nothing is stepped before all gradients are there
            arrived = max(timeline.waiting.values())
            timeline.thread = max(timeline.thread, arrived)
        if how == "in step":
            timeline.host = timeline.thread = timeline.thread + alone
            timeline.waiting.clear()
        ends.append(max(timeline.computed, timeline.host))
    return ends[-1] - ends[-2]


class _Timeline:
    """When compute, copies to the device, those to the host, the thread and the host are free.

    The host may block: it enqueues the compute of a unit once it has enqueued what is gathered
    ahead, which waits for steps, and in backward once there is memory for the gradient before."""

    def __init__(self, units: Sequence[OffloadedUnit], prefetch: int, slots: int) -> None:
        self.units, self.prefetch, self.slots = units, prefetch, slots
        self.computed = self.fetching = self.sending = self.thread = self.host = 0.0
        self.waiting: dict[int, float] = {}
        """When the gradients of units arrived that are not stepped, in that order."""

    def run_pass(self, order: Sequence[int], is_backward: bool) -> None:
        fetched: list[float] = []
        ended: list[float] = []
        for place, index in enumerate(order):
            while len(fetched) < min(place + self.prefetch + 1, len(order)):
                ahead = len(fetched)
                if order[ahead] in self.waiting and not is_backward:
                    self._run_thread(until=order[ahead])
                before = ahead - self.prefetch - 2
                room = ended[before] if before >= 0 else 0.0
                if not is_backward:
                    self.host += self.units[order[ahead]].cast
                # The root stays gathered from forward to backward.
                seconds = (
                    0.0 if is_backward and order[ahead] == 0 else self.units[order[ahead]].fetch
                )
                self.fetching = max(self.fetching, self.host, room) + seconds
                fetched.append(self.fetching)
            unit = self.units[index]
            seconds = unit.backward if is_backward else unit.forward
            self.computed = max(self.computed, self.host, fetched[place]) + seconds
            ended.append(self.computed)
            if is_backward:
                while len(self.waiting) >= self.slots:
                    self._run_thread()
                self.sending = max(self.sending, self.computed, self.host) + unit.send
                self.waiting[index] = self.sending

    def _run_thread(self, until: int | None = None) -> None:
        """Let the host wait until the thread has stepped one unit, the last that arrived, or all
        ``until`` that one."""
        index = None
        while index is None or (until is not None and index != until):
            there = [i for i, arrived in self.waiting.items() if arrived <= self.thread]
            index = there[-1] if there else min(self.waiting, key=self.waiting.__getitem__)
            self.thread = max(self.thread, self.waiting.pop(index)) + self.units[index].step
        self.host = max(self.host, self.thread)
