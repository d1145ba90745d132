"""One optimizer for sharded parameters: Muon for matrices, AdamW for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import nn

from fsdp_overlap.comm.comm_streams import current_device, has_streams, streams_of
from fsdp_overlap.optim.adamw import AdamW, FusedAdamW
from fsdp_overlap.optim.exchange import plan_rounds, round_elements, run_rounds
from fsdp_overlap.optim.matrices import Split
from fsdp_overlap.optim.matrix_param_groups import (
    check_matrices,
    choice_table,
    matrix_param_groups,
)
from fsdp_overlap.optim.newton_schulz import COEFFICIENTS, Polynomial, polynomials
from fsdp_overlap.optim.orthogonalization import DirectionExchange, MatmulOptions, run, tasks_of
from fsdp_overlap.optim.overlapped_steps import Groups, OverlappedSteps, OverlapPolicy
from fsdp_overlap.optim.owner_groups import OwnerGroup, OwnerGroups
from fsdp_overlap.optim.post_optim_prefetch import PostOptimPrefetch
from fsdp_overlap.optim.states import keeping_dtypes, pack
from fsdp_overlap.optim.updates import MuonSettings, Update
from fsdp_overlap.tensor.ops import record_edits
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam

ALGORITHMS = ("muon", "adamw")

_INSTEAD = 'give it to AdamW, by the names in algorithms= or in a group with "algorithm": "adamw"'

_OF_ADAMW = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` (Keller Jordan, kellerjordan.github.io/posts/muon) for the matrices of a
    model, AdamW for its other parameters.

    If one rank holds all of each matrix, as under the layout ``TensorAtomic()``, :meth:`step`
    sends nothing. If several ranks hold parts of a matrix, by ranges or by tensor parallelism, they
    send them to one rank, which orthogonalizes the matrix once and sends the result back, while
    others are orthogonalized. Ranks that hold replicas divide the work in the same way. The result
    is that of the unsharded model. Parameters that are not sharded are stepped too, on every rank.

    Args:
        params: a model, or parameters or groups as for any optimizer. In a model Muon steps the
            hidden matrices and stacks of them, and AdamW the embeddings, the outputs, the routers
            of experts, the convolutions and all that is not a matrix: ``print(optimizer)`` shows
            them in a table. Parameters and groups are stepped by Muon, but groups with
            ``"algorithm": "adamw"`` by AdamW.
        ns_coefficients: ``"quintic"``, torch's default; ``"polar_express"`` (arXiv 2505.16932),
            which comes closer to orthogonal matrices; numbers ``(a, b, c)``; or such a tuple for
            each step.
        eps: the norm below which the direction of a matrix is scaled down in proportion, before it
            is orthogonalized, so that its step shrinks. With 0 steps do not depend on the size of
            gradients. That of ``torch.optim.Muon`` is 1e-7, at which small gradients stall. It also
            ends the steps of matrices that get zero gradients, as experts without tokens, whose
            momentum fades; with 0 these end when it is lost to underflow.
        ns_dtype: the dtype of the products, and of the matrices that are sent.
        algorithms: which algorithm, ``"muon"`` or ``"adamw"``, steps which parameters of the model.
            The keys are names of parameters, or patterns.
        split: the parts of a matrix that are orthogonalized apart, such as the heads of a fused
            projection: a number of equal parts, or the rows of each part. The keys are names of
            parameters, or patterns. In a group of parameters it is the option ``"split"``.
        adamw: options of :class:`~fsdp_overlap.optim.AdamW`, ``lr`` among them. Those that are not
            given have that class's defaults.
        prefetch_next_forward: as for :class:`~fsdp_overlap.optim.AdamW`. The gathers run under the
            products, unless ranks share matrices: then they begin when the step is over.
        overlap: as for :class:`~fsdp_overlap.optim.AdamW`. Units of whose matrices ranks hold parts
            are stepped in :meth:`step`.

    The others are those of ``torch.optim.Muon``. A step that is captured in a CUDA graph follows
    ``lr`` if that is a tensor on the device of the parameters. A parameter of three dimensions or
    more is a stack of matrices, which are its last two dimensions.

    Raises:
        TypeError, ValueError: an option or a parameter is one that Muon cannot work with.
    """

    overlapped: OverlappedSteps | None = None
    edits_states = False

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[float] | Sequence[Polynomial] = "quintic",
        eps: float = 0.0,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        algorithms: Mapping[str, str] | None = None,
        split: Mapping[str, Split] | None = None,
        adamw: Mapping[str, Any] | None = None,
        prefetch_next_forward: bool = False,
        overlap: OverlapPolicy | None = None,
    ) -> None:
        if overlap is not None:
            self.overlapped = OverlappedSteps(self, overlap, prefetch_next_forward)
        options = dict(adamw or {})
        checked = AdamW([torch.empty(0)], **options).defaults  # torch checks them
        self._adamw_options = {name: checked[name] for name in _OF_ADAMW}
        if not ns_dtype.is_floating_point:
            raise ValueError(f"ns_dtype={ns_dtype}: products need a dtype of floating point")
        self._moment_dtype = options.get("moment_dtype")
        self.ns_dtype = ns_dtype
        self._prefetch_next_forward = prefetch_next_forward
        self._choice_table = ""
        self._reset()
        if isinstance(params, nn.Module):
            model = params
            params = matrix_param_groups(
                model, "algorithm", ALGORITHMS, algorithms or {}, split or {}
            )
            self._choice_table = choice_table(model, "algorithm", params)
        elif algorithms or split:
            raise ValueError(
                "algorithms= and split= name parameters of a model: pass the model, or groups of "
                'parameters with "algorithm" and "split" in each'
            )
        super().__init__(
            params,
            {
                "algorithm": "muon",
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "split": 1,
            },
        )

    def _reset(self) -> None:
        """Make anew everything but the user's options and the state."""
        self._adamw = FusedAdamW(self._moment_dtype)
        self._side_streams: dict[torch.device, Any] = {}
        """Streams of products that overlap with backward, by device."""
        self._owner_groups = OwnerGroups("Muon")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("algorithm") == "adamw":
            param_group = self._adamw_options | param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except Exception:
            self.param_groups.pop()
            raise
        if group["ns_coefficients"] == "quintic":  # in torch's form: its Muon may load the group
            [group["ns_coefficients"]] = COEFFICIENTS["quintic"]
        if not isinstance(group["split"], int):
            group["split"] = tuple(group["split"])
        if self.overlapped is not None:
            self.overlapped.add(group["params"])

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self._choice_table}".rstrip()

    def __getstate__(self) -> dict[str, Any]:
        finish_pending_steps()
        names = ["_adamw_options", "_moment_dtype", "ns_dtype"]
        names += ["_prefetch_next_forward", "_choice_table"]
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        finish_pending_steps()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class. One of torch's Muon or AdamW can be loaded too, if the
        same algorithm steps each group here.

        Raises:
            ValueError: a group was stepped by another algorithm. Nothing was changed then.
        """
        finish_pending_steps()
        with keeping_dtypes(self):
            super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state["param_groups"]
        # State dicts of torch's optimizers lack these options. They stay as they were chosen here.
        for group, own in zip(groups, self.__dict__.get("param_groups", groups), strict=True):
            for name in ("algorithm", "split"):
                group.setdefault(name, own[name])
            if ("betas" if group["algorithm"] == "adamw" else "ns_steps") not in group:
                raise ValueError(
                    f"a group of {len(group['params'])} parameters is to be stepped by "
                    f"{group['algorithm']}, but was saved by another optimizer: its options are "
                    f"{', '.join(sorted(group.keys() - {'params', 'algorithm', 'split'}))}"
                )
        super().__setstate__(state)
        self._reset()
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                self._adamw.load(self.state, group)
            else:
                started = [parameter for parameter in group["params"] if self.state.get(parameter)]
                pack(self.state, started, ["momentum_buffer"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have a gradient.

        If several ranks hold parts of a matrix, this must be called on every rank of its mesh, and
        the same parameters must have gradients on all of them, as backward leaves them.

        If it raises, momenta have advanced and weights have decayed, and some parameters have moved
        and others not: call ``ctx.reset()`` on every rank, and load a checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._owner_groups.drop_ended()
        self._check_states()
        if self.overlapped is not None:
            self.overlapped.step()
        updates = [
            update
            for group in self.param_groups
            if group["algorithm"] == "muon"
            for update in self._updates(group)
        ]
        prefetch = PostOptimPrefetch(self.param_groups if self._prefetch_next_forward else ())
        stepped = 0
        for index, group in enumerate(self.param_groups):
            if group["algorithm"] == "adamw":
                for foreach_group in self._adamw.foreach_groups(index, group, prefetch.edits):
                    self._adamw.step(self.state, foreach_group, group)
                    stepped += len(foreach_group.parameters) if foreach_group.is_first else 0
        first = [update for update in updates if prefetch.needs(update.parameter)]
        rest = [update for update in updates if not prefetch.needs(update.parameter)]
        if any(update.ownership.partition.shared for update in updates):
            # All shared matrices are exchanged together, in as few rounds as possible.
            self._step_matrices(updates)
            rest = []
        else:
            self._step_matrices(first)
        prefetch.start(stepped + len(first))
        self._step_matrices(rest)
        prefetch.finish()
        return loss

    def _check_states(self) -> None:
        for group in self.param_groups:
            key = "step" if group["algorithm"] == "adamw" else "momentum_buffer"
            for state in map(self.state.get, group["params"]):
                if state and key not in state:
                    raise ValueError(
                        f"a parameter whose state has {', '.join(state)} is in a group with "
                        f'"algorithm": "{group["algorithm"]}", which needs {key}: delete its state '
                        "when you move it to a group of another algorithm"
                    )

    def can_plan(self, parameters: Sequence[torch.Tensor]) -> bool:
        for parameter in parameters:
            if not (state := self.state.get(parameter)):
                return False
            momentum = state.get("momentum_buffer")
            if momentum is not None and (
                self._owner_groups.shares(parameter)
                or cast(ShardedParam, parameter)._grad_dtype != momentum.dtype
            ):
                return False
        return True

    def plan(self, groups: Groups) -> Callable[[], None]:
        of_adamw = [(key, group) for key, group in groups if group["algorithm"] == "adamw"]
        step_others = self._adamw.plan_apart(self.state, of_adamw)
        updates = [
            update
            for _, group in groups
            if group["algorithm"] == "muon"
            for update in self._updates(group)
        ]

        for update in updates:  # whose edits must not be seen before they are counted
            update.local, update.buffer = update.local.data, update.buffer.data
        devices = {current_device(u.device.type) for u in updates if has_streams(u.device)}
        for device in devices - self._side_streams.keys():
            self._side_streams[device] = streams_of(device).Stream(device)

        def run() -> None:
            step_others()
            with ExitStack() as stack:
                for device in devices:
                    stack.enter_context(streams_of(device).stream(self._side_streams[device]))
                self._update_matrices(updates)

        return run

    def _step_matrices(self, updates: list[Update]) -> None:
        self._update_matrices(updates)
        record_edits(update.parameter for update in updates)

    def _update_matrices(self, updates: list[Update]) -> None:
        for settings in dict.fromkeys(update.settings for update in updates):
            members = [u for u in updates if u.settings == settings and u.local.numel()]
            _update_momentum(settings, members)
        for device in dict.fromkeys(update.device for update in updates):
            self._orthogonalize(device, [u for u in updates if u.device == device])

    def _updates(self, group: dict[str, Any]) -> list[Update]:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        fresh = [parameter for parameter in parameters if not self.state[parameter]]
        pack(self.state, fresh, ["momentum_buffer"])
        split, settings = group["split"], MuonSettings.of(group)
        self._owner_groups.add((parameter, split) for parameter in parameters)
        return [
            Update(
                parameter,
                self.state[parameter]["momentum_buffer"],
                settings,
                self._owner_groups.ownership_of(parameter),
            )
            for parameter in parameters
        ]

    def _orthogonalize(self, device: torch.device, updates: list[Update]) -> None:
        """Update parameters by their orthogonalized momentum, which is computed on ``device``."""
        options = MatmulOptions(device, self.ns_dtype)
        tasks = (
            task
            for update in updates
            for task in tasks_of(
                update, update.ownership.partition.unshared.get(update.ownership.rank, ()), options
            )
        )
        ownerships = [update.ownership for update in updates]
        groups = dict.fromkeys(one.owner_group for one in ownerships if one.partition.shared)
        if not groups:
            run(tasks, options)
        # Group after group: ranks of one may not be in the next, and all must keep one order.
        # Unshared matrices run under the first exchange, which leaves no tasks to the others.
        try:
            # All are there before the first exchange, so that an error can end all.
            self._owner_groups.connect(group for group in groups if group is not None)
            for group in groups:
                assert group is not None  # a rank alone shares nothing
                run_rounds(self._exchanges(group, updates, options), lambda: run(tasks, options))
        except BaseException as error:
            self._owner_groups.abort(error)
            raise

    def _exchanges(
        self, owner_group: OwnerGroup, updates: list[Update], options: MatmulOptions
    ) -> Iterator[DirectionExchange]:
        """Yield the rounds of an owner group."""
        members = [u for u in updates if u.ownership.owner_group is owner_group]
        partitions = tuple(update.ownership.partition for update in members)
        comm_stream = self._owner_groups.comm_stream_of(options.device)
        self._owner_groups.begin_step(owner_group)
        group = owner_group.group
        size = round_elements(options.device)
        for assignments in plan_rounds(partitions, group.size(), size):
            yield DirectionExchange(members, options, assignments, group, comm_stream)


def _update_momentum(settings: MuonSettings, updates: list[Update]) -> None:
    """Update the momentum with the gradients, and decay the weights."""
    if updates:
        torch._foreach_lerp_(
            [update.buffer for update in updates],
            [update.gradient for update in updates],
            1 - settings.momentum,
        )
        torch._foreach_mul_([update.local for update in updates], settings.decay)


def _check_group(group: dict[str, Any]) -> None:
    if group["algorithm"] not in ALGORITHMS:
        raise ValueError(f'"algorithm": {group["algorithm"]!r} in a group; use "muon" or "adamw"')
    if group["algorithm"] == "adamw":
        AdamW([torch.empty(0)], **{name: group[name] for name in _OF_ADAMW})
        return
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not float(group[name]) >= 0:
            raise ValueError(f"{name}={group[name]}: must not be negative")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            f'adjust_lr_fn={group["adjust_lr_fn"]!r}: use "original" or "match_rms_adamw"'
        )
    polynomials(group["ns_coefficients"], group["ns_steps"])
    for parameter in group["params"]:
        check_matrices(parameter, group["split"], "Muon", _INSTEAD)
