"""The plans of a context's units: made ahead or one by one, and the same on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from fsdp_overlap.layout import BucketPlan, LayoutRule, ParamSpec
from fsdp_overlap.layout.plan import Planner
from fsdp_overlap.runtime.ownership import owned_parameters
from fsdp_overlap.runtime.unit import Unit, kind_of

if TYPE_CHECKING:
    from fsdp_overlap.runtime.domain import Domain


class UnitPlans:
    """How units are laid out, also those that are none yet."""

    def __init__(self, world_size: int, layout: LayoutRule) -> None:
        self._planner = Planner(world_size, layout)
        self._ahead: weakref.WeakKeyDictionary[nn.Module, list[BucketPlan]]
        self._ahead = weakref.WeakKeyDictionary()

    def has(self, module: nn.Module) -> bool:
        """Whether ``module`` is the first of a unit that was planned ahead, and is none yet."""
        return module in self._ahead

    def plan(
        self,
        units: Sequence[Sequence[nn.Module]],
        ignored: Collection[nn.Parameter],
        among: Collection[nn.Module],
    ) -> None:
        """Plans all of ``units``, which will be units of these modules, as all modules ``among``
        will be in some, together."""
        owned = [owned_parameters(unit, ignored, among) for unit in units]
        planned = self._planner.plan([[item.spec for item in items] for items in owned])
        for unit, plans in zip(units, planned, strict=True):
            self.place(unit, plans)

    def place(self, modules: Sequence[nn.Module], plans: list[BucketPlan]) -> None:
        """Says how ``modules`` are to be laid out when they become a unit."""
        self._ahead[modules[0]] = [*self._ahead.get(modules[0], []), *plans]

    def take(self, modules: Sequence[nn.Module], specs: Sequence[ParamSpec]) -> list[BucketPlan]:
        """For ``modules``, which are becoming a unit of the parameters ``specs``.

        Raises:
            ValueError: other parameters were planned for it.
        """
        plans = self._ahead.get(modules[0])
        if plans is None:
            return self._planner.plan([specs])[0]
        different = {spec for plan in plans for spec in plan.specs} ^ set(specs)
        if different:
            names = sorted({spec.fqn for spec in different})
            more = ", ..." if len(names) > 3 else ""
            raise ValueError(
                f"{kind_of(modules)} was planned with other parameters "
                f"({', '.join(names[:3])}{more}): give plan() all modules that will be units, the "
                "same ignored_params, and parameters as frozen as they will be; units with a "
                "param_dtype_override_fn cannot be planned ahead"
            )
        del self._ahead[modules[0]]
        return plans

    def way_back(self) -> Callable[[], None]:
        """A function that takes back what will have been planned since."""
        loads, ahead = self._planner.loads.copy(), self._ahead.copy()

        def go_back() -> None:
            self._planner.loads, self._ahead = loads, ahead

        return go_back


@contextmanager
def all_or_none(several: Iterable[UnitPlans]) -> Iterator[None]:
    """Takes back what is planned meanwhile if an error ends it."""
    ways_back = [plans.way_back() for plans in several]
    try:
        yield
    except BaseException:
        for go_back in ways_back:
            go_back()
        raise


def check_plannable(units: Sequence[Sequence[nn.Module]], domains: Sequence[Domain]) -> None:
    """Before :meth:`UnitPlans.plan`.

    Raises:
        ValueError: one is a unit already, was planned before, or is named twice.
    """
    modules = [module for unit in units for module in unit]
    for module in modules:
        if "_fsdp_unit" in module.__dict__ or any(d.plans.has(module) for d in domains):
            raise ValueError(
                f"{type(module).__name__} is a unit or was planned already: call plan() once, "
                "before fully_shard()"
            )
    if len(set(modules)) != len(modules):
        raise ValueError("plan() was given a module twice; name each unit once")


def compare_plans(units: Sequence[Unit], domain: Domain) -> None:
    """Collective over the mesh of ``domain``.

    Raises:
        RuntimeError: ranks planned differently.
    """
    mine = [
        (f"{unit.name!r} ({unit.module_kind})", _digest(plans))
        for unit in units
        if (plans := [bucket.plan for bucket in unit.buckets if bucket.domain is domain])
    ]
    of_all = {dist.get_rank(): mine}
    for group in domain.groups.of_all:  # first all of them, so that every rank finds the same
        known = [of_all] * group.size()
        dist.all_gather_object(known, of_all, group)
        of_all = {rank: theirs for part in known for rank, theirs in part.items()}
    first = min(of_all)
    for rank, theirs in sorted(of_all.items()):
        for ours, other in zip_longest(of_all[first], theirs, fillvalue=("none", "")):
            if ours != other:
                raise RuntimeError(
                    f"ranks planned differently: where rank {first} has unit {ours[0]}, rank "
                    f"{rank} has {other[0]}, or the same with other parameters, dtypes or layouts; "
                    "every rank must build the same model and shard it in the same order"
                )


def _digest(plans: list[BucketPlan]) -> str:
    return sha256(repr(plans).encode()).hexdigest()
