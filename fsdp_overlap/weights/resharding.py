"""Copy weights from one sharding to another, without full tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.comm_streams import current_device, make_comm_stream
from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.comm.process_groups import device_for_objects
from fsdp_overlap.engine.context import model_context_of
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.weights.chunks import local_chunks
from fsdp_overlap.weights.exchange import RankLayouts, WeightExchange
from fsdp_overlap.weights.model_weights import Names, renamed, units_of, version_of, weights_of
from fsdp_overlap.weights.transfer_plan import Messages, PlannedTensor, TransferItem, TransferRound

Weights = nn.Module | Mapping[str, torch.Tensor]
"""A model, sharded or not, or tensors by name: plain ones, DTensors, or sharded parameters."""

_PREFETCH = 1  # rounds that are in flight beside the one that is waited for


class WeightResharder:
    """Copies weights from where they are to where they are wanted, as often as you like.

    Each rank sends what another wants of it and nothing else, in pieces. It is planned once, and
    :meth:`run` copies the values of that moment into the tensors of ``target``, which keep their
    memory. Both sides may lie over any ranks of ``group`` in any way: ranges or rows of a sharded
    model, DTensors of tensor parallelism on other ranks, full tensors. Of a plain tensor that
    several ranks have in ``source``, any rank's is taken.

    A tensor of ``target`` may be a view of another. So a weight that is fused elsewhere, as q, k
    and v in one matrix, is given as views of the fused one, each by its own name.

    Args:
        source: the weights that are sent. ``None`` on ranks that have none.
        target: what they are copied into. ``None`` on ranks that want none.
        group: the ranks among which weights move, by default all. Each calls this, and each
            :meth:`run`.
        names: gives the name in ``target`` for a name in ``source``, or ``None`` for a weight that
            stays.
        piece_bytes: the size of a piece, by default a quarter of the largest weight, at most 64
            MiB. A rank has memory for two pieces that it sends, and two that it receives.

    Attributes:
        sent_bytes: what this rank has sent to others in the last :meth:`run`.
        received_bytes: what it has received.

    Raises:
        RuntimeError: a weight is on the meta device, or a rank raised; names it.
        TypeError: a DTensor is a sum that is still to be taken, or a tensor has a class of its own.
        ValueError: names or shapes of the two sides differ, or some elements are nowhere; on all
            ranks, before anything is moved.
    """

    def __init__(
        self,
        source: Weights | None,
        target: Weights | None,
        *,
        group: dist.ProcessGroup | None = None,
        names: Names | None = None,
        piece_bytes: int | None = None,
    ) -> None:
        self.sent_bytes = self.received_bytes = 0
        self._piece_bytes = piece_bytes
        self._sides = source, target
        self._names = names
        self._versions: dict[str, object] = {}
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and group.size() == 1:
            group = None
        device = device_of(source, target, group)
        self._exchange = WeightExchange("Resharding", group, device, make_comm_stream(device))

        def describe() -> RankLayouts:
            self._find()
            return self._exchange.layouts_of(self._source, self._target)

        layouts = self._exchange.gather_layouts(describe, f"piece_bytes={piece_bytes}")
        self._exchange.check_replicas(layouts.has, self._source)
        self._tensors = self._exchange.plan_transfers(
            layouts.has, layouts.wants, strict=True, unique_names=True
        )

    def _find(self) -> None:
        """Find the tensors of both sides, which a module may have replaced."""
        source, target = self._sides
        self._source = renamed(_by_name(source), self._names)
        self._target = renamed(_by_name(target))

    def run(self, *, changed: bool = False) -> None:
        """Copy the weights. Compute enqueued from now on waits for it. Collective.

        Args:
            changed: whether to leave out sharded parameters that were not edited since the last
                :meth:`run`, on any rank. Parameters of one unit that are trainable, or frozen,
                count as one. Other tensors are always copied. Give the same on all ranks.
        """
        finish_pending_steps()
        self._find()
        versions = {name: version_of(tensor) for name, tensor in self._source.items()}
        rounds = self._planned(self._edited(versions)) if changed else self._rounds
        self.sent_bytes = self.received_bytes = 0
        if isinstance(self._sides[1], nn.Module):
            for unit in units_of(self._sides[1]):  # whose parameters may be prefetched
                model_context_of(unit).comm_context.all_gather_stream.before_compute()
        with torch.no_grad():
            for done in self._exchange.run(
                rounds,
                lambda name: local_chunks(self._source[name]),
                lambda name: local_chunks(self._target[name]),
                _PREFETCH,
            ):
                self._count(*done)
        self._versions.update(versions)

    @cached_property
    def _rounds(self) -> list[tuple[TransferRound, Messages]]:
        return self._planned(self._tensors)

    def _planned(self, tensors: list[PlannedTensor]) -> list[tuple[TransferRound, Messages]]:
        """Return the rounds in which ``tensors`` travel, with this rank's messages."""
        rounds = self._exchange.rounds(tensors, self._piece_bytes)
        return [(one, one.messages(self._exchange.rank)) for one in rounds]

    def _edited(self, versions: Mapping[str, object]) -> list[PlannedTensor]:
        """Return the tensors that were edited on some rank since the last run. Collective."""
        own = [
            name
            for name, version in versions.items()
            if version is None or self._versions.get(name) != version
        ]
        edited = set().union(*self._exchange.gather(own))
        return [tensor for tensor in self._tensors if tensor.name in edited]

    def _count(self, done: TransferRound, messages: Messages) -> None:
        me, others = self._exchange.rank, self._exchange.ranks - 1
        for sent in messages.sends.values():
            self.sent_bytes += _nbytes(sent) * (others if done.gathered else 1)
        for rank, received in messages.receives.items():
            self.received_bytes += _nbytes(received) if rank != me else 0


def _nbytes(parts: Sequence[TransferItem]) -> int:
    return sum(part.chunk.numel * part.dtype.itemsize for part in parts)


def _by_name(weights: Weights | None) -> Mapping[str, torch.Tensor]:
    if isinstance(weights, nn.Module):
        return weights_of(weights)
    return weights or {}


def device_of(
    source: Weights | None, target: Weights | None, group: dist.ProcessGroup | None
) -> torch.device:
    """Return the device of messages, of one type on all ranks: an accelerator if some rank's
    tensors are on one, or else the CPU. Collective over ``group``."""
    local_types = [
        tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type
        for side in (source, target)
        for tensor in _by_name(side).values()
        if isinstance(tensor, torch.Tensor)
    ]
    local_type = next((kind for kind in local_types if kind not in ("cpu", "meta")), "cpu")
    types = [local_type]
    if group is not None:
        types = gather_objects(local_type, group, device_for_objects(group), "Resharding")
    return current_device(next((kind for kind in types if kind != "cpu"), "cpu"))
