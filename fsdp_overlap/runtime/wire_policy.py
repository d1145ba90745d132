"""What the user asks of collectives: to send fewer bits than compute and gradients have."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from fsdp_overlap.layout import ParamSpec, Plan, RowsPlan
from fsdp_overlap.layout.wire_plan import (
    Block,
    BlockSize,
    WirePlan,
    block_in,
    grain_of,
    one_rank,
)
from fsdp_overlap.tensor.quantization import LARGEST, POWERS_OF_TWO, scale_dtype_for


@dataclass(frozen=True)
class WirePolicy:
    """Sends the matrices of a unit in 8 bits: when they are gathered, when their gradients are
    reduced, or both.

    A rank quantizes its shard, codes and scales travel, and compute sees what these stand for, in
    the dtype that it wants. Sharded parameters, gradients, optimizer states and checkpoints keep
    their full precision. Gradients are those of the quantized weights, and are given to the sharded
    parameters as they are. What compute sees does not depend on the number of ranks.

    A rank quantizes what others get of its gradients, too. They arrive one by one and are summed in
    the dtype in which gradients are reduced, so that an error is made once for each rank and never
    in a sum.

    Parameters of less than two dimensions, and those that are no floating-point numbers, travel in
    full, in the same collective.

    Args:
        gather_dtype: the dtype of codes of weights: ``torch.float8_e4m3fn``,
            ``torch.float8_e5m2`` or ``torch.int8``. ``None``: gathers stay as they are.
        reduce_dtype: the same for gradients.
        block: how many rows and columns of a matrix share a scale; ``None`` stands for all. ``(1,
            None)`` is a scale for each row, ``(1, 32)`` for 32 neighbours in a row. Rows lie along
            the last dimension, also of a stack of matrices. Parameters are cut between blocks
            alone, whatever else the layout allows. With one scale for a whole matrix, ``(None,
            None)``, none is cut, as under ``Whole()``.
        powers_of_two: whether scales are powers of two, in a byte each, as in the MX formats. Else
            they have the dtype of compute or of the reduction, if that is float32 or bfloat16, and
            float32 for others.
        keep: which matrices travel in full all the same: names, as in the unit, or patterns of the
            shell, such as ``"*.router.weight"``.

    Raises:
        ValueError: there are no codes of that dtype, or no blocks of that size.
        TypeError: ``keep`` is not a tuple of strings.
    """

    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    block: Block = (1, None)
    powers_of_two: bool = False
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        dtypes = {"gather_dtype": self.gather_dtype, "reduce_dtype": self.reduce_dtype}
        for name, dtype in dtypes.items():
            if dtype is not None and dtype not in LARGEST:
                raise ValueError(
                    f"WirePolicy({name}={dtype}): use one of {', '.join(map(str, LARGEST))}; for "
                    "wider floating-point numbers, use MixedPrecisionPolicy"
                )
        if not any(dtypes.values()):
            raise ValueError("WirePolicy() says nothing: name a gather_dtype or a reduce_dtype")
        sizes = self.block if type(self.block) is tuple and len(self.block) == 2 else ("?", "?")
        if any(size is not None and (type(size) is not int or size < 1) for size in sizes):
            raise ValueError(
                f"WirePolicy(block={self.block!r}): name the rows and the columns that share a "
                "scale, each a number of at least 1 or None for all, such as (1, None) or (1, 32)"
            )
        if type(self.keep) is not tuple or any(type(each) is not str for each in self.keep):
            raise TypeError(f"WirePolicy(keep={self.keep!r}): use a tuple of names or patterns")

    def block_in(self, spec: ParamSpec) -> BlockSize | None:
        """The rows and columns that share a scale. ``None`` if the parameter travels in full.

        Raises:
            ValueError: the parameter cannot be divided into such blocks.
        """
        if spec.ndim < 2 or not spec.numel or not spec.dtype.is_floating_point:
            return None
        if spec.dtype.itemsize == 1 or spec.is_opaque:
            return None
        if any(fnmatchcase(spec.fqn, pattern) for pattern in self.keep):
            return None
        return block_in(spec, self.block)

    def grain(self, spec: ParamSpec) -> int:
        """The number of neighbouring elements that no layout may cut."""
        size = self.block_in(spec)
        return 1 if size is None else grain_of(spec, size)

    def check(self, plan: Plan) -> None:
        """Checks that a bucket can travel so.

        Raises:
            ValueError: the plan cuts a block, or it is in rows, whose gradients travel in full.
        """
        self.wire(plan, torch.float32)
        if self.reduce_dtype is not None and isinstance(plan, RowsPlan):
            raise ValueError(
                f"parameter {plan.specs[0].fqn!r} is in Rows(), of which gradients travel in full: "
                "leave out WirePolicy(reduce_dtype=...), or choose another layout"
            )

    def applies_to(self, plan: Plan) -> bool:
        """Whether any parameter of a bucket is quantized."""
        return any(self.block_in(spec) is not None for spec in plan.specs)

    def wire(self, plan: Plan, dtype: torch.dtype) -> WirePlan:
        """What ranks send of a bucket whose elements have ``dtype``. If it is in rows, what one
        rank sends.

        Raises:
            ValueError: the plan cuts a block.
        """
        blocks = tuple(map(self.block_in, plan.specs))
        return WirePlan(
            one_rank(plan, blocks) if isinstance(plan, RowsPlan) else plan,
            blocks,
            self.scale_dtype(dtype).itemsize,
            dtype.itemsize,
        )

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of scales of elements of ``dtype``."""
        return POWERS_OF_TWO if self.powers_of_two else scale_dtype_for(dtype)


def sent_sizes(plan: Plan, dtype: torch.dtype, policy: WirePolicy | None) -> list[int]:
    """How many bytes each rank sends of a bucket, or gets of its gradients. ``policy``: by which it
    is quantized, if it is."""
    if policy is None or not policy.applies_to(plan):
        return [numel * dtype.itemsize for numel in plan.shard_numels]
    sizes = policy.wire(plan, dtype).packed.shard_numels
    return [*sizes] * (plan.world_size // len(sizes))  # all are alike in rows
