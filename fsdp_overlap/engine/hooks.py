"""Module and autograd hooks, which report forward and backward to the schedule.

They own the units, and nothing that they own refers back: Note [lifetime]. All such notes are in
``docs/design.md``, section 8. This module is also the
:class:`~fsdp_overlap.schedule.interface.AutogradEngine` that ``schedule/`` asks, which says what
those of its functions do that have no docstring here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_overlap.comm.comm_streams import profiler_range
from fsdp_overlap.engine.param import REGISTERED, is_of_own_class
from fsdp_overlap.engine.saved_tensors import SavedForward, dynamo_disable
from fsdp_overlap.engine.unit import ForwardUnderWay, Unit, read_comparisons
from fsdp_overlap.schedule.interface import ForwardRecord
from fsdp_overlap.schedule.scheduler import Schedule
from fsdp_overlap.schedule.stats import CHECKED_COUNTS
from fsdp_overlap.tensor.subclasses import inner_tensors
from fsdp_overlap.torch_internals import (
    are_functorch_transforms_active,
    checkpoint_code,
    current_autograd_node,
    current_graph_task_id,
    current_graph_task_keeps_graph,
    current_sequence_number,
    is_checkpoint_valid,
    profiler_enabled,
    queue_callback,
    top_saved_tensors_default_hooks,
    will_engine_execute_node,
)

# ---- The backward under way ----

is_grad_enabled = torch.is_grad_enabled
keeps_graph = current_graph_task_keeps_graph
sequence_number = current_sequence_number
graph_task = current_graph_task_id
"""The number of the backward under way on this thread, -1 if there is none."""


def is_in_backward() -> bool:
    return current_graph_task_id() != -1


def run_backward(function: Callable[[], object]) -> None:
    with torch.enable_grad():
        nothing = torch.zeros((), requires_grad=True) * 1
    nothing.register_hook(lambda _: (function(), None)[1])
    nothing.backward()


def at_end_of_backward(function: Callable[[], None]) -> None:
    queue_callback(partial(_call, function))


@dynamo_disable
def _call(function: Callable[[], None]) -> None:
    function()


def is_for_all_leaves() -> bool:
    if not is_checkpoint_valid():
        return False
    # A checkpoint is valid also in hooks of the very tensor that torch.autograd.grad() was asked
    # about. The nodes behind that tensor do not run.
    node = current_autograd_node()
    return any(
        will_engine_execute_node(behind) for behind, _ in node.next_functions if behind is not None
    )


def checkpoint() -> object:
    """Return the frame of the outermost ``torch.utils.checkpoint.checkpoint()`` whose forward is
    under way, ``None`` if there is none."""
    if torch.is_grad_enabled() and top_saved_tensors_default_hooks(True) is None:
        return None  # neither kind of checkpoint is
    frame: FrameType | None = sys._getframe(1)
    outermost: FrameType | None = None
    while frame is not None:
        if frame.f_code is checkpoint_code:
            outermost = frame
        frame = frame.f_back
    return outermost


# ---- Forwards and backwards ----


_PLAIN = torch.Tensor, nn.Parameter


@dynamo_disable
def before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    context, forward = unit.context, ForwardUnderWay()
    forward.handled = sys.exc_info()[2]
    unit.under_way.append(forward)
    if are_functorch_transforms_active():
        _refuse_transform(unit)
    if context.capture_query is not None and context.capture_query():
        context.join_capture(unit)
    begin = _begin_in_range if profiler_enabled() else _begin_forward
    begin(unit, module)
    return (args, kwargs) if unit.cast_inputs is None else _cast_inputs(unit, args, kwargs)


def _cast_inputs(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert unit.cast_inputs is not None
    args, kwargs, unit.under_way[-1].copied = unit.cast_inputs(args, kwargs)
    return args, kwargs


def _begin_in_range(unit: Unit, module: nn.Module) -> None:
    with profiler_range("pre_forward", unit.name):
        _begin_forward(unit, module)


def _begin_forward(unit: Unit, module: nn.Module) -> None:
    context = unit.context
    if not context.is_initialized:
        context.faults.check()
        context.lazy_init()
    unit.sync_requires_grad()
    schedule = context.schedule
    # torch calls no hook after a KeyboardInterrupt. No forward is around a root, and rarely one of
    # a unit around another of it, so what is noted as under way may have been interrupted.
    if (unit.is_root or len(unit.under_way) > 1) and schedule.is_in_forward:
        _end_interrupted(unit, module)
    schedule.before_forward(unit)
    unit.to_unsharded()  # in backward the schedule does: Schedule._come_back_to
    if (id(module), module.training) not in unit.compared_modes:
        _begin_first_forward(unit)
    if unit.saved_tensors.under_way:
        unit.saved_tensors.under_way.append(None)  # the unit runs within its own forward
    if torch.is_grad_enabled():
        _begin_with_gradients(unit, schedule)


def _begin_with_gradients(unit: Unit, schedule: Schedule) -> None:
    """Look for parameters that no unit owns, and begin to track what autograd saves, if that is to
    be done in this forward of ``unit``."""
    if current_graph_task_id() == -1:  # else it is recomputed
        unit.forwards += 1
    is_looked_at = unit.forwards in CHECKED_COUNTS
    # Tables may be written to directly, and parameters unfrozen.
    if is_looked_at or unit.unowned.registrations != REGISTERED.count:
        _check_all_are_owned(unit)
    if not unit.has_parameters:
        return
    saved = unit.saved_tensors
    is_tracked = (
        is_looked_at
        or not saved.has_seen_backward
        or saved.are_read_early
        or saved.has_others
        or not unit.settings.unshard_in_backward
    )
    if is_tracked or top_saved_tensors_default_hooks(True) is not None:
        saved.track(unit, schedule, is_tracked, is_looked_at)


def _end_interrupted(unit: Unit, module: nn.Module) -> None:
    from fsdp_overlap.engine.interruption import end_interrupted

    end_interrupted(unit, module, unit.context.schedule)


def _begin_first_forward(unit: Unit) -> None:
    """Begin the first forward of a module of ``unit``, or its first in training or evaluation."""
    if not unit.context.is_in_capture:
        for edits in unit.unsharded_edits:
            edits.begin_comparison()
        unit.saved_tensors.look_again()


def _end_first_forward(unit: Unit, module: nn.Module) -> None:
    context = unit.context
    if not context.is_in_capture:
        unit.compared_modes.add((id(module), module.training))
        for edits in unit.unsharded_edits:
            edits.end_comparison(context.pending_comparisons)


def _check_all_are_owned(unit: Unit) -> None:
    unsharded = (p for param_group in unit.param_groups for p in param_group.parameters)
    own = [*unsharded, *unit.sharded_parameters]
    if (name := unit.unowned.find(unit.modules, own)) is not None:
        _refuse_unowned(unit, name)


def _refuse_unowned(unit: Unit, name: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name!r} of unit {unit.name!r} was added after fully_shard(), so no unit "
        "owns it: each rank would train it on its own data alone, and ranks would drift apart. "
        "Replace modules and add adapters before fully_shard(), or call fully_shard() on the "
        "new module too; freeze the parameter by requires_grad_(False); or put it in the place "
        "of one of ignored_params, and reduce its gradients yourself"
    )


def _refuse_transform(unit: Unit) -> NoReturn:
    raise RuntimeError(
        f"unit {unit.name!r} runs inside a transform of torch.func (grad, vmap, jvp, ...), which "
        "all-gathers do not go through: use torch.autograd.grad(), with create_graph=True for "
        "higher derivatives and is_grads_batched=True for batches, or torch.autograd.forward_ad; "
        "for derivatives in the weights, an unsharded copy of the model with the full_tensor() of "
        "each parameter"
    )


@dynamo_disable
def after_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any, casts: bool = True
) -> Any:
    tracked = unit.saved_tensors.end() if unit.saved_tensors.under_way else None
    # It is empty if another hook raised before ours.
    forward = unit.under_way.pop() if unit.under_way else ForwardUnderWay()
    if output is None and (error := _error_of_forward(forward.handled)) is not None:
        return _end_raised(unit, module, tracked, error, forward)
    lost = unit.find_lost_edit()
    if lost is None and (id(module), module.training) not in unit.compared_modes:
        _end_first_forward(unit, module)
    context = unit.context
    end = _end_in_range if profiler_enabled() else context.schedule.after_forward
    call = end(unit, id(module))
    if unit.may_end_reading:
        _finish_reading(unit)
    if lost is not None or context.pending_comparisons:
        _raise_edit(unit, lost)
    # From here on users' classes may raise: the forward has ended.
    if forward.copied is not None:
        output = forward.copied.finish(output)
    output, tensors = _checked_output(unit, output, casts)
    if call is not None:
        _expect_backward(unit, call, tracked, tensors)
    return output


def _end_in_range(unit: Unit, module: int, raised: bool = False) -> ForwardRecord | None:
    with profiler_range("post_forward", unit.name):
        return unit.context.schedule.after_forward(unit, module, raised)


def _end_raised(
    unit: Unit,
    module: nn.Module,
    tracked: SavedForward | None,
    error: BaseException,
    forward: ForwardUnderWay,
) -> None:
    call = _end_in_range(unit, id(module), raised=True)
    if _is_outermost(unit):
        _post_error(unit, error)
    if unit.may_end_reading:
        _finish_reading(unit)
    if call is not None:
        _expect_backward(unit, call, tracked, ())
    if forward.copied is not None:
        forward.copied.finish(None)


def _finish_reading(unit: Unit) -> None:
    # With gradients a backward may follow, and its end waits for shards on the host to be read.
    if not torch.is_grad_enabled() and not unit.context.schedule.is_in_forward:
        unit.context.finish_reading()


def _checked_output(unit: Unit, output: Any, casts: bool) -> tuple[Any, Sequence[torch.Tensor]]:
    """Return what a forward of ``unit`` returns, and the tensors in that. Refuse an output that
    lies in a full buffer: it would be read after the buffer is freed."""
    # Most outputs are a single tensor.
    tensors = (output,) if isinstance(output, torch.Tensor) else _tensors_in(output)
    for tensor in tensors:
        if unit.holds(tensor) if type(tensor) in _PLAIN else _holds_part_of(unit, tensor):
            _refuse_output(unit)
    if casts and unit.cast_output is not None:
        output = unit.cast_output(output)
        tensors = _tensors_in(output)
    return output, tensors


def _tensors_in(output: Any) -> Sequence[torch.Tensor]:
    from fsdp_overlap.tensor.pytree import tensors_in

    return tensors_in(output)


def _expect_backward(
    unit: Unit, call: ForwardRecord, tracked: SavedForward | None, tensors: Sequence[torch.Tensor]
) -> None:
    """Make the gradients of ``tensors``, which a forward returned, begin the backward of its
    ``call``."""
    saved, schedule = unit.saved_tensors, unit.context.schedule
    call.needs_parameters = (
        unit.settings.unshard_in_backward or tracked is None or tracked.is_shared
    )
    if tracked is not None:
        tracked.call = call
    before_backward = partial(_before_backward, weakref.ref(schedule), call)
    is_differentiable = False
    for tensor in tensors:
        if tensor.grad_fn is not None:
            is_differentiable = True
            tensor.register_hook(before_backward)
            # Editing a view in place gives it a new history, which starts from its base. So the
            # base gets the hook too.
            if tensor._base is not None and tensor._base.grad_fn is not None:
                tensor._base.register_hook(before_backward)
    if not is_differentiable:
        if not saved.are_any:
            return
        saved.are_read_early = True
    schedule.add_call(call)


def _error_of_forward(handled: TracebackType | None) -> BaseException | None:
    """Return the error of a forward that has no output. ``None`` if the forward raised none.

    torch runs hooks while it handles the forward's error. But the caller may be handling an error
    too: ``handled`` is the traceback of that, from before the forward. An error that is raised
    again gets a new traceback."""
    return None if sys.exc_info()[2] is handled else sys.exception()


def _is_outermost(unit: Unit) -> bool:
    """Return whether no other forward is around one of ``unit`` that has ended."""
    return not (unit.context.schedule.is_in_forward or is_in_backward())


def _raise_edit(unit: Unit, lost: str | None) -> None:
    """Raise RuntimeError if a forward of ``unit`` has ``lost`` an edit. If no other forward is
    around it, also look for edits that first forwards have lost, and tell other ranks."""
    is_outermost = _is_outermost(unit)
    if lost is None and is_outermost:
        lost = read_comparisons(unit.context.pending_comparisons)
    if lost is not None:
        _raise_lost(unit, lost, is_outermost)


def _raise_lost(unit: Unit, lost: str, is_outermost: bool) -> NoReturn:
    error = RuntimeError(lost)
    if is_outermost:
        _post_error(unit, error)
    raise error


def _post_error(unit: Unit, error: BaseException) -> None:
    """Tell other ranks of ``error``, which leaves the model."""
    unit.context.faults.monitor.post_error(f"forward of unit {unit.name!r}", error)


def _holds_part_of(unit: Unit, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor``, of a class of its own, lies in a full buffer, or one that it
    consists of."""
    if is_of_own_class(tensor):
        return unit.holds(tensor)
    return any(map(unit.holds, inner_tensors(tensor)))


def _refuse_output(unit: Unit) -> NoReturn:
    raise RuntimeError(
        f"unit {unit.name!r} returned a parameter of its own, or a view of one, whose memory is "
        "freed after forward: return a clone(), or make the module that uses it part of the unit"
    )


@dynamo_disable
def _before_backward(
    schedule: weakref.ref[Schedule], call: ForwardRecord, gradient: torch.Tensor
) -> None:
    alive = schedule()
    if alive is not None:
        alive.before_backward(call)


# ---- Forwards of units that read parameters of others: Note [tied parameters] ----


@dynamo_disable
def before_reading_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = before_forward(unit, module, args, kwargs)
    for owner in unit.owners:
        before_forward(owner, module, (), {})  # inputs are cast as the unit wants, not the owner
    return args, kwargs


@dynamo_disable
def after_reading_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    error: BaseException | None = None
    for each in (*reversed(unit.owners), unit):
        try:
            output = after_forward(each, module, args, output, casts=each is unit)
        except BaseException as raised:  # the others have begun too
            error = error or raised
    if error is not None:
        raise error
    return output


def hooks_for(unit: Unit) -> tuple[Any, Any]:
    """Return what is called before and after each forward of ``unit``."""
    if unit.owners:
        return before_reading_forward, after_reading_forward
    return before_forward, after_forward
