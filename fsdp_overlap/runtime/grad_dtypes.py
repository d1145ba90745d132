"""Dtypes that users set for gradients after parameters were sharded, and before their unit runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_overlap.runtime.bucket import Bucket


def follow_grad_dtypes(buckets: Sequence[Bucket]) -> None:
    """Makes the ``grad_dtype`` of sharded parameters that of their buckets. Does nothing for units
    that have run.

    Raises:
        RuntimeError: the parameters of a bucket have several. No bucket was changed then.
    """
    for bucket in buckets:
        found = {each._grad_dtype for each in bucket.sharded_parameters}
        if len(found) > 1:
            raise RuntimeError(
                f"unit {bucket.label!r} has parameters whose grad_dtype is "
                f"{' and '.join(sorted(map(str, found)))}, and their gradients travel together: "
                "set the same for all of them, or set it before fully_shard()"
            )
    for bucket in buckets:
        dtype = bucket.sharded_parameters[0]._grad_dtype
        if dtype != bucket.grad_dtype:
            bucket.grad_dtype = dtype
            specs = tuple(replace(spec, grad_dtype=dtype) for spec in bucket.plan.specs)
            bucket.plan = replace(bucket.plan, specs=specs)
