"""Pure planning: shapes and a world size in, offsets and ranges out. No process groups, no
tensors."""

from fsdp_overlap.layout.bucket_plan import BucketPlan
from fsdp_overlap.layout.layouts import Blocks, Flat, Layout, LayoutRule, Rows, Whole
from fsdp_overlap.layout.planner import Plan, plan_units
from fsdp_overlap.layout.rows_plan import RowsPlan
from fsdp_overlap.layout.spec import ParamSpec

__all__ = [
    "Blocks",
    "BucketPlan",
    "Flat",
    "Layout",
    "LayoutRule",
    "ParamSpec",
    "Plan",
    "Rows",
    "RowsPlan",
    "Whole",
    "plan_units",
]
