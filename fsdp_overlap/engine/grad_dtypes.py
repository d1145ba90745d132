"""Dtypes that users set for gradients after parameters were sharded, and before their unit runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_overlap.engine.bucket import Bucket


def follow_grad_dtypes(buckets: Sequence[Bucket]) -> None:
    """Makes the ``grad_dtype`` of sharded parameters that of their buckets. It cannot change any
    more once their unit was gathered.

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
        # Also the parameters' own dtype if somebody set it: compute may have another, in which
        # autograd would sum.
        given = (each._given_grad_dtype for each in bucket.sharded_parameters)
        dtype = next((each for each in given if each is not None), None)
        if dtype is not None and dtype != bucket.plan.specs[0].grad_dtype:
            bucket.grad_dtype = dtype
            specs = tuple(replace(spec, grad_dtype=dtype) for spec in bucket.plan.specs)
            bucket.plan = replace(bucket.plan, specs=specs)
