"""Tensors that autograd saves in a unit's forward and reads in backward: Note [saved tensors]."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch.autograd import graph

from fsdp_overlap.schedule.interface import ForwardRecord, ScheduledUnit
from fsdp_overlap.schedule.scheduler import Schedule
from fsdp_overlap.tensor.subclasses import inner_tensors
from fsdp_overlap.torch_internals import (
    DisableTorchFunctionSubclass,
    are_saved_tensors_hooks_enabled,
    current_graph_task_id,
    intercept_pushed_hooks,
    keep_from_compile,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_default_hooks,
)

HookT = TypeVar("HookT", bound=Callable[..., Any])


def dynamo_disable(hook: HookT) -> HookT:
    """Make ``torch.compile`` end its graph before ``hook``, run it and all that it calls as they
    are, and begin another graph behind it: Note [compile]."""
    keep_from_compile(hook, "fsdp_overlap gathers, frees or reduces parameters here")
    return hook


Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""What packs a saved tensor, and what unpacks it."""


class TrackedUnit(ScheduledUnit, Protocol):
    """The unit whose forwards are tracked, as far as this file knows it."""

    @property
    def saved_tensors(self) -> SavedTensors: ...

    def holds(self, tensor: torch.Tensor) -> bool: ...


class SavedForward:
    """One forward of a unit in which saved tensors are tracked. They refer to it, so it keeps
    neither the unit nor the schedule alive."""

    __slots__ = ("call", "has_saved", "is_on_all_ranks", "is_shared", "schedule", "unit")

    def __init__(self, unit: TrackedUnit, schedule: Schedule, is_shared: bool) -> None:
        self.unit = weakref.ref(unit)
        self.schedule = weakref.ref(schedule)
        self.is_shared = is_shared
        """Whether others handle saved tensors too, as activation checkpointing does, around the
        unit or within it."""
        self.has_saved = False
        """Whether autograd saved anything."""
        self.is_on_all_ranks = False
        """Whether it is one of forwards 1, 2, 4, 8 ..., which are tracked on every rank."""
        self.call: ForwardRecord | None = None
        """What backward comes back to."""

    def before_read(self) -> None:
        """Gather the unit, if backward has yet to come back to this forward."""
        unit, schedule = self.unit(), self.schedule()
        if unit is None or schedule is None:
            return
        if self.call is not None and schedule.before_backward(self.call):
            unit.saved_tensors.are_read_early = True
        unit.saved_tensors.has_seen_backward = True
        unit.wait()

    def check(self, tensor: torch.Tensor) -> None:
        """Raise RuntimeError if ``tensor`` lies in a full buffer of the unit, which is freed."""
        unit = self.unit()
        if (
            unit is not None
            and not unit.is_gathered
            and any(map(unit.holds, inner_tensors(tensor)))
        ):
            self._refuse(unit, tensor)

    def _refuse(self, unit: TrackedUnit, tensor: torch.Tensor) -> NoReturn:
        if not unit.settings.unshard_in_backward:
            raise RuntimeError(
                f"backward of unit {unit.name!r} reads a parameter of shape "
                f"{tuple(tensor.shape)}, and set_unshard_in_backward(False) said that it needs "
                "none: call set_unshard_in_backward(True) before forward, and ctx.reset() on every "
                "rank now"
            )
        raise RuntimeError(
            f"a graph reads a parameter of unit {unit.name!r}, of shape {tuple(tensor.shape)}, "
            "whose memory is freed, and no backward of the unit is under way: run backward() on "
            "what forward returned or left in an attribute, before ctx.reset()"
        )


class SavedTensor(NamedTuple):
    """A tensor that autograd saved in ``forwards``, each within the one before it."""

    packed: Any
    version: int
    forwards: Sequence[SavedForward]
    unpack: Callable[[Any], Any] | None
    """What unpacks it, if others handle saved tensors too."""


class SavedTensors:
    """Tracks what autograd saves in forwards of one unit.

    Tracking a tensor takes about a microsecond, so it is not done in every forward, but

    - in each one until a backward has shown whether anything is read early, from the first one,
      from the first in training or evaluation, and from where other parameters are trainable,
    - from then on in forwards 1, 2, 4, 8 ..., and in each one if something was read early,
    - where others handle saved tensors, around the unit or within it: autograd does not check the
      versions of these.

    In any other forward what is read early is an error, by the
    :class:`~fsdp_overlap.tensor.flat_buffer.VersionCounters`.
    """

    are_read_early = False
    """Whether a backward has read a saved tensor before the gradient of an output was there, or no
    output has a gradient."""
    has_seen_backward = False
    """Whether a backward has come back to a forward that was tracked."""
    are_any = False
    """Whether autograd saved anything in the last of forwards 1, 2, 4, 8 ... The same on every
    rank, as these are tracked on every rank."""
    has_others = False
    """Whether others handled saved tensors within a forward that was tracked."""

    def __init__(self) -> None:
        self.under_way: list[SavedForward | None] = []
        """The forwards that are tracked now, and those within them."""

    def track(
        self, unit: TrackedUnit, schedule: Schedule, is_tracked: bool, is_looked_at: bool
    ) -> None:
        """Begin to track a forward of ``unit``. :meth:`end` comes next. ``is_tracked``: whether to
        do that if nobody else handles saved tensors. ``is_looked_at``: whether it is done on every
        rank."""
        is_recompute = current_graph_task_id() != -1
        outer, others = _current_hooks()
        if others is not None:
            # The graph of the first forward reads what a checkpoint saves when it runs again.
            is_tracked = not is_recompute
        if is_tracked and are_saved_tensors_hooks_enabled():
            forward = SavedForward(unit, schedule, others is not None)
            forward.is_on_all_ranks = is_looked_at and not is_recompute
            push_saved_tensors_hooks(partial(_pack, (*outer, forward), others), _unpack)
            self.under_way[-1:] = [forward]
            _adapt_torch(+1)

    def end(self) -> SavedForward | None:
        """End the forward that began last. Return what was tracked."""
        forward = self.under_way.pop()
        if forward is None:
            return None
        if _hooks_of_ours() is not None:
            pop_saved_tensors_hooks()
        _adapt_torch(-1)
        self.has_others |= forward.is_shared
        if forward.is_on_all_ranks:
            self.are_any = forward.has_saved
        return forward

    def look_again(self) -> None:
        """Track forwards until the next backward: what they save may have changed."""
        self.has_seen_backward = False

    def reset(self) -> None:
        """End the forwards under way, after an error."""
        while self.under_way:
            self.end()
        self.look_again()


def _hooks_of_ours() -> Hooks | None:
    hooks: Hooks | None = top_saved_tensors_default_hooks(True)
    pack = hooks[0] if hooks is not None else None
    return hooks if isinstance(pack, partial) and pack.func is _pack else None


def _current_hooks() -> tuple[Sequence[SavedForward], Hooks | None]:
    """Return the forwards that are tracked now, and the hooks of others."""
    ours: Any = _hooks_of_ours()
    if ours is None:
        return (), top_saved_tensors_default_hooks(True)
    forwards, others = ours[0].args
    return forwards, others


_disable = graph.disable_saved_tensors_hooks
_tracked = 0
"""How many forwards are tracked now, in all threads."""


_lock = threading.Lock()


def _adapt_torch(change: int) -> None:
    """Note that ``change`` more forwards are tracked. While there are any

    - what disables hooks of saved tensors, as ``torch.func.grad`` does, finds none of ours, where
      torch would raise,
    - what others' hooks handle within a forward is tracked too: torch calls the innermost alone.
    """
    global _tracked
    with _lock:  # ranks may be threads
        _tracked += change
        graph.disable_saved_tensors_hooks = _disable_others if _tracked else _disable
        intercept_pushed_hooks(_push if _tracked else None)


@dynamo_disable
def _push(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
    forwards, _ = _current_hooks()
    if not forwards:
        push_saved_tensors_hooks(pack, unpack)
        return
    forwards[-1].is_shared = True
    push_saved_tensors_hooks(partial(_pack, forwards, (pack, unpack)), _unpack)


@contextmanager
def _disable_others(error_message: str) -> Iterator[None]:
    aside = []
    while (hooks := _hooks_of_ours()) is not None:
        aside.append(hooks)
        pop_saved_tensors_hooks()
    try:
        with _disable(error_message):
            yield
    finally:
        for hooks in reversed(aside):
            push_saved_tensors_hooks(*hooks)


@dynamo_disable
def _pack(
    forwards: Sequence[SavedForward], others: Hooks | None, tensor: torch.Tensor
) -> SavedTensor:
    forwards[-1].has_saved = True
    if others is not None:
        return SavedTensor(others[0](tensor), 0, forwards, others[1])
    with DisableTorchFunctionSubclass():
        # An output that is saved refers to its node, which refers to what is returned here.
        packed = tensor if tensor.grad_fn is None else tensor.detach()
        return SavedTensor(packed, tensor._version, forwards, None)


@dynamo_disable
def _unpack(saved: SavedTensor) -> Any:
    if current_graph_task_id() != -1:  # and not somebody who looks at a node's attributes
        for forward in saved.forwards:
            forward.before_read()
    if saved.unpack is not None:
        return saved.unpack(saved.packed)
    tensor: torch.Tensor = saved.packed
    for forward in saved.forwards:
        forward.check(tensor)
    with DisableTorchFunctionSubclass():
        version = tensor._version
    if version != saved.version:
        _refuse_version(saved, version)
    return tensor


def _refuse_version(saved: SavedTensor, version: int) -> NoReturn:
    # As torch says it, which does not compare the versions of what hooks return.
    tensor: torch.Tensor = saved.packed
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.dtype} {list(tensor.shape)}] is at version {version}; expected "
        f"version {saved.version} instead"
    )
