"""Settings of a unit: dtypes, reduction, quantized communication, and those that methods set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.comm.custom_collectives import CustomComms
from fsdp_overlap.comm.streams import streams_of
from fsdp_overlap.layout import ParamSpec, Plan, RowsPlan
from fsdp_overlap.layout.quantized_plan import (
    Block,
    BlockSize,
    QuantizedPlan,
    block_in,
    block_numel,
    shard_plan,
)
from fsdp_overlap.tensor.quantization import LARGEST, POWERS_OF_TWO, scale_dtype_for

# ---- Dtypes ----


def compute_dtype(spec: ParamSpec, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype that compute uses a parameter in."""
    is_cast = spec.dtype.is_floating_point and not (spec.keeps_dtype or spec.is_opaque)
    return (mp_policy.param_dtype or spec.dtype) if is_cast else spec.dtype


def reduce_dtype(dtype: torch.dtype, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype that gradients kept in ``dtype`` are reduced in. Complex ones keep
    theirs."""
    return (mp_policy.reduce_dtype or dtype) if dtype.is_floating_point else dtype


# ---- How gradients are reduced ----


@dataclass
class ReduceOptions:
    """How a unit's gradients are reduced.

    ``divisor``: what the sum over all ranks is divided by, ``None`` for the number of ranks.
    ``sums_only``: whether collectives must be sums. The division is a step of its own then.
    ``all_reduce_grads``: whether backward reduces over replicas too, or leaves that to a later one.
    ``hook`` is called with this rank's reduced range before it becomes a gradient, on
    ``hook_stream`` if given.
    """

    divisor: float | None = None
    sums_only: bool = False
    all_reduce_grads: bool = True
    hook: Callable[[torch.Tensor], None] | None = None
    hook_stream: torch.Stream | None = None

    def divisor_among_replicas(self, replicas: int) -> float | None:
        """Return the divisor of the reduction across ``replicas``, which comes after that among
        shards. ``None`` stands for their number, by a collective that takes a mean."""
        if self.divisor is not None:
            return 1.0
        return float(replicas) if self.sums_only else None

    def call_hook(self, reduced: torch.Tensor) -> None:
        """Let the user's ``hook``, which is set, see and edit ``reduced``."""
        hook = self.hook
        assert hook is not None
        if self.hook_stream is None:
            hook(reduced)
            return
        streams = streams_of(reduced.device)
        comm_stream = streams.current_stream()
        self.hook_stream.wait_stream(comm_stream)
        with streams.stream(self.hook_stream):
            hook(reduced)
        comm_stream.wait_stream(self.hook_stream)


# ---- What methods of a module set ----


@dataclass
class UnitSettings:
    """What the methods of a module ask of its unit. A copy of a model has the same settings.

    The unit's gradients share the object ``reduce_options``.
    """

    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    reduces_last_only: bool = False
    """Whether only the last backward of a step reduces gradients."""
    is_last_backward: bool = True
    separates_reductions: bool = True
    """Whether reductions run on a process group of their own."""
    uses_group_memory: bool = False
    """Whether full buffers and reduce inputs lie in memory that the backend allocates."""
    uses_symmetric_memory: bool = False
    """Whether what is gathered and reduced travels in symmetric memory."""
    max_reduce_inputs: int | None = None
    comms: CustomComms = field(default_factory=CustomComms)
    reduce_options: ReduceOptions = field(default_factory=ReduceOptions)

    def copy_to(self, other: UnitSettings) -> None:
        """Give ``other`` the same values. Its ``reduce_options`` stays the object that it is."""
        vars(other).update({**vars(self), "reduce_options": other.reduce_options})
        vars(other.reduce_options).update(vars(self.reduce_options))


# ---- Quantized communication ----

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
        if spec.dtype.itemsize == 1 or spec.is_opaque:
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
            shard_plan(plan, blocks) if isinstance(plan, RowsPlan) else plan,
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


def sent_sizes(
    plan: Plan, dtype: torch.dtype, policy: QuantizedCommPolicy | None, codes: torch.dtype | None
) -> list[int]:
    """Return how many bytes each rank sends of a param group of ``dtype``, or gets of its
    gradients, if they travel as ``codes`` by ``policy``. ``None``: they travel as they are."""
    if policy is None or codes is None or not policy.applies_to(plan):
        return [numel * dtype.itemsize for numel in plan.shard_numels]
    sizes = policy.wire(plan, dtype, codes).packed.shard_numels
    return [*sizes] * (plan.world_size // len(sizes))  # all are alike in rows
