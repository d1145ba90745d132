"""Warnings of numbers that are worse than they need be, in the first steps."""

from __future__ import annotations

import gc
import inspect
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from fsdp_overlap.engine.context import ModelContext
from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.param import modules_outside_units
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.features.dtypes import optimizers_of, state_tensors
from fsdp_overlap.torch_internals import tree_leaves

RANKS = {torch.bfloat16: 64, torch.float16: 4096}
"""From how many ranks on a sum that is rounded at each of them is wrong by 1%, as
``reduction_error.py`` of the benchmarks finds. The error grows with the square root of the number,
and float16 has three bits more."""

MICROBATCHES = {torch.bfloat16: 8, torch.float16: 512}
"""The same for 0.4%: what is summed over ranks then is wrong already."""

LOW = MICROBATCHES.keys()

UNUSED_STEPS = 10
"""How many steps a parameter may have no gradient: an expert may get no tokens, and a tower of a
model of several kinds of data no images."""

LAST_LOOK = 2 * UNUSED_STEPS
"""The step after which a host that runs ahead waits no longer to learn of so many."""

MOMENTS = ("exp_avg", "momentum", "square_avg", "grad_avg", "acc_delta", "sum", "exp_inf", "prev")
"""How names of states begin that are no copies of the parameter."""

PRECISE = ("master", "stochastic", "kahan", "compensat", "residual")
"""Words by which optimizers name what keeps the bits that a weight loses: a copy, the rest of a
rounded sum, or rounding by chance."""

KNOWN = ("torch.optim.", "fsdp_overlap.optim.")
"""Modules of optimizers that have none of these."""


class NumericsWarning(UserWarning):
    """Numbers of a training run are worse than they need be. The first rank of a model's mesh warns
    once of each, in the second step of an optimizer or when it is certain. A message begins with
    its name in brackets, and says what to write instead:

    ``low-precision-step``: an optimizer steps bfloat16 or float16 weights, and nothing shows that
    it keeps float32 copies or compensated sums, or rounds by chance.

    ``low-precision-accumulation``: 8 microbatches or more are added up in bfloat16, or 512 in
    float16, which is an error of 0.4%.

    ``low-precision-reduction``: the gradients of 64 ranks or more are added up in bfloat16, or of
    4096 in float16, which is an error of 1%.

    ``no-gradient-scaler``: compute is in float16, and there is no gradient scaler.

    ``cast-buffer``: a buffer of inverse frequencies, of a rotary embedding, was cast.

    ``no-optimizer``: parameters require grad, and no optimizer has them.

    ``no-gradient``: an optimizer has parameters that got no gradient in 10 steps, outside of
    conditional units.

    ``warnings.filterwarnings("ignore", r"\\[no-optimizer\\]", fsdp_overlap.NumericsWarning)`` turns
    one off.
    """


class Steps(Protocol):
    """The first steps of optimizers: ``fsdp_overlap/first_steps.py`` says what these are."""

    optimizers: WeakSet[Optimizer]
    had: set[int]
    used: set[int]
    is_scaled: bool
    backwards: int


class Found(NamedTuple):
    """A parameter that a warning is about."""

    unit: Unit
    param_group: ParamGroup
    place: int

    @property
    def parameter(self) -> Any:
        return self.param_group.sharded_parameters[self.place]

    @property
    def name(self) -> str:
        fqn = self.param_group.plan.specs[self.place].fqn
        return f"{fqn!r} of unit {self.unit.name!r}"


def _trained(context: ModelContext) -> list[Found]:
    return [
        Found(unit, param_group, place)
        for unit in context.units
        for param_group in unit.param_groups
        for place, parameter in enumerate(param_group.sharded_parameters)
        if parameter.requires_grad
    ]


def _warn(name: str, what: str, instead: str) -> None:
    off = f'"ignore", r"\\[{name}\\]", fsdp_overlap.NumericsWarning'
    message = f"[{name}] {what}. {instead}. To turn this off: warnings.filterwarnings({off})"
    warnings.warn(message, NumericsWarning, stacklevel=2)


def _listed(names: Iterable[str], what: str = "parameter") -> str:
    first, *rest = names
    return f"{what} {first}" + (f" and {len(rest)} more" if rest else "")


class NumericsWatch:
    """Warns of what the first steps of one context show: of most after the first, of the rest once
    it is certain."""

    def __init__(self, first: Steps, context: ModelContext) -> None:
        self._first = first
        self._context = weakref.ref(context)
        self._looks = 0
        self._versions = WeakKeyDictionary(
            {group: group.version for group in _param_groups(context)}
        )
        self._told: WeakKeyDictionary[ParamGroup, int] = WeakKeyDictionary()
        """How often a host that runs ahead learned which parameters have a gradient."""
        for mesh_info in context.mesh_infos:
            if not mesh_info.syncs_unused_params:
                mesh_info.order_check.on_arrival = partial(self._arrived, weakref.ref(mesh_info))
        self._accumulation: _Accumulation | None = None
        if first.backwards >= min(MICROBATCHES.values()):
            self._accumulation = _Accumulation(context)
        _warn_of_steps(first, context)
        _warn_of_ranks(context)
        _warn_of_scaler(first, context)
        _warn_of_buffers(context)

    def _arrived(self, mesh_info: weakref.ref[MeshInfo], flags: bytes) -> None:
        context = self._context()
        for param_group in _param_groups(context) if context is not None else ():
            if param_group.mesh_info is mesh_info():
                self._told[param_group] = self._told.get(param_group, 0) + 1
                first = param_group.first_flag
                for flag, parameter in enumerate(param_group.sharded_parameters, first):
                    if flags[flag]:
                        self._first.used.add(id(parameter))

    def look(self) -> bool:
        """Look once all optimizers have stepped again. Return whether nothing is left to see."""
        context = self._context()
        if context is None:
            return True
        is_over = self._look(context)
        for mesh_info in context.mesh_infos if is_over else ():
            mesh_info.order_check.on_arrival = None
        return is_over

    def _look(self, context: ModelContext) -> bool:
        self._looks += 1
        if self._looks > 1 and self._accumulation is not None:
            self._accumulation.warn(context)
            self._accumulation = None
        if self._looks == 2:
            self._warn_of_no_optimizer(context)
        unused = [found for found in _trained(context) if self._is_unused(context, found)]
        told = [found for found in unused if self._is_told(found.param_group)]
        if self._looks < UNUSED_STEPS or (len(told) < len(unused) and self._looks < LAST_LOOK):
            return self._looks > 1 and self._accumulation is None and not unused
        if told:
            _warn(
                "no-gradient",
                f"no backward of the first {UNUSED_STEPS} steps gave a gradient to "
                f"{_listed(found.name for found in told)}, which an optimizer has",
                "Use it in forward, or freeze it by requires_grad_(False), which saves its "
                "gradient; modules that run at times are conditional units",
            )
        return True

    def _is_unused(self, context: ModelContext, found: Found) -> bool:
        number = id(found.parameter)
        is_even = not (found.unit.is_conditional or context.is_uneven)
        return is_even and number in self._first.had and number not in self._first.used

    def _is_told(self, param_group: ParamGroup) -> bool:
        is_told = self._told.get(param_group, 0) >= UNUSED_STEPS
        return is_told or param_group.mesh_info.syncs_unused_params

    def _warn_of_no_optimizer(self, context: ModelContext) -> None:
        """Warn of parameters that the optimizers leave out, unless others step them: an optimizer
        that has yet to, or somebody by hand, as one that copies the weights it steps."""
        had = self._first.had
        left = [found for found in _trained(context) if id(found.parameter) not in had]
        having = optimizers_of(found.parameter for found in left) if left else {}
        stepped = {
            param_group
            for param_group in _param_groups(context)
            if any(id(parameter) in had for parameter in param_group.sharded_parameters)
        }
        left = [
            found
            for found in left
            if not having[id(found.parameter)]
            and (
                found.param_group in stepped
                or found.param_group.version == self._versions.get(found.param_group)
            )
        ]
        if left:
            _warn(
                "no-optimizer",
                f"no optimizer has {_listed(found.name for found in left)}, which requires grad",
                "Make the optimizer of model.parameters() after fully_shard(), or freeze it by "
                "requires_grad_(False), which saves its gradient",
            )


def _param_groups(context: ModelContext) -> Iterator[ParamGroup]:
    return (param_group for unit in context.units for param_group in unit.param_groups)


# ---- weights in few bits ----


def _warn_of_steps(first: Steps, context: ModelContext) -> None:
    low = {
        id(found.parameter): found
        for found in _trained(context)
        if found.param_group.shard.dtype in LOW and not found.param_group.is_extension
    }
    for optimizer in list(first.optimizers) if low else ():
        having = [p for group in optimizer.param_groups for p in group["params"]]
        stepped = [low[id(p)] for p in having if id(p) in low and id(p) in first.used]
        if not stepped or _is_precise(optimizer, [found.parameter for found in stepped]):
            continue
        dtype = stepped[0].param_group.shard.dtype
        _warn(
            "low-precision-step",
            f"{type(optimizer).__name__} steps {_listed(found.name for found in stepped)} in "
            f"{dtype}, without a float32 copy: an update below "
            f"{torch.finfo(dtype).eps / 4:.2%} of a weight is lost",
            "Shard float32 weights, as model.float() makes them before fully_shard(), with "
            f"MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)",
        )
        return


def _is_precise(optimizer: Optimizer, parameters: list[Any]) -> bool:
    """Return whether ``optimizer`` may keep more bits than its parameters of low precision have. It
    may keep them where nothing shows it, so sources of optimizers that are not known are read."""
    options = [(name, value) for group in optimizer.param_groups for name, value in group.items()]
    own = [(name, value) for name, value in vars(optimizer).items() if name not in STANDARD]
    if any(value and _has_word(name) for name, value in options + own if _is_flag(value)):
        return True
    if any(map(_is_copy, tree_leaves([value for _, value in own]))):
        return True
    for parameter in parameters:
        for name, state in state_tensors(optimizer, parameter).items():
            is_moment = name.startswith(MOMENTS)
            if _has_word(name) or (state.dtype not in LOW and not is_moment):
                return True
    return any(map(_has_word, _sources(type(optimizer))))


STANDARD = {"state", "param_groups", "defaults"}


def _is_flag(value: Any) -> bool:
    return not isinstance(value, torch.Tensor)


def _is_copy(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.numel() > 1


def _has_word(text: str) -> bool:
    return any(word in text.lower() for word in PRECISE)


def _sources(cls: type) -> Iterator[str]:
    """Yield the text of modules that define ``cls`` and its bases, unless they are known. Of
    modules without a text, words that count as unknown."""
    for base in cls.__mro__:
        if base is object or f"{base.__module__}.".startswith(KNOWN):
            continue
        module = sys.modules.get(base.__module__)
        try:
            yield inspect.getsource(base if module is None else module)
        except (OSError, TypeError):
            try:
                yield inspect.getsource(base)
            except (OSError, TypeError):
                yield PRECISE[0]


# ---- sums in few bits ----


def _warn_of_ranks(context: ModelContext) -> None:
    found = [each for each in _trained(context) if _is_long_sum(each)]
    if not found:
        return
    mesh_info, dtype = found[0].param_group.mesh_info, found[0].param_group.reduce_dtype
    _warn(
        "low-precision-reduction",
        f"gradients of {_listed(each.name for each in found)} are summed over "
        f"{mesh_info.shard_size * mesh_info.num_replicas} ranks in {dtype}, which rounds at each",
        "Use MixedPrecisionPolicy(reduce_dtype=torch.float32), with "
        "QuantizedCommPolicy(reduce_dtype=torch.bfloat16) to send as few bytes",
    )


def _is_long_sum(found: Found) -> bool:
    param_group, mesh_info = found.param_group, found.param_group.mesh_info
    limit = RANKS.get(param_group.reduce_dtype)
    roundings = mesh_info.shard_size + mesh_info.num_replicas - 2
    is_own = param_group.transport is not None or getattr(
        param_group.comm_policy, "reduce_dtype", None
    )
    return limit is not None and roundings >= limit - 1 and not is_own


class _Accumulation:
    """How often the backwards of a step add up gradients, and in which dtype. They are counted from
    one step to the next."""

    def __init__(self, context: ModelContext) -> None:
        self._backwards = context.schedule.backwards
        self._reductions = context.stats.reduce_scatters
        self._versions = {
            gradients: _version(gradients) for unit in context.units for gradients in unit.gradients
        }

    def warn(self, context: ModelContext) -> None:
        backwards = context.schedule.backwards - self._backwards
        reductions = context.stats.reduce_scatters - self._reductions
        is_synchronized = 2 * reductions > backwards * len(self._versions)
        for unit in context.units:
            for gradients in unit.gradients:
                param_group = gradients.param_group
                dtype = param_group.grad_dtype if is_synchronized else param_group.reduce_dtype
                limit, before = MICROBATCHES.get(dtype), self._versions.get(gradients)
                if limit is None or before is None or reductions < 0:
                    continue
                # Each backward with a gradient writes once to each. Others may write, so both
                # numbers are upper bounds.
                written = (_version(gradients) - before) // gradients.count
                number = min(written, backwards)
                if number >= limit:
                    self._warn(unit, dtype, number, is_synchronized)
                    return

    def _warn(self, unit: Unit, dtype: torch.dtype, number: int, is_synchronized: bool) -> None:
        instead = "Use MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        if is_synchronized:
            instead += " and set_requires_gradient_sync(False) until the last microbatch"
        _warn(
            "low-precision-accumulation",
            f"gradients of unit {unit.name!r} are summed over {number} microbatches in {dtype}",
            instead,
        )


def _version(gradients: ParamGroupGradients) -> int:
    return gradients.reduce_scatter_input.flat._version


# ---- float16 without a scaler, and buffers ----


def _warn_of_scaler(first: Steps, context: ModelContext) -> None:
    found = [
        each
        for each in _trained(context)
        if each.param_group.compute_dtype is torch.float16 and id(each.parameter) in first.used
    ]
    if found and not first.is_scaled and not _has_scaler():
        _warn(
            "no-gradient-scaler",
            f"{_listed(each.name for each in found)} computes in torch.float16, and no gradient "
            "scaler is there: gradients below 6e-8 become zero",
            "Use torch.amp.GradScaler(), or MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        )


def _has_scaler() -> bool:
    """Return whether an object of this process may scale losses. Scalers of other libraries have a
    name like that of torch's."""
    return any(
        "scaler" in type(found).__name__.lower() and getattr(found, "_enabled", True)
        for found in gc.get_objects()
    )


def _warn_of_buffers(context: ModelContext) -> None:
    """Warn of inverse frequencies alone: a position times one is an angle, which is off by whole
    turns far from the start. Others may have few bits for a reason."""
    names = [
        f"{prefix}.{name} ({buffer.dtype})" if prefix else f"{name} ({buffer.dtype})"
        for unit in context.units
        for prefix, module in modules_outside_units(unit.modules)
        for name, buffer in module._buffers.items()
        if buffer is not None and "inv_freq" in name and buffer.dtype in LOW
    ]
    if names:
        _warn(
            "cast-buffer",
            f"{_listed(names, 'buffer')} was cast, and angles of rotary embeddings are computed "
            "of it",
            "Cast parameters alone, or let MixedPrecisionPolicy(param_dtype=...) do it, which "
            "leaves buffers as they are",
        )
