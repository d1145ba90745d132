"""The policy of a unit whose matrices travel in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from fsdp_overlap.comm.collectives import CollectivePair, Collectives
from fsdp_overlap.comm.process_groups import communicates
from fsdp_overlap.engine.param_group import ParamGroup, sent_sizes
from fsdp_overlap.features.custom_collectives import CustomComms
from fsdp_overlap.features.quantized.choice import gather_for, reduction_for
from fsdp_overlap.features.quantized.codes import LARGEST, POWERS_OF_TWO, scale_dtype_for
from fsdp_overlap.features.quantized.collectives import QuantizedFormat
from fsdp_overlap.features.quantized.plan import (
    Block,
    BlockSize,
    QuantizedPlan,
    block_in,
    block_numel,
    shard_plan,
)
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout import ParamGroupPlan, ParamSpec, Plan

SCALED = tuple(LARGEST)
"""The dtypes of codes that have scales."""

ROUNDED = (torch.bfloat16,)
"""Those of codes that are numbers by themselves."""

_NUMBER = (1, 1)
"""The rows and columns of a block of one number."""


@dataclass(frozen=True)
class QuantizedCommPolicy:
    """Sends the matrices of a unit in few bits: when they are gathered, when their gradients are
    reduced, or both.

    A rank quantizes its shard, and compute sees what codes and scales stand for, in the dtype that
    it wants. Sharded parameters, gradients, optimizer states and checkpoints keep their full
    precision. What compute sees does not depend on the number of ranks. Gradients are quantized by
    each rank and summed in the reduce dtype, at least float32, so that an error is made once for
    each rank and never in a sum.

    Parameters of less than two dimensions, and those that are no floating-point numbers, travel in
    full, in the same collective.

    Args:
        gather_dtype: the dtype of codes of weights: ``torch.float8_e4m3fn``,
            ``torch.float8_e5m2`` or ``torch.int8``. ``None``: gathers stay as they are.
        reduce_dtype: the same for gradients, or ``torch.bfloat16``, which needs no scales.
        block: how many rows and columns of a matrix share a scale; ``None`` stands for all. ``(1,
            None)`` is a scale for each row, ``(1, 32)`` for 32 neighbors in a row. Rows lie along
            the last dimension. No layout cuts a block, and with ``(None, None)`` no matrix.
        powers_of_two: whether scales are powers of two, in a byte each, as in the MX formats. Else
            they have the dtype of compute or of the reduction, if that is float32 or bfloat16, and
            float32 for others.
        keep: which matrices travel in full all the same: names, as in the unit, or patterns of the
            shell, such as ``"*.router.weight"``. They are a param group of their own, unless the
            unit was planned ahead.

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
            allowed = {"gather_dtype": SCALED, "reduce_dtype": (*SCALED, *ROUNDED)}[name]
            if dtype is not None and dtype not in allowed:
                raise ValueError(
                    f"QuantizedCommPolicy({name}={dtype}): use one of "
                    f"{', '.join(map(str, allowed))}; for other floating-point numbers, use "
                    "MixedPrecisionPolicy"
                )
        if not any(dtypes.values()):
            raise ValueError(
                "QuantizedCommPolicy() says nothing: name a gather_dtype or a reduce_dtype"
            )
        sizes = self.block if type(self.block) is tuple and len(self.block) == 2 else ("?", "?")
        if any(size is not None and (type(size) is not int or size < 1) for size in sizes):
            raise ValueError(
                f"QuantizedCommPolicy(block={self.block!r}): name the rows and the columns that "
                "share a scale, each a number of at least 1 or None for all, such as (1, None) or "
                "(1, 32)"
            )
        if type(self.keep) is not tuple or any(type(name) is not str for name in self.keep):
            raise TypeError(
                f"QuantizedCommPolicy(keep={self.keep!r}): use a tuple of names or patterns"
            )

    def block_in(self, spec: ParamSpec) -> BlockSize | None:
        """Return the rows and columns that share a scale. ``None`` if the parameter travels in
        full.

        Raises:
            ValueError: the parameter cannot be divided into such blocks.
        """
        if spec.ndim < 2 or not spec.numel or not spec.dtype.is_floating_point:
            return None
        if spec.dtype.itemsize == 1 or spec.never_cast:
            return None
        if self.keeps(spec):
            return None
        return block_in(spec, self.block) if self._has_scales else _NUMBER

    def keeps(self, spec: ParamSpec) -> bool:
        """Return whether the user asked that a matrix travels in full."""
        return spec.ndim > 1 and any(fnmatchcase(spec.fqn, pattern) for pattern in self.keep)

    def block_numel(self, spec: ParamSpec) -> int:
        """Return the number of neighboring elements that no layout may cut."""
        size = self.block_in(spec)
        return 1 if size is None else block_numel(spec, size)

    def check(self, plan: Plan) -> None:
        """Check that a param group can travel so.

        Raises:
            ValueError: the plan cuts a block.
        """
        for codes in (self.gather_dtype, self.reduce_dtype):
            if codes is not None:
                self.wire(plan, torch.float32, codes)

    def applies_to(self, plan: Plan) -> bool:
        """Return whether any parameter of a param group is quantized."""
        return any(self.block_in(spec) is not None for spec in plan.specs)

    def wire(self, plan: Plan, dtype: torch.dtype, codes: torch.dtype) -> QuantizedPlan:
        """Return what ranks send of a param group whose elements have ``dtype``, as ``codes``. If
        it is in rows, what one rank sends.

        Raises:
            ValueError: the plan cuts a block.
        """
        blocks = tuple(map(self.block_in, plan.specs))
        if codes in ROUNDED:
            blocks = tuple(None if size is None else _NUMBER for size in blocks)
        scales = self.scale_dtype(dtype, codes)
        return QuantizedPlan(
            shard_plan(plan, blocks) if isinstance(plan, RowsPlan) else plan.packed,
            blocks,
            codes.itemsize,
            0 if scales is None else scales.itemsize,
            dtype.itemsize,
        )

    def scale_dtype(self, dtype: torch.dtype, codes: torch.dtype) -> torch.dtype | None:
        """Return the dtype of scales of elements of ``dtype``, if they have any as ``codes``."""
        if codes in ROUNDED:
            return None
        return POWERS_OF_TWO if self.powers_of_two else scale_dtype_for(dtype)

    @property
    def _has_scales(self) -> bool:
        return self.gather_dtype is not None or self.reduce_dtype not in ROUNDED

    def sent_sizes(self, plan: Plan, dtype: torch.dtype, reduced: bool) -> list[int]:
        """Return how many bytes each rank sends of a param group of ``dtype``, or gets of its
        gradients if they are ``reduced``."""
        codes = self.reduce_dtype if reduced else self.gather_dtype
        if codes is None or not self.applies_to(plan):
            return sent_sizes(plan, dtype, None)
        sizes = self.wire(plan, dtype, codes).packed.shard_numels
        return [*sizes] * (plan.world_size // len(sizes))  # all are alike in rows

    def wrap(self, collectives: Collectives, param_group: ParamGroup) -> Collectives:
        """Return what gathers and reduces ``param_group`` so, if it has a parameter for that."""
        plan, group, policy = param_group.gather_plan, param_group.groups.gather, self
        if not self.applies_to(plan):
            return collectives
        assert isinstance(plan, ParamGroupPlan | RowsPlan)
        transport = param_group.transport
        if (
            self.reduce_dtype is not None
            and isinstance(transport, CustomComms)
            and transport.reduce_scatter
        ):
            raise ValueError(
                "set_custom_reduce_scatter() and QuantizedCommPolicy(reduce_dtype=...): gradients "
                "in few bits are sent by an all-to-all and summed after; leave one of the two out"
            )
        gather, reduce = collectives.all_gather, collectives.reduce_scatter

        def wire(dtype: torch.dtype, codes: torch.dtype) -> QuantizedFormat:
            travels = policy.wire(plan, dtype, codes)
            own = travels.segment(0 if isinstance(plan, RowsPlan) else group.rank())
            return QuantizedFormat(travels, own, codes, policy.scale_dtype(dtype, codes))

        if self.gather_dtype is not None:
            sent = wire(param_group.compute_dtype, self.gather_dtype)
            gather = gather_for(sent, plan, param_group.carriers, param_group.device).all_gather
        if self.reduce_dtype is not None and communicates(group):
            sent = wire(param_group.reduce_dtype, self.reduce_dtype)
            reduce = reduction_for(sent, plan, param_group.device).reduce_scatter
        return CollectivePair(gather, reduce)
