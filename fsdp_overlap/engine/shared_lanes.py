"""Several contexts that communicate on the same lanes."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_overlap.engine.context import FsdpContext


def share_lanes(contexts: Sequence[FsdpContext]) -> None:
    """Makes all ``contexts`` communicate on the lanes of the first.

    Raises:
        ValueError: they compute on different devices. Nothing was changed then.
        RuntimeError: one has run already, on lanes of its own. Nothing was changed then.
    """
    first, *others = contexts
    for context in others:
        if context.device != first.device:
            raise ValueError(f"a context on {context.device} cannot use lanes on {first.device}")
        if context.is_settled and context.transfers.gather_lane is not first.transfers.gather_lane:
            raise RuntimeError(
                "a context that has run has lanes of its own: call share_comm_ctx() before the "
                "first forward"
            )
    for context in others:
        context.transfers.use_lanes_of(first.transfers)
