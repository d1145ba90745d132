"""``grad_dtype`` that users set on sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from fsdp_overlap.engine.param_group import ParamGroup


def sync_grad_dtypes(param_groups: Sequence[ParamGroup]) -> None:
    """Make the ``grad_dtype`` of sharded parameters that of their param groups. It cannot change
    any more once their unit was gathered.

    Raises:
        RuntimeError: the parameters of a param group have several. No param group was changed then.
    """
    for param_group in param_groups:
        dtypes = {parameter._grad_dtype for parameter in param_group.sharded_parameters}
        if len(dtypes) > 1:
            _refuse_dtypes(param_group, dtypes)
    for param_group in param_groups:
        # Also the parameters' own dtype if somebody set it: compute may have another, in which
        # autograd would sum.
        given = [parameter._given_grad_dtype for parameter in param_group.sharded_parameters]
        dtype = next((dtype for dtype in given if dtype is not None), None)
        if dtype is not None and dtype != param_group.plan.specs[0].grad_dtype:
            param_group.grad_dtype = dtype
            specs = tuple(replace(spec, grad_dtype=dtype) for spec in param_group.plan.specs)
            param_group.plan = param_group.plan.with_specs(specs)


def _refuse_dtypes(param_group: ParamGroup, dtypes: Iterable[torch.dtype]) -> NoReturn:
    raise RuntimeError(
        f"unit {param_group.label!r} has parameters whose grad_dtype is "
        f"{' and '.join(sorted(map(str, dtypes)))}, and their gradients travel together: set the "
        "same for all of them, or set it before fully_shard()"
    )
