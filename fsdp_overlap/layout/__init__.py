"""Pure planning: shapes and a world size in, offsets and ranges out. No process groups, no
tensors."""

from fsdp_overlap.layout.layouts import (
    BlockAtomic,
    Flat,
    Layout,
    LayoutRule,
    TensorAtomic,
)
from fsdp_overlap.layout.param_group_plan import ParamGroupPlan, Plan
from fsdp_overlap.layout.planner import plan_units
from fsdp_overlap.layout.spec import ParamSpec

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
