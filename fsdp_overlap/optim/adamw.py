"""torch's AdamW, with one tensor for each contiguous run of sharded parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import reduce
from itertools import compress
from operator import attrgetter, is_, itemgetter, not_
from typing import Any, NamedTuple

import torch

from fsdp_overlap.comm.comm_streams import has_streams
from fsdp_overlap.features.rows.row_tensor import RowTensor
from fsdp_overlap.optim.contiguous import (
    edits_of,
    find_runs,
    flatten,
    gradients_of,
    local_of,
    locals_of,
    run_key,
    with_gradient,
)
from fsdp_overlap.optim.overlapped_steps import Groups, OverlappedSteps, OverlapPolicy
from fsdp_overlap.optim.post_optim_prefetch import PostOptimPrefetch
from fsdp_overlap.optim.states import check_not_captured, keeping_dtypes, pack
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, ShardEdits, ShardedParam
from fsdp_overlap.tensor.subclasses import is_subclass
from fsdp_overlap.torch_internals import fused_adamw_

State = Mapping[torch.Tensor, dict[str, Any]]

# The elements that are widened at once if gradients or moments have another dtype than their
# parameters: enough to fill an accelerator, and few enough for a CPU's cache.
_ACCELERATOR_CHUNK = 1 << 25
_CPU_CHUNK = 1 << 20

_kind = attrgetter("device", "dtype")


class KnownCount(NamedTuple):
    """A step count as of ``version``, and its key in :class:`StepCounts`."""

    step: torch.Tensor
    version: int
    key: object


class StepCounts:
    """The step counts of parameters that are stepped together: 0-dimensional tensors, as in torch's
    state, but ``views`` of one tensor, so that one op increments them all.

    Counts with equal ``keys`` are equal, and stay so until somebody else writes to one. The host
    reads counts from the device, and so waits, only for those that are not ``known``. Counts that
    are used are removed from ``known``.
    """

    def __init__(
        self, steps: Sequence[torch.Tensor], device: torch.device, known: dict[int, KnownCount]
    ) -> None:
        counts = [known.pop(id(step), None) for step in steps]
        moved = [step.to(device, torch.float32) for step in steps]
        is_known = [
            count is not None and count.version == step._version
            for count, step in zip(counts, steps, strict=True)
        ]
        unknown = list(compress(moved, map(not_, is_known)))
        values = iter(torch.stack(unknown).tolist() if unknown else ())
        key_of: defaultdict[float, object] = defaultdict(object)
        self.keys = [
            count.key if count is not None and is_one else key_of[next(values)]
            for count, is_one in zip(counts, is_known, strict=True)
        ]
        self.all_equal = len(set(self.keys)) == 1
        self._flat = torch.stack(moved)
        self.views: Sequence[torch.Tensor] = self._flat.unbind()
        self._version = self._flat._version

    def known(self) -> dict[int, KnownCount]:
        """Return the counts by id, for other sets of parameters once these are no longer stepped
        together."""
        if self._version != self._flat._version:
            return {}
        key_of: defaultdict[object, object] = defaultdict(object)  # equal ones have grown alike
        return {
            id(view): KnownCount(view, self._version, key_of[key])
            for view, key in zip(self.views, self.keys, strict=True)
        }

    def are(self, steps: Sequence[torch.Tensor]) -> bool:
        """Return whether ``steps`` are these tensors, and nobody else has written to them."""
        return all(map(is_, steps, self.views)) and self._version == self._flat._version

    def add(self, number: float | torch.Tensor) -> None:
        self._flat.add_(number)
        self._version = self._flat._version


class ForeachGroup:
    """Parameters of one param group that the kernel steps together: all have a gradient, on one
    device and of one dtype. ``is_first``: whether the next forward needs them first."""

    def __init__(self, is_first: bool, parameters: list[torch.Tensor]) -> None:
        self.is_first = is_first
        self.parameters = parameters
        self.device = local_of(parameters[0]).device
        self.edits = edits_of(parameters)
        locals_ = locals_of(parameters)
        self.is_held = [bool(local.numel()) for local in locals_]
        """Whether this rank holds elements of each, and below what is held."""
        self.held = list(compress(parameters, self.is_held))
        self.locals = list(compress(locals_, self.is_held))
        self.is_flat = set(map(type, parameters)) <= {RaggedDTensor}
        self.steps: StepCounts | None = None

    def run_keys(self) -> list[object] | None:
        """Return a key for each parameter of :attr:`held`: those with equal keys may be stepped as
        one. ``None``: all may."""
        assert self.steps is not None
        if self.is_flat and self.steps.all_equal:
            return None
        return list(map(run_key, self.held, compress(self.steps.keys, self.is_held)))


def _foreach_groups(
    parameters: list[torch.Tensor], locals_: list[torch.Tensor], first: Collection[ShardEdits]
) -> list[ForeachGroup]:
    # An op on a tensor subclass may run once for each of its inner tensors.
    kinds = [
        (
            isinstance(parameter, ShardedParam) and parameter.edits in first,
            _kind(local),
            type(local) if is_subclass(local) else None,
        )
        for parameter, local in zip(parameters, locals_, strict=True)
    ]
    return [
        ForeachGroup(kind[0], list(compress(parameters, map(kind.__eq__, kinds))))
        for kind in dict.fromkeys(kinds)
    ]


class KernelCall(NamedTuple):
    """A call of the kernel whose arguments nobody else changes: ``columns`` of parameters,
    gradients and moments, with a tensor for each run, and the ``counts`` of each. ``steps`` has
    these counts."""

    columns: list[list[torch.Tensor]]
    counts: list[torch.Tensor]
    options: dict[str, Any]
    steps: StepCounts

    def run(self) -> None:
        if self.columns[0]:  # else this rank holds nothing of these parameters
            _run_kernel(self.columns, self.counts, self.options)
        if self.options["found_inf"] is not None:
            self.steps.add(-self.options["found_inf"])


class FusedAdamW:
    """Steps the parameters of an optimizer's param groups. ``moment_dtype`` is the dtype of the
    moments. The default is the dtype of each parameter."""

    def __init__(self, moment_dtype: torch.dtype | None = None) -> None:
        self._moment_dtype = moment_dtype
        self._groups: dict[
            Hashable, tuple[list[object], list[torch.Tensor], list[ForeachGroup]]
        ] = {}
        """The foreach groups of each param group, with the key that they were made for, and the
        local tensors, whose ids are in the key."""
        self._known: dict[int, KnownCount] = {}
        """Step counts of parameters that are not in a foreach group now."""

    def load(self, state: State, group: dict[str, Any]) -> None:
        """Use the loaded state of ``group``."""
        self._known.clear()
        started = [parameter for parameter in group["params"] if state.get(parameter)]
        self._prepare(state, started, _moments(group))

    def foreach_groups(
        self, index: Hashable, group: dict[str, Any], first: Collection[ShardEdits] = ()
    ) -> list[ForeachGroup]:
        """Return the parameters of ``group`` that have a gradient, in groups for :meth:`step`.
        ``index`` tells the group from others, by its position in the optimizer. ``first`` has the
        edit counters of the units that the next forward needs first."""
        parameters = with_gradient(group["params"])
        locals_ = locals_of(parameters)
        # A sharded parameter that was moved or cast has another local tensor. Plain ones may be
        # moved in place.
        key: list[object] = [first, *map(id, parameters), *map(id, locals_)]
        if not set(map(type, parameters)) <= {RaggedDTensor, RowTensor}:
            key += map(_kind, locals_)
        known = self._groups.get(index)
        if known is None or known[0] != key:
            for foreach_group in known[-1] if known is not None else ():
                if foreach_group.steps is not None:
                    self._known |= foreach_group.steps.known()
            known = key, locals_, _foreach_groups(parameters, locals_, first)
            self._groups[index] = known
        return known[-1]

    def step(
        self,
        state: State,
        foreach_group: ForeachGroup,
        group: dict[str, Any],
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Step the parameters of ``foreach_group``, which belong to ``group``. A ``GradScaler``
        passes ``grad_scale`` and ``found_inf``.

        Raises:
            RuntimeError: the dtype of a parameter is not floating-point.
        """
        self.plan(state, foreach_group, group, grad_scale, found_inf).run()
        for edits in foreach_group.edits:
            edits.record_values()

    def plan(
        self,
        state: State,
        foreach_group: ForeachGroup,
        group: dict[str, Any],
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> KernelCall:
        """Return what :meth:`step` runs. Steps are counted now, and edits are not."""
        moments, device = _moments(group), foreach_group.device
        parameters, is_held = foreach_group.parameters, foreach_group.is_held
        states = list(map(state.__getitem__, parameters))
        if not all(states):
            self._prepare(state, [p for p in parameters if not state[p]], moments)
        counts = list(map(itemgetter("step"), states))
        steps = foreach_group.steps
        if steps is None or not steps.are(counts):
            check_not_captured(device)
            steps = foreach_group.steps = StepCounts(counts, device, self._known)
            for param_state, view in zip(states, steps.views, strict=True):
                param_state["step"] = view
        held_states = list(compress(states, is_held))
        columns = [foreach_group.locals, locals_of(gradients_of(foreach_group.held))]
        columns += [locals_of(map(itemgetter(name), held_states)) for name in moments]
        runs = find_runs(columns, foreach_group.run_keys())
        views = list(compress(steps.views, is_held))
        steps.add(1)
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
            lr = lr.to(device)
        options = {
            "amsgrad": group["amsgrad"],
            "lr": lr,
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "maximize": group["maximize"],
            "grad_scale": grad_scale,
            "found_inf": found_inf,
        }
        flat = [flatten(column, runs) for column in columns]
        return KernelCall(flat, [views[row] for row, _ in runs], options, steps)

    def plan_apart(
        self,
        state: State,
        groups: Groups,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> Callable[[], None]:
        """Return what steps ``groups`` in another thread, whose edits no version counter tells
        of."""
        calls = [
            self.plan(state, foreach_group, group, grad_scale, found_inf)
            for key, group in groups
            for foreach_group in self.foreach_groups(key, group)
        ]
        self._known.clear()  # counts of parameters that are stepped apart at times
        for call in calls:
            call.columns[:] = [[tensor.data for tensor in column] for column in call.columns]

        def run() -> None:
            for call in calls:
                call.run()

        return run

    def _prepare(
        self, state: State, parameters: list[torch.Tensor], moments: Sequence[str]
    ) -> None:
        pack(state, parameters, moments, self._moment_dtype)
        for parameter in parameters:
            zero = torch.zeros((), dtype=torch.float32, device=local_of(parameter).device)
            state[parameter].setdefault("step", zero)


def _run_kernel(
    columns: list[list[torch.Tensor]], counts: list[torch.Tensor], options: dict[str, Any]
) -> None:
    """Run the kernel on the parameters, gradients and moments in ``columns``, each with a tensor
    for each run."""
    dtypes = {column[0].dtype for column in columns} | {gradient.dtype for gradient in columns[1]}
    if len(dtypes) == 1:
        empty: list[list[torch.Tensor]] = [] if options["amsgrad"] else [[]]
        fused_adamw_(*columns, *empty, counts, **options)  # type: ignore[call-overload]
        return
    # The kernel takes one dtype, so a chunk at a time is widened, stepped and rounded.
    for *row, count in zip(*columns, counts, strict=True):
        wide = reduce(torch.promote_types, (tensor.dtype for tensor in row))
        for chunks in zip(*map(_chunks, row), strict=True):
            widened = [chunk.to(wide) for chunk in chunks]
            _run_kernel([[chunk] for chunk in widened], [count], options)
            for chunk, stepped in zip(chunks, widened, strict=True):
                if stepped is not chunk:
                    chunk.copy_(stepped)


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if tensor.dim() != 1:
        return (tensor,)
    return tensor.split(_ACCELERATOR_CHUNK if has_streams(tensor.device) else _CPU_CHUNK)


def _moments(group: dict[str, Any]) -> tuple[str, ...]:
    moments = ("exp_avg", "exp_avg_sq")
    return (*moments, "max_exp_avg_sq") if group["amsgrad"] else moments


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` with fewer kernels: parameters that lie end to end in
    memory, as those of one unit and param group do, are stepped as one.

    Results and state dict are the same as torch's, so checkpoints move between the two, both ways.
    Parameters that are not sharded are stepped too.

    Args:
        moment_dtype: the dtype of the moments. The default is the dtype of each parameter.
            ``torch.bfloat16`` halves the memory of float32 moments. It keeps 8 bits, so the second
            moment cannot decay if ``betas[1]`` is above 0.998: use 0.99 or less with it.
        prefetch_next_forward: whether the units that the next forward needs first are stepped
            first and all-gathered under the rest of the step. Their full buffers are there until
            that forward. Do not edit weights on some ranks only between the two, nor by
            ``to_local().data``: other edits are followed.
        overlap: steps shards that ``CPUOffloadPolicy`` keeps on the host, or that rest there, in a
            thread: see :class:`OverlapPolicy`.

    The others are those of ``torch.optim.AdamW``. Steps can be captured in a CUDA graph with and
    without ``capturable``; a replay follows ``lr`` if that is a tensor on the device. A step is
    computed in the widest dtype of parameter, gradient and moments.
    """

    overlapped: OverlappedSteps | None = None
    edits_states = False

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        moment_dtype: torch.dtype | None = None,
        prefetch_next_forward: bool = False,
        overlap: OverlapPolicy | None = None,
    ) -> None:
        if overlap is not None:
            self.overlapped = OverlappedSteps(self, overlap, prefetch_next_forward)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            capturable=capturable,
            fused=True,
        )
        self._moment_dtype = moment_dtype
        self._prefetch_next_forward = prefetch_next_forward
        self._kernel = FusedAdamW(moment_dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.overlapped is not None:
            self.overlapped.add(self.param_groups[-1]["params"])

    def state_dict(self) -> dict[str, Any]:
        finish_pending_steps()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        finish_pending_steps()
        with keeping_dtypes(self):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        finish_pending_steps()
        own = {
            "_moment_dtype": self._moment_dtype,
            "_prefetch_next_forward": self._prefetch_next_forward,
        }
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kernel = FusedAdamW(self._moment_dtype)
        for group in self.param_groups:
            group["fused"] = True  # the loaded state may be of an AdamW without it
            self._kernel.load(self.state, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have a gradient.

        Raises:
            RuntimeError: the dtype of a parameter is not floating-point, or a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.overlapped is not None:
            self.overlapped.step()
        scaling = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        prefetch = PostOptimPrefetch(self.param_groups if self._prefetch_next_forward else ())
        foreach_groups = [
            (foreach_group, group)
            for index, group in enumerate(self.param_groups)
            for foreach_group in self._kernel.foreach_groups(index, group, prefetch.edits)
        ]
        stepped = 0
        for foreach_group, group in foreach_groups:
            if foreach_group.is_first:
                self._kernel.step(self.state, foreach_group, group, *scaling)
                stepped += len(foreach_group.parameters)
        prefetch.start(stepped)
        for foreach_group, group in foreach_groups:
            if not foreach_group.is_first:
                self._kernel.step(self.state, foreach_group, group, *scaling)
        prefetch.finish()
        return loss

    def can_plan(self, parameters: Sequence[torch.Tensor]) -> bool:
        return all(map(self.state.get, parameters))

    def plan(self, groups: Groups) -> Callable[[], None]:
        scaling = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return self._kernel.plan_apart(self.state, groups, *scaling)
