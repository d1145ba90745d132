"""Plans of exchanges, kept for the next one of the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.engine.context import FsdpContext
from fsdp_overlap.weights.transfer_plan import Layouts, TransferRound

# An export for evaluation and one for generation take turns, and files are written now and then.
_MAX_PLANS = 4


@dataclass(frozen=True)
class ExchangePlan:
    """What all ranks planned. Knows no tensor, so that it keeps none alive."""

    number: int
    """The same on all ranks, and another for each other plan."""
    has: Layouts
    rounds: list[TransferRound]


TensorLayouts = list[tuple[object, torch.Size, torch.dtype]]


class PlanCache:
    """The last few plans of one context, on this rank."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[str, ...]], tuple[TensorLayouts, ExchangePlan]] = {}

    def find(self, arguments: str, weights: Mapping[str, torch.Tensor]) -> ExchangePlan | None:
        """The plan that was kept for the same ``arguments``, if ``weights`` lie as they did. The
        other ranks may have none."""
        layouts, plan = self._kept.get((arguments, tuple(weights)), ([], None))
        same = layouts and all(
            one is other and its == own
            for (one, *its), (other, *own) in zip(layouts, _layouts_of(weights), strict=True)
        )
        return plan if same else None

    def keep(self, arguments: str, weights: Mapping[str, torch.Tensor], plan: ExchangePlan) -> None:
        """Keep ``plan``, and drop the oldest if there are many."""
        key = arguments, tuple(weights)
        self._kept.pop(key, None)
        self._kept[key] = _layouts_of(weights), plan
        if len(self._kept) > _MAX_PLANS:
            del self._kept[next(iter(self._kept))]

    def clear(self) -> None:
        """Drop all plans."""
        self._kept.clear()


def plan_cache_of(context: FsdpContext) -> PlanCache:
    """The plans of ``context``, which go with it."""
    return _of_contexts.setdefault(context, PlanCache())


_of_contexts: WeakKeyDictionary[FsdpContext, PlanCache] = WeakKeyDictionary()


def _layouts_of(weights: Mapping[str, torch.Tensor]) -> TensorLayouts:
    """Return how each of ``weights`` lies. A tensor that lies otherwise has another spec."""
    return [
        (tensor._spec if isinstance(tensor, DTensor) else None, tensor.shape, tensor.dtype)
        for tensor in weights.values()
    ]


def hash_of(*what: object) -> int:
    """A number for ``what``, by its ``repr``, of 56 bits. The same on all ranks."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=7).digest(), "little")
