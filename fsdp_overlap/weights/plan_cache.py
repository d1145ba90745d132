"""The last few plans of exchanges, so that an export like an earlier one is not planned again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.engine.context import ModelContext
from fsdp_overlap.weights.transfer_plan import Layouts, TransferRound

# Exports for evaluation and for generation may alternate, and weights be saved now and then.
_MAX_PLANS = 4


@dataclass(frozen=True)
class ExchangePlan:
    """A plan that all ranks made. It refers to no tensor, so that it keeps none alive."""

    number: int
    """A hash of the plan, the same on all ranks."""
    has: Layouts
    rounds: list[TransferRound]


TensorLayouts = list[tuple[object, torch.Size, torch.dtype]]


class PlanCache:
    """The last few plans of a context on this rank."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[str, ...]], tuple[TensorLayouts, ExchangePlan]] = {}

    def find(self, arguments: str, weights: Mapping[str, torch.Tensor]) -> ExchangePlan | None:
        """Return the plan for the same ``arguments`` and layouts of ``weights``. Other ranks may
        have none."""
        layouts, plan = self._kept.get((arguments, tuple(weights)), ([], None))
        same = layouts and all(
            spec is current_spec and plain == current
            for (spec, *plain), (current_spec, *current) in zip(
                layouts, _layouts_of(weights), strict=True
            )
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


def plan_cache_of(context: ModelContext) -> PlanCache:
    """Return the plans of ``context``, which live as long as it."""
    return _of_contexts.setdefault(context, PlanCache())


_of_contexts: WeakKeyDictionary[ModelContext, PlanCache] = WeakKeyDictionary()


def _layouts_of(weights: Mapping[str, torch.Tensor]) -> TensorLayouts:
    """Return the layout of each of ``weights``. One that is sharded anew has another spec."""
    return [
        (tensor._spec if isinstance(tensor, DTensor) else None, tensor.shape, tensor.dtype)
        for tensor in weights.values()
    ]
