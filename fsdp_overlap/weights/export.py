"""Whole weights of a sharded model, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap.comm.streams import has_streams, streams_of
from fsdp_overlap.weights.exchange import WeightExchange, exchange_of
from fsdp_overlap.weights.tensor_chunks import Chunk, full_chunk, local_chunks
from fsdp_overlap.weights.tensors import Names, checked, renamed, weights_of
from fsdp_overlap.weights.transfer_plan import (
    Layouts,
    TensorLayout,
    TransferRound,
    wants_all,
    whole_of,
)


def export_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    ranks: Collection[int] | None = None,
    names: Names | None = None,
    prefetch: int = 1,
    piece_bytes: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the whole weights of a sharded model, in its order, with their names.

    Parameters and persistent buffers come once each, also where several modules share one. They
    travel in pieces. A rank has memory for the weight that is used, for those that the next pieces
    are of, and for ``prefetch + 1`` pieces. A weight is the reader's own: it stays as it is.
    Nothing of the model is gathered or freed.

    Args:
        model: the model, or a part of one, whose modules :func:`fully_shard` got. Others are
            exported as they are.
        dtype: what floating-point weights are cast to. They are cast before they travel where that
            makes them smaller.
        ranks: the global ranks that need the weights, all by default. On other ranks the iterator
            yields nothing, and must be run to its end all the same.
        names: gives the name to yield for a name in the model, or ``None`` for a weight to leave
            out.
        prefetch: how many pieces travel ahead of use.
        piece_bytes: the size of a piece, by default a quarter of the largest weight, at most 64
            MiB.

    The call is collective: it compares what ranks have and plans, and reads no value. The loop
    reads each piece when it sets off, from the first ``next()`` on. So a step between the call and
    the loop is exported, and one within the loop would mix weights of before and after: train on
    when the loop has ended.

    Call it on every rank that the model lies over, with the same arguments, between steps. Where
    there are replicas of shards (HSDP), each copy of the model may be exported without the others.
    If ranks have different tensors of the same name, as experts that are plain tensors, each rank
    gets that of its own mesh.

    Raises:
        RuntimeError: a weight is on the meta device; or a rank failed, or went on without the
            export; names it.
        ValueError: ranks gave other arguments, or have weights of the same name that differ in
            shape or dtype; ``names`` gives a name twice; or ``prefetch`` is negative.
    """
    found = weights_of(model)
    exchange = exchange_of(model, found.values(), "export_weights")
    targets = None if ranks is None else sorted(ranks)

    def find() -> Mapping[str, torch.Tensor]:
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} is not a number of pieces; use 0 or more")
        return checked(renamed(found, names))

    def make(has: Layouts) -> list[TransferRound]:
        """Let each target rank want all that it has."""
        places = exchange.places
        among = None if targets is None else {places[rank] for rank in targets if rank in places}
        wants = wants_all(has, dtype, among)
        return exchange.rounds(
            exchange.plan_transfers(has, wants, strict=False, one=False), piece_bytes
        )

    arguments = f"dtype={dtype}, ranks={targets}, prefetch={prefetch}, piece_bytes={piece_bytes}"
    weights, plan = exchange.planned(find, arguments, make)
    is_target = targets is None or (dist.get_rank() if dist.is_initialized() else 0) in targets
    wants = {n: whole_of(w.shape, w.dtype, dtype) for n, w in weights.items()} if is_target else {}
    return whole_weights(exchange, plan.rounds, weights, wants, prefetch)


def whole_weights(
    exchange: WeightExchange,
    rounds: list[TransferRound],
    weights: Mapping[str, torch.Tensor],
    wants: dict[str, TensorLayout],
    prefetch: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the weights that this rank ``wants`` as they are complete, after so many
    ``rounds``."""
    arriving: dict[str, torch.Tensor] = {}

    def sources(name: str) -> list[tuple[Chunk, torch.Tensor]]:
        return local_chunks(weights[name])

    def targets(name: str) -> list[tuple[Chunk, torch.Tensor]]:
        if name not in arriving:
            shape, dtype, *_ = wants[name]
            arriving[name] = torch.empty(shape, dtype=dtype, device=exchange.device)
        return [(full_chunk(wants[name].shape), arriving[name])]

    messages = ((each, each.messages(exchange.rank)) for each in rounds)
    for done, _ in exchange.run(messages, sources, targets, prefetch):
        for name in done.completes:
            if name in wants:
                targets(name)  # has memory by now, but for one without elements
                yield name, handed_over(arriving.pop(name))


def handed_over(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, which a comm stream made, for compute to use."""
    if has_streams(tensor.device):
        tensor.record_stream(streams_of(tensor.device).current_stream())
    return tensor
