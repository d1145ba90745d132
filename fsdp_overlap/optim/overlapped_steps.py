"""Steps of shards that rest on the host, in a thread, while backward or the next forward runs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from fsdp_overlap.comm.comm_streams import has_streams
from fsdp_overlap.comm.host_copies import D2HCopy, copy_to_host
from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.mesh import ParamGroupEdits
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.unit import unit_of_edits
from fsdp_overlap.features.cuda_graphs.graphs import refuse_in_capture
from fsdp_overlap.optim.clipping import (
    clip_coefficient,
    flat_gradients,
    local_norm,
    scale_gradients,
    total_norm,
)
from fsdp_overlap.optim.contiguous import edits_of, gradients_of, local_of, locals_of
from fsdp_overlap.optim.host_thread import Call, HostThread, Job
from fsdp_overlap.optim.states import different_option
from fsdp_overlap.tensor.pending_steps import before_steps
from fsdp_overlap.torch_internals import tree_leaves

Groups = Sequence[tuple[Hashable, dict[str, Any]]]
"""Parameters to be stepped by the options of a group. The first tells them from other ones."""


@dataclass(frozen=True)
class OverlapPolicy:
    """How an optimizer steps shards that rest on the host, in a thread, while backward and the next
    forward run. Pass it as ``overlap=``.

    Without ``max_norm`` the shards of a unit are stepped as soon as their gradients are on the
    host, in the last backward before ``step()``: say with ``set_is_last_backward(False)`` which
    backwards are not the last. ``.grad`` cannot be read then, and ``step()`` raises if gradients,
    weights, states or options of groups, learning rates among them, were changed since backward.

    Attributes:
        max_norm: gradients are scaled down so that their norm over all parameters, taken as one
            vector, is at most this. So the steps begin at ``step()``, when the norm is known, and
            overlap with the next forward.
        use_previous_norm: scale by the norm of the step before instead, so that the steps begin in
            backward. The first step uses its own norm.
        buffer_bytes: the memory of gradients that wait for their step in backward. When it is
            full, backward waits. At least two gradients have memory.
    """

    max_norm: float | None = None
    use_previous_norm: bool = False
    buffer_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm={self.max_norm}: give a positive norm, or None")
        if self.use_previous_norm and self.max_norm is None:
            raise ValueError("use_previous_norm=True: give max_norm too")
        if self.buffer_bytes < 0:
            raise ValueError(f"buffer_bytes={self.buffer_bytes}: give a number of bytes")

    @property
    def waits_for_norm(self) -> bool:
        """Whether no step begins before the norm of all gradients is known."""
        return self.max_norm is not None and not self.use_previous_norm


def _fixed(group: dict[str, Any]) -> dict[str, Any]:
    """Return ``group`` as it is now: a scheduler may edit options before the thread reads them."""
    fixed = {
        name: option.clone() if isinstance(option, torch.Tensor) else option
        for name, option in group.items()
    }
    return fixed | {"params": list(group["params"])}


class SteppedOptimizer(Protocol):
    """What :class:`OverlappedSteps` needs of an optimizer."""

    param_groups: list[dict[str, Any]]
    state: Any
    edits_states: bool
    """Whether the thread replaces states, or edits them so that their version counters tell of it.
    Reads of ``state`` wait for the thread then."""

    def can_plan(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether ``parameters`` can be stepped by themselves, without collectives. The
        first step makes what that takes, such as the states."""
        ...

    def plan(self, groups: Groups) -> Callable[[], None]:
        """Return what steps the parameters of ``groups``, by their gradients of now."""
        ...


class UsedGradient(torch.Tensor):
    """The ``.grad`` of a parameter that was stepped in backward, until ``step()``."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise RuntimeError(
            "this gradient was used in backward, by an optimizer with overlap=OverlapPolicy(), and "
            "cannot be read: clip by OverlapPolicy(max_norm=...), which keeps gradients until "
            "step(), or leave overlap= out"
        )


_USED = UsedGradient()


class _State:
    """A tensor of an optimizer's state, and its version. Two are equal if nobody edited or replaced
    it in between. It keeps the tensor, so that no other can take its id."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _State)
            and self._tensor is other._tensor
            and self._version == other._version
        )


@dataclass
class _Version:
    """What tells whether somebody edited parameters or their states since. The thread's own edits
    do not count."""

    of_parameters: int
    of_states: list[_State] | None
    """``None``: the thread is yet to edit them, and whoever reads them waits for it."""


class GradientBuffers:
    """Host memory for gradients on their way to their step: at most ``nbytes``, or two gradients.
    Memory that was given back is used again."""

    def __init__(self, nbytes: int, thread: HostThread) -> None:
        self._limit = nbytes
        self._thread = thread
        self.reset()

    def reset(self) -> None:
        """Forget all memory. Nobody uses it any more."""
        self._free: list[torch.Tensor] = []
        self._allocated = self._used = 0

    def free(self) -> None:
        """Free what nobody uses."""
        with self._thread.changed:
            self._allocated -= sum(each.numel() for each in self._free)
            self._free.clear()

    def copy(
        self, param_group: ParamGroup, mean: torch.Tensor
    ) -> tuple[D2HCopy, Callable[[], None]]:
        """Return ``mean`` on its way to the host, and what gives its memory back. Block until there
        is memory. A gradient that is on the host is not copied."""
        is_there = mean.device.type == "cpu" and not param_group.storage.is_on_host
        nbytes = mean.nbytes
        with self._thread.changed:
            limit = max(self._limit, 2 * nbytes)
            self._thread.wait_until(lambda: self._used_with(nbytes) <= limit or not self._used)
            memory = None if is_there else self._take(nbytes, param_group)
            held = nbytes if memory is None else memory.numel()
            self._used += held
        if memory is None:
            return D2HCopy(mean, None), partial(self._give_back, held, None)
        host = memory[:nbytes].view(mean.dtype)
        return copy_to_host(mean, host), partial(self._give_back, held, memory)

    def _used_with(self, nbytes: int) -> int:
        fitting = [each.numel() for each in self._free if each.numel() >= nbytes]
        return self._used + min(fitting, default=nbytes)

    def _take(self, nbytes: int, param_group: ParamGroup) -> torch.Tensor:
        fitting = [index for index, each in enumerate(self._free) if each.numel() >= nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        while self._free and self._allocated + nbytes > self._limit:
            self._allocated -= self._free.pop().numel()
        self._allocated += nbytes
        return param_group.storage.empty(nbytes, torch.uint8, param_group.device)

    def _give_back(self, nbytes: int, memory: torch.Tensor | None) -> None:
        with self._thread.changed:
            self._used -= nbytes
            if memory is not None:
                self._free.append(memory)
            self._thread.changed.notify_all()


def check_no_prefetch(prefetch_next_forward: bool) -> None:
    """Raise ValueError if the next forward gathers in ``step()`` what a thread steps after it."""
    if prefetch_next_forward:
        raise ValueError(
            "overlap= and prefetch_next_forward=True: the next forward gathers what is stepped, so "
            "leave the latter out"
        )


def _end(thread: HostThread, buffers: GradientBuffers) -> None:
    thread.close()
    buffers.free()


class OverlappedSteps:
    """Takes over the gradients of one ``optimizer``'s parameters as they arrive, and has a thread
    step the shards. See Note [overlapped steps].

    Raises:
        ValueError: ``prefetch_next_forward``, which would gather what is yet to be stepped.
    """

    def __init__(
        self, optimizer: SteppedOptimizer, policy: OverlapPolicy, prefetch_next_forward: bool
    ) -> None:
        check_no_prefetch(prefetch_next_forward)
        self._optimizer = weakref.ref(optimizer)
        self._policy = policy
        self._thread = HostThread()
        self._buffers = GradientBuffers(policy.buffer_bytes, self._thread)
        weakref.finalize(optimizer, _end, self._thread, self._buffers)
        self.groups: list[dict[str, Any]] = []
        """The optimizer's groups as they were when the first gradient of this step was used."""
        self._group_of: dict[torch.Tensor, dict[str, Any]] = {}
        """Which of :attr:`groups` a parameter is in."""
        self._ahead: dict[ParamGroup, _Version] = {}
        """Those that are stepped before :meth:`step`, each with its version then."""
        self._arrived: dict[ParamGroup, None] = {}
        """Those whose gradients became ``.grad``, as they arrived."""
        self._used_norms: dict[int, torch.Tensor] = {}
        """The norm of each gradient that was used in backward, by the id of a parameter."""
        self._previous_norm: D2HCopy | None = None
        self.norm: torch.Tensor | None = None
        """The norm of the last step's gradients before clipping, if there is a ``max_norm``."""

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step ``parameters`` too. An optimizer that did so before does so no longer."""
        for edits in edits_of(parameters):
            if isinstance(edits, ParamGroupEdits):
                edits.stepper = self
                if edits.is_ahead:  # of a step that nobody will end
                    edits.is_ahead = False
                    edits.record_values()

    # ---- gradients that arrive ----

    @torch.no_grad()
    def enqueue_step(self, gradients: ParamGroupGradients, mean: torch.Tensor) -> bool:
        """Have the thread step the param group of ``gradients``, of which ``mean`` is this rank's
        shard. Return whether it will, or else they are to become ``.grad``."""
        param_group = gradients.param_group
        edits, parameters = param_group.edits, param_group.sharded_parameters
        unit = unit_of_edits(edits)
        self._arrived.pop(param_group, None)
        self._arrived[param_group] = None
        if self._policy.waits_for_norm or unit is None or not unit.settings.is_last_backward:
            return False
        if not self._ahead:
            self._read_groups()
        if not self._can_step(param_group):
            return False
        earlier = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scale = None
        if self._policy.use_previous_norm:
            scale = self._previous_scale()
            if scale is None or earlier:  # whose norm would be of what is to be added alone
                return False
        if earlier and not _can_be_added(earlier, parameters):
            return False
        del self._arrived[param_group]
        edits.finish_step()
        if not self._ahead:
            for call in before_steps:
                call()
        copy, give_back = self._buffers.copy(param_group, mean)
        if scale is not None:
            flats = [mean[start : start + numel] for start, numel in gradients.runs]
            self._used_norms[id(parameters[0])] = local_norm(flats or [mean[:0]])
        for parameter in parameters:
            parameter.grad = None
        gradients.give(copy.host)
        added: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        if earlier:
            added = locals_of(earlier), locals_of(gradients_of(parameters))
            for parameter, gradient in zip(parameters, earlier, strict=True):
                parameter.grad = gradient
        step = self._plan(param_group, scale)
        for parameter in parameters:
            parameter._gradient = _USED
        optimizer = self._optimizer()
        assert optimizer is not None
        states = None if optimizer.edits_states else _states_of(optimizer, parameters)
        version = self._ahead[param_group] = _Version(param_group.version, states)

        def run() -> None:
            copy.wait()
            if added[0]:
                torch._foreach_add_(*added)
            step()
            if version.of_states is None:
                version.of_states = _states_of(optimizer, parameters)
            give_back()

        step_call = Call(run, param_group.label, copy.is_done)
        [edits.pending_step] = self._thread.submit([step_call], param_group.device)
        edits.is_ahead = True
        return True

    def _read_groups(self) -> None:
        optimizer = self._optimizer()
        self.groups = [] if optimizer is None else list(map(_fixed, optimizer.param_groups))
        self._group_of = {p: group for group in self.groups for p in group["params"]}

    def _can_step(self, param_group: ParamGroup) -> bool:
        optimizer, parameters = self._optimizer(), param_group.sharded_parameters
        return (
            optimizer is not None
            and param_group.rest_device.type == "cpu"
            and not param_group.is_extension
            and all(map(self._group_of.__contains__, parameters))
            and optimizer.can_plan(parameters)
        )

    def _plan(self, param_group: ParamGroup, scale: torch.Tensor | None) -> Callable[[], None]:
        """Return what scales the gradients of ``param_group`` and steps it. Its parameters have
        no gradients then."""
        optimizer, parameters = self._optimizer(), param_group.sharded_parameters
        assert optimizer is not None
        flats = [] if scale is None else flat_gradients(gradients_of(parameters))
        groups = [
            ((index, param_group), {**group, "params": members})
            for index, group in enumerate(self.groups)
            if (members := [p for p in parameters if self._group_of[p] is group])
        ]
        step = optimizer.plan(groups)
        for parameter in parameters:
            parameter.grad = None

        def run() -> None:
            if scale is not None and flats:
                torch._foreach_mul_(flats, scale)
            step()

        return run

    # ---- the step ----

    @torch.no_grad()
    def step(self) -> list[ParamGroup]:
        """Have the thread step what it was not given yet, and can step. Return all that it steps,
        or has stepped. What is left has gradients, which are scaled.

        Raises:
            RuntimeError: a step in the thread failed, or what was stepped in backward was changed
                since: a gradient, a parameter, its state or an option of its group; or a CUDA graph
                is captured, and shards are on the host.
        """
        if any(each.rest_device.type == "cpu" for each in (*self._ahead, *self._arrived)):
            refuse_in_capture("an optimizer with overlap= steps offloaded shards")
        self._thread.check()
        groups_in_backward = self._group_of
        self._read_groups()
        for param_group, version in self._ahead.items():
            self._check_unchanged(param_group, version, groups_in_backward)
        is_scaled = getattr(self._optimizer(), "grad_scale", None) is not None
        if self._policy.max_norm is not None and is_scaled:
            raise RuntimeError(
                "the norm of scaled gradients: call scaler.unscale_(optimizer) before "
                "scaler.step(optimizer), as before clip_grad_norm_()"
            )
        in_thread = list(self._ahead)
        self._count_ahead()
        arrived, self._arrived = list(self._arrived), {}
        given = [
            param_group
            for param_group in arrived
            if self._can_step(param_group)
            and all(parameter.grad is not None for parameter in param_group.sharded_parameters)
        ]
        scale = self._find_scale(given) if self._policy.max_norm is not None else None
        for param_group in given:
            param_group.edits.finish_step()
        calls = [Call(self._plan(param_group, scale), param_group.label) for param_group in given]
        device = given[0].device if given else None
        for param_group, job in zip(given, self._thread.submit(calls, device), strict=True):
            param_group.edits.pending_step = job
            param_group.edits.record_values()
        for edits in edits_of(p for p in self._group_of if p.grad is not None):
            if isinstance(edits, ParamGroupEdits):
                edits.finish_step()  # the caller steps these
        return in_thread + given

    def _check_unchanged(
        self,
        param_group: ParamGroup,
        version: _Version,
        groups_in_backward: Mapping[torch.Tensor, Mapping[str, Any]],
    ) -> None:
        """Raise RuntimeError if something was changed since ``param_group`` was stepped."""
        change = ""
        for item, parameter in zip(param_group.owned, param_group.sharded_parameters, strict=True):
            before, group = groups_in_backward[parameter], self._group_of.get(parameter)
            if parameter.grad is None:
                change = f"the gradient of {item.where} was removed"
            elif parameter.grad is not _USED:
                change = f"the gradient of {item.where} was replaced"
            elif group is None:
                change = f"{item.where} was removed from the optimizer's groups"
            elif different := different_option(before, group):
                change = (
                    f"{different!r} of the group of {item.where} was {before[different]} and is "
                    f"{group.get(different)}"
                )
            if change:
                break
        else:
            optimizer, states = self._optimizer(), version.of_states
            assert optimizer is not None
            if version.of_parameters != param_group.version:
                edited = "parameters"
            elif states is None or states == _states_of(optimizer, param_group.sharded_parameters):
                return
            else:
                edited = "optimizer states"
            change = f"{edited} of unit {param_group.label!r} were edited"
        raise RuntimeError(
            f"{change} between backward and step(), but overlap=OverlapPolicy() has stepped unit "
            f"{param_group.label!r} in backward: change it before backward, or after step(), or "
            "use OverlapPolicy(max_norm=...), which steps nothing before step(). Some units are "
            "stepped and others not: call ctx.reset() on every rank, and load a checkpoint"
        )

    def _count_ahead(self) -> None:
        """Count the edits of what was stepped in backward, whose gradients are used up."""
        for param_group in self._ahead:
            param_group.edits.is_ahead = False
            param_group.edits.record_values()
            for parameter in param_group.sharded_parameters:
                parameter.grad = None
        self._ahead.clear()

    def _find_scale(self, given: Sequence[ParamGroup]) -> torch.Tensor:
        """Compute the norm, scale the gradients of parameters that the thread does not step, and
        return the scale of the others. Collective over the meshes."""
        previous = self._previous_scale()
        parameters = [p for p in self._group_of if p.grad is not None or id(p) in self._used_norms]
        members = [p if p.grad is None else p.grad for p in parameters]
        self.norm = total_norm(members, self._used_norms)
        self._used_norms.clear()
        if self._policy.use_previous_norm:
            pin = has_streams(self.norm.device)
            host = torch.empty((), dtype=self.norm.dtype, pin_memory=pin)
            self._previous_norm = copy_to_host(self.norm, host)
        scale = self._coefficient(self.norm.to("cpu")) if previous is None else previous
        stepped = {p for param_group in given for p in param_group.sharded_parameters}
        rest = [p for p in parameters if p.grad is not None and p not in stepped]
        scale_gradients(gradients_of(rest), scale)
        return scale

    def _previous_scale(self) -> torch.Tensor | None:
        """Return the scale by the norm of the step before. ``None`` if there is none, or it was not
        finite."""
        norm = self._previous_norm.wait() if self._previous_norm is not None else None
        return self._coefficient(norm) if norm is not None and norm.isfinite() else None

    def _coefficient(self, norm: torch.Tensor) -> torch.Tensor:
        assert self._policy.max_norm is not None
        return clip_coefficient(norm, self._policy.max_norm)

    def reset(self) -> None:
        """Drop the steps of a backward that was not followed by :meth:`step`, and finish those that
        were. After an error of the thread drop all."""
        jobs = [param_group.edits.pending_step for param_group in self._ahead]
        self._thread.reset([job for job in jobs if isinstance(job, Job)])
        if self._ahead:
            warnings.warn(
                f"{len(self._ahead)} units were stepped, or not, in a backward that did not end in "
                "step(): load a checkpoint",
                stacklevel=2,
            )
        self._count_ahead()
        self._arrived.clear()
        self._used_norms.clear()
        self._buffers.reset()


def _states_of(optimizer: SteppedOptimizer, parameters: Sequence[torch.Tensor]) -> list[_State]:
    state = vars(optimizer)["state"]  # without waiting for the thread
    leaves = tree_leaves([state.get(parameter, {}) for parameter in parameters])
    return [_State(local_of(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _can_be_added(earlier: Sequence[Any], parameters: Sequence[Any]) -> bool:
    """Return whether ``earlier`` gradients are there of all ``parameters``, and lie as these do."""
    return len(earlier) == len(parameters) and all(
        gradient._spec.placements == parameter._spec.placements
        and gradient._local_tensor.is_contiguous()
        for gradient, parameter in zip(earlier, parameters, strict=True)
    )
