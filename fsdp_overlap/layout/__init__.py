"""Pure planning: shapes and a world size in, offsets and ranges out. No process groups, no
tensors."""

from fsdp_overlap.layout.flat import Flat
from fsdp_overlap.layout.plan import ALIGN_ELEMENTS, BucketPlan, ParamSpec, plan_units

__all__ = ["ALIGN_ELEMENTS", "BucketPlan", "Flat", "ParamSpec", "plan_units"]
