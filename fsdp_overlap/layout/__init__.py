"""Pure planning: shapes and a world size in, offsets and ranges out. No process groups, no
tensors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp_overlap.layout.plan import Flat, Layout, LayoutRule, ParamGroupPlan, ParamSpec, Plan

if TYPE_CHECKING:
    from fsdp_overlap.layout.balanced_planner import plan_units
    from fsdp_overlap.layout.layouts import BlockAtomic, TensorAtomic

__all__ = [
    "BlockAtomic",
    "Flat",
    "Layout",
    "LayoutRule",
    "ParamGroupPlan",
    "ParamSpec",
    "Plan",
    "TensorAtomic",
    "plan_units",
]

_MODULE_OF = {"BlockAtomic": "layouts", "TensorAtomic": "layouts", "plan_units": "balanced_planner"}
"""What ``Flat()`` needs nothing of, which is imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value
