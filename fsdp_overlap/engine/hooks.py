"""Module and autograd hooks, which report forward and backward to the schedule.

They own the units, and nothing that they own refers back: Note [lifetime].
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial, update_wrapper
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_overlap.comm.comm_streams import profiler_range
from fsdp_overlap.comm.streams import is_capturing
from fsdp_overlap.engine.autograd import dynamo_disable, is_in_backward
from fsdp_overlap.engine.context import FsdpContext, context_of
from fsdp_overlap.engine.meta_init import load_assigned
from fsdp_overlap.engine.param import is_opaque
from fsdp_overlap.engine.unit import Unit, compare, unit_of
from fsdp_overlap.schedule.order import ForwardRecord
from fsdp_overlap.schedule.scheduler import Schedule
from fsdp_overlap.tensor.pytree import map_arguments, map_tensors, tensors_in
from fsdp_overlap.tensor.subclasses import inner_tensors
from fsdp_overlap.torch_internals import are_functorch_transforms_active, profiler_enabled

# ---- Forwards and backwards ----


def install(module: nn.Module, unit: Unit) -> None:
    """Make every forward of ``module`` run on unsharded parameters."""
    before, after = _hooks_for(unit)
    module.register_forward_pre_hook(partial(before, unit), prepend=True, with_kwargs=True)
    # Always called, so that a forward that raised leaves the sharded parameters in the module too.
    module.register_forward_hook(partial(after, unit), always_call=True)
    module.register_load_state_dict_post_hook(partial(after_load, unit))


_PLAIN = torch.Tensor, nn.Parameter

# The attributes in which nn.Module notes hooks, and how to call those of a forward.
_HOOK_TABLES = (
    "_load_state_dict_post_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state``, a module's ``__dict__``, without the hooks of :func:`install`."""
    state = dict(state)
    installed = [
        key
        for name in ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
        for key, hook in state[name].items()
        if isinstance(hook, partial) and hook.func in _INSTALLED
    ]
    for name in _HOOK_TABLES:
        kept = [(key, hook) for key, hook in state[name].items() if key not in installed]
        state[name] = OrderedDict(kept)
    return state


@dynamo_disable
def before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    context = context_of(unit)
    unit.under_way.append((sys.exc_info()[2], None))
    if are_functorch_transforms_active():
        _refuse_transform(unit)
    if context.has_streams and is_capturing(context.device):
        context.captured_steps.join(unit)
    if profiler_enabled():
        with profiler_range("pre_forward", unit.name):
            _begin_forward(unit, module, context)
    else:
        _begin_forward(unit, module, context)
    device = context.device if unit.is_root and context.device.type != "cpu" else None
    policy = unit.mp_policy
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    if device is not None or dtype is not None:
        args, kwargs, copied = map_arguments(partial(_move_and_cast, device, dtype), args, kwargs)
        if copied is not None:
            unit.under_way[-1] = unit.under_way[-1][0], copied
    return args, kwargs


def _begin_forward(unit: Unit, module: nn.Module, context: FsdpContext) -> None:
    if not context.is_initialized:
        context.error_monitor.check()
        context.lazy_init()
    unit.sync_requires_grad()
    if (unit.is_root or len(unit.under_way) > 1) and context.schedule.is_in_forward:
        _end_interrupted(unit, module, context)
    context.schedule.before_forward(unit)
    unit.to_unsharded()
    if torch.is_grad_enabled() and unit.unowned.is_due():
        _check_all_are_owned(unit)
    mode = id(module), module.training
    if mode not in unit.compared and not context.captured_steps.is_under_way:
        for edits in unit.edits:
            edits.begin_comparison()
        unit.saved_tensors.look_again()
    unit.saved_tensors.begin(unit, context.schedule)


def _check_all_are_owned(unit: Unit) -> None:
    unsharded = (p for param_group in unit.param_groups for p in param_group.parameters)
    own = [*unsharded, *unit.sharded_parameters]
    if (name := unit.unowned.find(unit.modules, own)) is not None:
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
    saved = unit.saved_tensors
    tracked = saved.end() if saved.under_way else None
    context = context_of(unit)
    schedule = context.schedule
    # It is empty if another hook raised before ours.
    handled, copied = unit.under_way.pop() if unit.under_way else (None, None)
    if copied is not None:
        output = copied.finish(output)
    error = _error_of_forward(handled) if output is None else None
    raised = error is not None
    if not raised:
        mode = id(module), module.training
        if (lost := unit.changed()) is not None:
            error = RuntimeError(lost)
        elif mode not in unit.compared and not context.captured_steps.is_under_way:
            unit.compared.add(mode)
            for edits in unit.edits:
                edits.end_comparison(context.uncompared)
    if profiler_enabled():
        with profiler_range("post_forward", unit.name):
            call = schedule.after_forward(unit, id(module), raised)
    else:
        call = schedule.after_forward(unit, id(module), raised)
    if error is not None or context.uncompared:
        error = _error_to_raise(unit, context, error)
    # With gradients a backward may follow, and its end waits for offloaded shards to be read.
    if unit.is_offloaded and not torch.is_grad_enabled() and not schedule.is_in_forward:
        context.comm_context.finish_reading()
    if error is not None and not raised:
        raise error
    tensors = tensors_in(output)
    _check_no_parameter_leaves(unit, tensors)
    if unit.mp_policy.output_dtype is not None and casts:
        cast = partial(_move_and_cast, None, unit.mp_policy.output_dtype)
        output = map_tensors(cast, output)
        tensors = tensors_in(output)
    if call is not None:
        differentiable = [tensor for tensor in tensors if tensor.grad_fn is not None]
        is_read_freely = unit.settings.unshard_in_backward
        call.needs_parameters = is_read_freely or tracked is None or tracked.is_shared
        before_backward = partial(_before_backward, weakref.ref(schedule), call)
        for tensor in differentiable:
            tensor.register_hook(before_backward)
            # Editing a view in place gives it a new history, which starts from its base. So the
            # base gets the hook too.
            if tensor._base is not None and tensor._base.grad_fn is not None:
                tensor._base.register_hook(before_backward)
        if tracked is not None:
            tracked.call = call
        if not differentiable and saved.are_any:
            saved.are_read_early = True
        if differentiable or saved.are_any:
            schedule.add_call(call)
    return output


def _error_of_forward(handled: TracebackType | None) -> BaseException | None:
    """Return the error of a forward that has no output. ``None`` if the forward raised none.

    torch runs hooks while it handles the forward's error. But the caller may be handling an error
    too: ``handled`` is the traceback of that, from before the forward. An error that is raised
    again gets a new traceback."""
    return None if sys.exc_info()[2] is handled else sys.exception()


def _error_to_raise(
    unit: Unit, context: FsdpContext, error: BaseException | None
) -> BaseException | None:
    """Return the error to raise after a forward of ``unit``: ``error``, if there is one. If no
    other forward is around this one, also looks for edits, and tells other ranks of the error,
    because it leaves the model."""
    if context.schedule.is_in_forward or is_in_backward():
        return error
    if error is None and (lost := compare(context.uncompared)) is not None:
        error = RuntimeError(lost)
    if error is not None:
        context.error_monitor.post_error(f"forward of unit {unit.name!r}", error)
    return error


def after_load(unit: Unit, module: nn.Module, keys: Any) -> None:
    """Take over the parameters that ``load_state_dict()``, which has loaded ``module`` and all in
    it, has assigned."""
    for each in (unit, *unit.owners):
        load_assigned(each)


def _check_no_parameter_leaves(unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse an output that lies in a full buffer: it would be read after the buffer is freed."""
    for tensor in tensors:
        if type(tensor) in _PLAIN or is_opaque(tensor):
            is_held = unit.holds(tensor)
        else:
            is_held = any(map(unit.holds, inner_tensors(tensor)))
        if is_held:
            raise RuntimeError(
                f"unit {unit.name!r} returned a parameter of its own, or a view of one, whose "
                "memory is freed after forward: return a clone(), or make the module that uses it "
                "part of the unit"
            )


@dynamo_disable
def _before_backward(
    schedule: weakref.ref[Schedule], call: ForwardRecord, gradient: torch.Tensor
) -> None:
    alive = schedule()
    if alive is not None:
        alive.before_backward(call)


def _move_and_cast(
    device: torch.device | None, dtype: torch.dtype | None, tensor: torch.Tensor
) -> torch.Tensor:
    if not tensor.is_floating_point():
        dtype = None
    # The host does not wait for a copy from pinned memory.
    return tensor.to(device=device, dtype=dtype, non_blocking=True)


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


def _hooks_for(unit: Unit) -> tuple[Any, Any]:
    """Return what is called before and after each forward of ``unit``."""
    if unit.owners:
        return before_reading_forward, after_reading_forward
    return before_forward, after_forward


_INSTALLED = (
    before_forward,
    after_forward,
    before_reading_forward,
    after_reading_forward,
    after_load,
)


# ---- What was interrupted ----


def is_interrupted(context: FsdpContext) -> bool:
    """Return whether a forward or backward of ``context`` began, and neither ended nor is under
    way. Not meant for every step: it looks at the frames of all threads."""
    if not context.has_schedule:
        return False
    running: Any = context.schedule.running_units
    if not running:
        return context.schedule.has_broken_backward
    return not any(_calls_of(running))


def _end_interrupted(unit: Unit, module: nn.Module, context: FsdpContext) -> None:
    """End the forwards that a ``KeyboardInterrupt`` has left, if there are any, as if they had
    raised. A forward of ``module`` is about to begin: on its own, or for ``unit``, whose parameters
    another unit reads in it."""
    if is_in_backward() or all(each is not module for each in unit.modules):
        return
    running: Any = context.schedule.running_units
    if len([*_calls_of(running)]) > (unit in running):  # more than the call that begins
        return
    context.schedule.end_interrupted()
    for each in dict.fromkeys(running):
        del each.under_way[: -1 if each is unit else None]
        each.saved_tensors.reset()


def _calls_of(units: Sequence[Unit]) -> Iterator[FrameType]:
    """Yield the frame of each call to a module of ``units`` that is under way on some thread."""
    modules = {id(module) for unit in units for module in unit.modules}
    codes = nn.Module.__call__.__code__, ForwardMethod.__call__.__code__
    for frame in sys._current_frames().values():
        within: FrameType | None = frame
        while within is not None:
            if within.f_code in codes:
                names = within.f_locals
                called = names["self"]
                called = names.get("module") if isinstance(called, ForwardMethod) else called
                if id(called) in modules:
                    yield within
            within = within.f_back


# ---- Methods that count as forwards ----


class ForwardMethod:
    """Replaces a method of one module: it stands in the module's ``__dict__`` and so hides the
    method of the class. It refers to the module weakly, so that the two do not keep each other
    alive."""

    def __init__(self, module: nn.Module, method: Any) -> None:
        self._module = weakref.ref(module)
        self._is_bound = getattr(method, "__self__", None) is module
        self._function = method.__func__ if self._is_bound else method
        update_wrapper(self, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        unit = None if module is None else unit_of(module)
        if module is None or unit is None:
            raise ReferenceError(f"the module of {self._function.__qualname__} was deleted")
        before, after = _hooks_for(unit)
        try:
            args, kwargs = before(unit, module, args, kwargs)
            bound = (module, *args) if self._is_bound else args
            output = self._function(*bound, **kwargs)
        except BaseException:
            after(unit, module, args, None)
            raise
        return after(unit, module, args, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardMethod:
        duplicate = ForwardMethod.__new__(ForwardMethod)
        vars(duplicate).update(vars(self))
        original = self._module()
        assert original is not None  # it is being copied, and this with it
        duplicate._module = weakref.ref(deepcopy(original, memo))
        return duplicate
