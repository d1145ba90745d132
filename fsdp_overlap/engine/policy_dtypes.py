"""In which dtypes a policy has parameters computed with, and gradients reduced."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.layout import ParamSpec


def compute_dtype(spec: ParamSpec, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype that compute uses a parameter in."""
    is_cast = spec.dtype.is_floating_point and not (spec.keeps_dtype or spec.is_opaque)
    return (mp_policy.param_dtype or spec.dtype) if is_cast else spec.dtype


def reduce_dtype(dtype: torch.dtype, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype that gradients kept in ``dtype`` are reduced in. Complex ones keep theirs."""
    return (mp_policy.reduce_dtype or dtype) if dtype.is_floating_point else dtype
