"""Export the full weights of a sharded model, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap.comm.comm_streams import has_streams, streams_of
from fsdp_overlap.weights.chunks import Chunk, full_chunk, local_chunks
from fsdp_overlap.weights.exchange import WeightExchange, exchange_of
from fsdp_overlap.weights.model_weights import Names, renamed, weights_of
from fsdp_overlap.weights.transfer_plan import (
    Layouts,
    TensorLayout,
    TransferRound,
    full_layout,
    want_all,
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
    """Iterate over the full weights of a sharded model, in its order, with their names.

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
    own = weights_of(model)
    exchange = exchange_of(model, own.values(), "export_weights")
    targets = None if ranks is None else sorted(ranks)

    def find() -> Mapping[str, torch.Tensor]:
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} is not a number of pieces; use 0 or more")
        return renamed(own, names)

    def make(has: Layouts) -> list[TransferRound]:
        """Plan that each target rank gets in full what it has parts of."""
        group_ranks = exchange.group_ranks
        among = None if targets is None else {group_ranks[r] for r in targets if r in group_ranks}
        wants = want_all(has, dtype, among)
        tensors = exchange.plan_transfers(has, wants, strict=False, unique_names=False)
        return exchange.rounds(tensors, piece_bytes)

    arguments = f"dtype={dtype}, ranks={targets}, prefetch={prefetch}, piece_bytes={piece_bytes}"
    weights, plan = exchange.planned(find, arguments, make)
    is_target = targets is None or (dist.get_rank() if dist.is_initialized() else 0) in targets
    wanted = weights if is_target else {}
    wants = {name: full_layout(w.shape, w.dtype, dtype) for name, w in wanted.items()}
    return full_weights(exchange, plan.rounds, weights, wants, prefetch)


def full_weights(
    exchange: WeightExchange,
    rounds: list[TransferRound],
    weights: Mapping[str, torch.Tensor],
    wants: dict[str, TensorLayout],
    prefetch: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Run ``rounds``, and yield the weights that this rank ``wants`` as they are complete."""
    arriving: dict[str, torch.Tensor] = {}

    def targets(name: str) -> list[tuple[Chunk, torch.Tensor]]:
        if name not in arriving:
            shape, dtype, *_ = wants[name]
            arriving[name] = torch.empty(shape, dtype=dtype, device=exchange.device)
        return [(full_chunk(wants[name].shape), arriving[name])]

    with_messages = ((one, one.messages(exchange.rank)) for one in rounds)
    for done, _ in exchange.run(
        with_messages, lambda name: local_chunks(weights[name]), targets, prefetch
    ):
        for name in done.completes:
            if name in wants:
                targets(name)  # allocates a weight without elements
                yield name, handed_over(arriving.pop(name))


def handed_over(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, which was allocated on a comm stream, for use on the compute stream."""
    if has_streams(tensor.device):
        tensor.record_stream(streams_of(tensor.device).current_stream())
    return tensor
