"""Run an ordinary optimizer of matrices on sharded parameters: each rank steps whole matrices."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from fsdp_overlap.comm.comm_streams import has_streams, streams_of
from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.optim import exchange
from fsdp_overlap.optim.adamw import AdamW
from fsdp_overlap.optim.contiguous import compute_device, edits_of, local_of
from fsdp_overlap.optim.exchange import OwnerAssignment, plan_rounds, run_rounds
from fsdp_overlap.optim.layer_wise_batches import (
    Batch,
    Factory,
    GroupOptimizer,
    Matrix,
    OwnBatch,
    options_of,
)
from fsdp_overlap.optim.layer_wise_exchange import MatrixExchange, SharedParameters
from fsdp_overlap.optim.layer_wise_states import local_states, with_states_of_all_ranks
from fsdp_overlap.optim.matrices import (
    MatrixBatch,
    MatrixPartition,
    SharedMatrices,
    Split,
    flops_of,
    matrix_number,
)
from fsdp_overlap.optim.matrix_param_groups import (
    check_matrices,
    choice_table,
    matrix_param_groups,
)
from fsdp_overlap.optim.overlapped_steps import (
    Groups,
    OverlappedSteps,
    OverlapPolicy,
    check_no_prefetch,
)
from fsdp_overlap.optim.owner_groups import OwnerGroup, OwnerGroups
from fsdp_overlap.optim.states import between_load_hooks, same_option
from fsdp_overlap.tensor.ops import record_edits
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tensor.ragged_dtensor import ShardEdits, ShardedParam

Cost = Callable[[MatrixBatch | SharedMatrices], float]
"""What a step of matrices costs, in any unit. ``count``, ``rows`` and ``columns`` say how many they
are, and how large each is."""

_INSTEAD = 'by layer_wise= or in a group with "layer_wise": False leave it to the others'


class LayerWise(torch.optim.Optimizer):
    """Steps the matrices of a model by an ordinary optimizer, such as ``torch.optim.Muon``, SOAP,
    Shampoo or Adafactor, which is given each of them whole, as a plain parameter.

    Each matrix is stepped by one rank. If one rank holds all of it, as under the layout
    ``TensorAtomic()``, the optimizer works in the shard's memory, and :meth:`step` sends nothing.
    If ranks hold parts of a matrix, or replicas, they send their parts of the gradient and the
    parameter to one of them, which sends the result back. Results are those of the unsharded model.

    Args:
        params: a model, or parameters or groups as for any optimizer. In a model ``factory`` is
            given the hidden matrices (see :class:`Muon`), and ``others`` all other parameters. Of
            parameters and groups ``others`` is given groups with ``"layer_wise": False``.
        factory: makes the optimizer of a list of matrices. A stack ``[n, rows, columns]`` is ``n``
            matrices. Called for this rank's own matrices of each group, and for each round in which
            matrices are exchanged.
        others: makes the optimizer of a list of sharded parameters, which must work on their
            elements.
        layer_wise: which parameters of the model ``factory`` is given (True) or ``others``. The
            keys are names of parameters, or patterns.
        split: the parts of a parameter that are matrices of their own, as for :class:`Muon`.
        cost: what a step of matrices costs, by which ranks are balanced. ``"measured"``: how long a
            matrix of each shape took ``factory``'s optimizer before the first step, as the mean of
            the ranks that share matrices.
        overlap: as for :class:`AdamW`, which ``others`` must make then. Each unit has an optimizer
            of its own, and is stepped in :meth:`step` if ranks hold parts of its matrices.

    Options of the groups, learning rates among them, are those of the optimizers that ``factory``
    and ``others`` make. State dicts have the state of each matrix by its number in the parameter,
    as sharded tensors that the rank that steps it holds, so that ``torch.distributed.checkpoint``
    loads them under any number of ranks, mesh and layout, and gathers full ones. A state dict of
    the optimizer itself can be loaded, too.

    Raises:
        TypeError, ValueError: an option or a parameter is one that this cannot work with.
    """

    overlapped: OverlappedSteps | None = None
    edits_states = True

    def __init__(
        self,
        params: Any,
        factory: Factory,
        others: Factory = AdamW,
        *,
        layer_wise: Mapping[str, bool] | None = None,
        split: Mapping[str, Split] | None = None,
        cost: Cost | Literal["measured"] = flops_of,
        overlap: OverlapPolicy | None = None,
    ) -> None:
        if overlap is not None:
            self.overlapped = OverlappedSteps(self, overlap, prefetch_next_forward=False)
        self._factory = factory
        self._others = others
        self._cost = cost
        self._other_optimizer: torch.optim.Optimizer | None = None
        self._counting: list[GroupOptimizer] = []
        """What counts the steps of each group of matrices in which this rank has none to step."""
        self._grouping: list[tuple[Any, ...]] = []
        """The split and ids of each group of matrices and its parameters, as of the last step."""
        self._group_of: dict[torch.Tensor, dict[str, Any]] = {}
        """The group of each parameter whose matrices are stepped."""
        self._batches: list[Batch] = []
        self._own_batches: list[OwnBatch] = []
        """Those of which this rank has all matrices."""
        self._active: set[int] = set()
        """The ids of the groups that are stepped in the current step."""
        self._stepped: dict[GroupOptimizer, bool] = {}
        """What was stepped in the current step, and whether it had a gradient."""
        self._in_thread: dict[GroupOptimizer, None] = {}
        """What a thread steps, of the last step."""
        self._planned: tuple[list[Any], bool] = [], False
        """Groups as :attr:`overlapped` read them, and whether all are as of the last step."""
        self._matrices: dict[torch.Tensor, list[Matrix]] = {}
        """Those that this rank steps, by parameter."""
        self._splits: dict[torch.Tensor, Split] = {}
        self._shared: list[SharedParameters] = []
        self._owner_groups = OwnerGroups("LayerWise")
        self._choice_table = ""
        if isinstance(cost, str) and cost != "measured":
            raise ValueError(f'cost={cost!r}: use "measured", or a function of matrices')
        if isinstance(params, nn.Module):
            model, values = params, (True, False)
            params = matrix_param_groups(model, "layer_wise", values, layer_wise or {}, split or {})
            self._choice_table = choice_table(model, "layer_wise", params)
        elif layer_wise or split:
            raise ValueError(
                "layer_wise= and split= name parameters of a model: pass the model, or groups of "
                'parameters with "layer_wise" and "split" in each'
            )
        super().__init__(params, {"layer_wise": True, "split": 1})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group["layer_wise"]:
                for parameter in group["params"]:
                    check_matrices(parameter, group["split"], "LayerWise", _INSTEAD)
                made = self._factory([nn.Parameter(torch.zeros(1, 1))])
            else:
                made = self._others(group["params"])
                if self.overlapped is not None:
                    _check_others(made)
            options = options_of(made)
        except Exception:
            self.param_groups.pop()
            raise
        for name, value in options.items():
            group.setdefault(name, value)
        if self.overlapped is not None:
            self.overlapped.add(group["params"])
        if group["layer_wise"]:
            return
        self._state.update(made.state)
        if self._other_optimizer is None:
            made.param_groups = [group]
            self._other_optimizer = made
        else:
            self._other_optimizer.add_param_group(group)

    @property
    def state(self) -> Any:
        """The states by parameter. A read waits for steps in a thread, which edits them."""
        if self.overlapped is not None:
            finish_pending_steps()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state

    @property
    def _state(self) -> Any:
        return vars(self)["state"]

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self._choice_table}".rstrip()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a LayerWise cannot be copied or pickled: make one of the other model, and load the "
            "state dict"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have a gradient.

        If several ranks hold parts of a matrix, this must be called on every rank of its mesh, and
        the same parameters must have gradients on all of them, as backward leaves them.

        If it raises, some parameters have moved and others not: call ``ctx.reset()`` on every rank,
        and load a checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = self.overlapped.step() if self.overlapped is not None else []
        self._prepare()
        in_thread = {p for param_group in given for p in param_group.sharded_parameters}
        self._active = {
            id(group)
            for group in self._groups(layer_wise=True)
            if _has_gradient(group) or not in_thread.isdisjoint(group["params"])
        }
        self._stepped = {}
        batches = [batch for edits in edits_of(in_thread) for batch in self._own_with(edits)]
        self._in_thread = {part: None for batch in batches for part in batch.parts}
        run_unshared = self._step_unshared
        try:
            # All are there before the first exchange, so that an error can end all.
            self._owner_groups.connect(map(self._owner_group_of, self._shared))
            for shared in self._shared:  # one after the other, in the same order on all ranks
                run_rounds(self._exchanges(shared), run_unshared)
                run_unshared = _do_nothing
            run_unshared()
            self._end_step()
        except BaseException as error:
            if self._shared:
                self._owner_groups.abort(error)
            raise
        record_edits(parameter for parameter in self._matrices if parameter.grad is not None)
        return loss

    def _step_unshared(self) -> None:
        """Step all that this rank steps without others."""
        if (other := self._other_optimizer) is not None:
            other.param_groups = self._groups(layer_wise=False)
            other.state = self._state
            if any(map(_has_gradient, other.param_groups)):
                other.step()
        for batch in self._own_batches:
            if self._in_thread.keys().isdisjoint(batch.parts):
                batch.wait()
                shards = batch.shards()
                batch.begin(shards)
                self._step_parts(batch.parts)
                batch.end(shards)

    def _step_parts(self, parts: Iterable[GroupOptimizer]) -> None:
        for part in parts:
            is_done = part in self._stepped or part in self._in_thread
            if id(part.group) in self._active and not is_done:
                part.step(self._state, part.changed_options(part.group))
                self._stepped[part] = part.has_gradient

    def _end_step(self) -> None:
        """Have all optimizers of the groups that were stepped count the step, and show in the
        groups what they keep there."""
        for batch in self._batches:
            self._step_parts(batch.parts)
        of_groups = {id(part.group) for part in self._stepped}
        self._step_parts(part for part in self._counting if id(part.group) not in of_groups)
        # The options that a group shows are those of its last matrices that had a gradient.
        for part in sorted(self._stepped, key=self._stepped.__getitem__):
            group = part.group
            for name, value in part.options.items():
                if name not in group or not same_option(value, group[name]):
                    group[name] = copy.deepcopy(value)  # the optimizer may edit its own in place
        for part in (*self._stepped, *self._in_thread):
            part.end_step()

    def can_plan(self, parameters: Sequence[torch.Tensor]) -> bool:
        assert self.overlapped is not None
        if self._planned[0] is not self.overlapped.groups:
            is_grouped = self._grouping == self._find_grouping()
            self._planned = self.overlapped.groups, is_grouped
        return self._planned[1] and all(
            # On ranks that step none of its matrices the state of a parameter is empty.
            p in self._state and not self._owner_groups.shares(p)
            if p in self._group_of
            else self._state.get(p)
            for p in parameters
        )

    def plan(self, groups: Groups) -> Callable[[], None]:
        others = [(key, group) for key, group in groups if not group["layer_wise"]]
        step_others = _do_nothing
        if others:
            assert isinstance(self._other_optimizer, AdamW)
            self._other_optimizer.state = self._state
            step_others = self._other_optimizer.plan(others)
        group_of = {parameter: group for _, group in groups for parameter in group["params"]}
        batches = [batch for edits in edits_of(group_of) for batch in self._own_with(edits)]
        steps = [batch.plan(group_of) for batch in batches]

        def run() -> None:
            step_others()
            for step in steps:
                step(self._state)

        return run

    def _own_with(self, edits: ShardEdits) -> list[OwnBatch]:
        return [batch for batch in self._own_batches if batch.edits is edits]

    # ---- who steps what ----

    def _prepare(self) -> None:
        """Find which matrices this rank steps. Collective at the first call, and when there are new
        ones.

        Raises:
            ValueError: a parameter cannot be stepped as its group says. Nothing was changed then.
        """
        self._owner_groups.drop_ended()
        groups = self._groups(layer_wise=True)
        group_of = {p: group for group in groups for p in group["params"]}
        self._check_groups(group_of)
        self._owner_groups.add((p, group["split"]) for p, group in group_of.items())
        new = [parameter for parameter in group_of if parameter not in self._matrices]
        if new:
            self._splits |= {parameter: group_of[parameter]["split"] for parameter in new}
            self._add_parameters(new)
        if (grouping := self._find_grouping()) != self._grouping:
            self._grouping, self._group_of = grouping, group_of
            self._regroup(groups)
        for parameter in group_of:  # also on ranks that step none: checkpoints look for all
            for matrix in self._matrices[parameter]:
                self._state[parameter].setdefault(matrix.number, {})
            self._state[parameter]  # which makes an empty one

    def _find_grouping(self) -> list[tuple[Any, ...]]:
        groups = self._groups(layer_wise=True)
        return [(group["split"], id(group), *map(id, group["params"])) for group in groups]

    def _groups(self, layer_wise: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if bool(group["layer_wise"]) == layer_wise]

    def _check_groups(self, group_of: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        for parameter, group in group_of.items():
            if parameter not in self._matrices:
                check_matrices(parameter, group["split"], "LayerWise", _INSTEAD)
            split = self._splits.get(parameter, group["split"])
            if split != group["split"]:
                raise ValueError(
                    f'"split" of a group was {split}, and is {group["split"]}: optimizers have '
                    "states of the matrices that there were"
                )
        others = chain.from_iterable(group["params"] for group in self._groups(layer_wise=False))
        moved = [p for p in others if p in self._matrices]
        moved += [p for p in group_of if p not in self._matrices and self._state.get(p)]
        if moved:
            raise ValueError(
                f"a parameter of shape {tuple(moved[0].shape)} was moved to a group with another "
                '"layer_wise": the optimizers that factory and others make have different states. '
                "Make a new LayerWise"
            )

    def _regroup(self, groups: Sequence[dict[str, Any]]) -> None:
        """Have each matrix stepped with the options of the group that its parameter is in."""
        before = {id(part.group): part for part in self._counting}
        self._counting = [
            before.get(id(group)) or GroupOptimizer(group, (), self._factory) for group in groups
        ]
        for batch in self._batches:
            batch.regroup(self._group_of, self._factory, self._state)

    def _add_parameters(self, new: Sequence[torch.Tensor]) -> None:
        """Find who steps the matrices of ``new``. Collective."""
        sharing: dict[tuple[OwnerGroup, torch.dtype], list[torch.Tensor]] = {}
        places: dict[ShardEdits | None, list[tuple[int, list[Matrix]]]] = {}
        for parameter in new:
            self._matrices[parameter] = []
            ownership = self._owner_groups.ownership_of(parameter)
            edits = None  # all that no thread steps is stepped together
            if self.overlapped is not None and isinstance(parameter, ShardedParam):
                edits = parameter.edits
            own = places.setdefault(edits, [])
            for unshared in ownership.partition.unshared.get(ownership.rank, ()):
                matrices = list(self._own_matrices(parameter, unshared))
                own.append((unshared.start - ownership.start, matrices))
            if ownership.owner_group is not None:
                key = ownership.owner_group, local_of(parameter).dtype
                sharing.setdefault(key, []).append(parameter)
        for edits, own in places.items():
            batch = OwnBatch(own, edits)
            self._own_batches.append(batch)
            self._add_batch(batch)
        for (owner_group, _), parameters in sharing.items():
            self._add_shared(owner_group, tuple(parameters))

    def _add_batch(self, batch: Batch) -> None:
        for matrix in batch.matrices:
            self._matrices[matrix.parameter].append(matrix)
        self._batches.append(batch)

    def _own_matrices(self, parameter: torch.Tensor, batch: MatrixBatch) -> Iterator[Matrix]:
        ownership = self._owner_groups.ownership_of(parameter)
        tile, shape, split = ownership.partition.tile, tuple(parameter.shape), ownership.split
        assert tile is not None
        device = local_of(parameter).device
        for one in batch.split(1):
            number = matrix_number(shape, split, tile, one.start)
            yield Matrix(parameter, str(number), (batch.rows, batch.columns), device)

    def _add_shared(self, owner_group: OwnerGroup, parameters: tuple[torch.Tensor, ...]) -> None:
        partitions = tuple(self._owner_groups.ownership_of(p).partition for p in parameters)
        size = len(owner_group.ranks)
        if not any(partition.shared for partition in partitions):
            return
        cost = self._cost
        if isinstance(cost, str):
            self._owner_groups.begin_step(owner_group)
            cost = self._measured_cost(owner_group, parameters[0], partitions)
        elements = exchange.round_elements(local_of(parameters[0]).device)
        rounds = []
        owned: dict[OwnerAssignment, list[Matrix]] = {}
        for assignments in plan_rounds(partitions, size, elements, cost):
            mine = {
                one: list(self._shared_matrices(parameter, one.matrices))
                for one in assignments
                if one.owner == owner_group.rank
                for parameter in [parameters[one.parameter]]
            }
            batch = Batch(list(chain.from_iterable(mine.values())))
            self._add_batch(batch)
            rounds.append((assignments, batch))
            owned |= mine
        self._shared.append(SharedParameters(parameters, tuple(rounds), owned))

    def _measured_cost(
        self,
        owner_group: OwnerGroup,
        example: torch.Tensor,
        partitions: Sequence[MatrixPartition],
    ) -> Cost:
        """Return the mean over ranks of what a step took. Collective over the owner group."""
        dtype, device = local_of(example).dtype, compute_device(example)
        found: set[tuple[int, int]] = set()
        for partition in partitions:
            unshared = chain.from_iterable(partition.unshared.values())
            found.update((batch.rows, batch.columns) for batch in unshared)
            found.update((matrices.rows, matrices.columns) for matrices in partition.shared)
        shapes = sorted(found)
        mine = [_seconds(self._factory, torch.zeros(s, dtype=dtype, device=device)) for s in shapes]
        of_ranks = gather_objects(mine, owner_group.group, owner_group.device, "LayerWise")
        means = [sum(each) / len(each) for each in zip(*of_ranks, strict=True)]
        mean_of = dict(zip(shapes, means, strict=True))
        return lambda matrices: matrices.count * mean_of[matrices.rows, matrices.columns]

    def _shared_matrices(
        self, parameter: torch.Tensor, matrices: SharedMatrices
    ) -> Iterator[Matrix]:
        ownership = self._owner_groups.ownership_of(parameter)
        tile, shape = ownership.partition.tile, tuple(parameter.shape)
        device = compute_device(parameter)
        for index in range(matrices.count):
            if tile is None:
                number = ownership.partition.shared.index(matrices)
            else:
                start = matrices.chunks[0].start + index * matrices.rows * matrices.columns
                number = matrix_number(shape, ownership.split, tile, start)
            yield Matrix(parameter, str(number), (matrices.rows, matrices.columns), device)

    def _owner_group_of(self, shared: SharedParameters) -> OwnerGroup:
        owner_group = self._owner_groups.ownership_of(shared.parameters[0]).owner_group
        assert owner_group is not None
        return owner_group

    def _exchanges(self, shared: SharedParameters) -> Iterator[MatrixExchange]:
        """Yield the rounds in which a parameter has a gradient."""
        example = shared.parameters[0]
        owner_group = self._owner_group_of(shared)
        dtype, device = local_of(example).dtype, compute_device(example)
        comm_stream = self._owner_groups.comm_stream_of(device)
        has_begun = False
        for assignments, batch in shared.rounds:
            batch.drop_gradients()
            stepped = tuple(
                one
                for one in assignments
                for parameter in [shared.parameters[one.parameter]]
                if parameter.grad is not None and parameter in self._group_of
            )
            if not stepped:
                continue
            if not has_begun:
                self._owner_groups.begin_step(owner_group)
                has_begun = True
            step = partial(self._step_parts, batch.parts)
            group = owner_group.group
            yield MatrixExchange(
                shared, self._owner_groups, step, stepped, group, comm_stream, dtype, device
            )

    # ---- state dicts ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, which has the states of all matrices, as sharded tensors that the
        rank that steps a matrix holds. Collective over the meshes of the parameters."""
        self._prepare()
        hook = self.register_state_dict_post_hook(
            lambda _, state_dict: self._gather_states(state_dict), prepend=True
        )
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def _gather_states(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Put the states of all matrices into ``state_dict``, beside what others keep for
        parameters, such as the slow weights of Lookahead."""
        numbered = enumerate(chain.from_iterable(group["params"] for group in self.param_groups))
        sharing: dict[OwnerGroup, list[tuple[int, torch.Tensor]]] = {}
        for index, parameter in numbered:
            group = self._owner_groups.group_of_mesh(parameter)
            if parameter in self._matrices and group is not None:
                sharing.setdefault(group, []).append((index, parameter))
        self._owner_groups.connect(sharing)
        for group, members in sharing.items():
            split = [_of_matrices_and_others(self.state[parameter]) for _, parameter in members]
            of_all_ranks = with_states_of_all_ranks([own for own, _ in split], group)
            for (index, _), (_, beside), states in zip(members, split, of_all_ranks, strict=True):
                state_dict["state"][index] = beside | states
        pairs = zip(self.param_groups, state_dict["param_groups"], strict=True)
        saved_of = {id(shown): saved for shown, saved in pairs}
        for part in self._in_thread:  # which had not ended when groups were shown
            saved_of.get(id(part.group), {}).update(part.own_options())
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of the optimizer of an unsharded model. It has the
        states of the matrices that this rank steps, or those of all, as a full state dict: under
        another layout, load with ``torch.distributed.checkpoint``.

        Collective before the first step.

        Raises:
            ValueError: groups differ, or the state of a matrix that this rank steps is missing.
                Nothing was changed then.
        """
        finish_pending_steps()
        self._prepare()
        states: dict[torch.Tensor, Any] = {}
        loaded: dict[torch.Tensor, dict[str, Any]] = {}

        def read(state_dict: dict[str, Any]) -> dict[str, Any]:
            states.update(self._states_in(state_dict))
            self._check_complete({p: states[p] for p in self._group_of})
            loaded.update({p: self._loaded_state(p, states[p]) for p in self._group_of})
            kept = ("layer_wise", "split")  # another optimizer's state dict lacks them
            groups = [
                {name: mine[name] for name in kept} | its
                for mine, its in zip(self.param_groups, state_dict["param_groups"], strict=True)
            ]
            return {**state_dict, "state": {}, "param_groups": groups}

        with between_load_hooks(self, read, lambda: self._take_states(states, loaded)):
            super().load_state_dict(state_dict)

    def _states_in(self, state_dict: Mapping[str, Any]) -> dict[torch.Tensor, Any]:
        """Return the states in ``state_dict`` by parameter."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        if [len(g["params"]) for g in state_dict["param_groups"]] != [
            len(g["params"]) for g in self.param_groups
        ]:
            raise ValueError("the state dict has other groups of parameters")
        return {p: state_dict["state"].get(index) for index, p in zip(saved, own, strict=True)}

    def _take_states(
        self, states: Mapping[torch.Tensor, Any], loaded: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Take ``loaded`` states of matrices, and those in ``states`` of all other parameters."""
        self.state.update(loaded)
        if (other := self._other_optimizer) is not None:
            other.param_groups = self._groups(layer_wise=False)
            others = chain.from_iterable(group["params"] for group in other.param_groups)
            numbers = {parameter: index for index, parameter in enumerate(others)}
            groups = [
                {**group, "params": list(map(numbers.__getitem__, group["params"]))}
                for group in other.param_groups
            ]
            numbered = {index: states[p] for p, index in numbers.items() if states[p]}
            other.load_state_dict({"state": numbered, "param_groups": groups})
            self.state.update(other.state)

    def _loaded_state(
        self, parameter: torch.Tensor, states: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return a copy of the loaded ``states`` of ``parameter``: those of the matrices that this
        rank steps, and what others keep beside them."""
        of_matrices, beside = _of_matrices_and_others(states or {})
        kept = _moved(copy.deepcopy(beside), local_of(parameter).device) if of_matrices else {}
        return kept | {m.number: self._state_of(m, states) for m in self._matrices[parameter]}

    def _state_of(self, matrix: Matrix, states: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a copy of the state of ``matrix`` among the loaded ``states`` of its parameter, on
        the device where it is stepped."""
        if states is None:  # saved before the first step
            return {}
        shape = tuple(matrix.parameter.shape)
        if states and not any(map(str.isdigit, states)) and matrix.shape == shape:
            state = states  # of an optimizer that stepped the whole parameter
        elif matrix.number in states:
            state = states[matrix.number]
        else:
            state = None
        if state is None or (held := local_states(state)) is None:
            raise ValueError(
                f"the state dict lacks matrix {matrix.number} of a parameter of shape {shape}, "
                "which this rank steps: it was saved on another rank; save and load with "
                "torch.distributed.checkpoint"
            )
        return {
            name: value if name == "step" else _moved(value, matrix.plain.device)
            for name, value in copy.deepcopy(held).items()
        }

    def _check_complete(self, states: Mapping[torch.Tensor, Mapping[str, Any] | None]) -> None:
        """Raise if loaded ``states`` have those of some matrices, and not of others."""
        # Of a flattened state dict torch takes on each rank what its optimizer has states of.
        stepped = {p for p in states if self._matrices[p] and p.requires_grad}
        if stepped == {p for p, of_matrices in states.items() if of_matrices}:
            return
        numbers = {p: i for i, p in enumerate(chain(*(g["params"] for g in self.param_groups)))}
        # One of this class has an entry for each matrix. Optimizers of torch leave out parameters
        # that were never stepped.
        is_own = any(name.isdigit() for each in states.values() for name in each or ())
        lacking = [
            f"{numbers[p]} of shape {tuple(p.shape)}"
            for p, of_matrices in states.items()
            if not of_matrices and (is_own or of_matrices is not None) and p.requires_grad
        ]
        if lacking and any(states.values()):
            raise ValueError(
                f"the state dict has states of some matrices, but lacks parameters "
                f"{', '.join(lacking)}, as if one rank had saved its own alone: save and load on "
                "every rank with torch.distributed.checkpoint.state_dict"
            )


def _of_matrices_and_others(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``state`` has of matrices, by number, and what it has by other names."""
    of_matrices = {name: value for name, value in state.items() if name.isdigit()}
    return of_matrices, {name: value for name, value in state.items() if name not in of_matrices}


def _has_gradient(group: dict[str, Any]) -> bool:
    return any(parameter.grad is not None for parameter in group["params"])


def _check_others(made: torch.optim.Optimizer) -> None:
    """Raise ValueError unless a thread can step what ``others`` makes."""
    what = type(made).__name__
    if not isinstance(made, AdamW):
        raise ValueError(
            f"overlap= with others= that makes {what} of {type(made).__module__}, which a thread "
            "cannot step: let it make fsdp_overlap.optim.AdamW, the default, or leave overlap= out"
        )
    if made.overlapped is not None:
        raise ValueError(
            f"overlap= with others= that makes {what} with overlap=: give it to LayerWise alone"
        )
    check_no_prefetch(made._prefetch_next_forward)


def _do_nothing() -> None:
    pass


def _seconds(factory: Factory, values: torch.Tensor) -> float:
    """Return how long a step of one matrix takes. The first one, which makes the states, is left
    out. Some optimizers do more in every tenth step."""
    plain = nn.Parameter(values)
    optimizer = factory([plain])
    generator = torch.Generator().manual_seed(0)  # the user's stays as it is
    began = 0.0
    for index in range(11):
        plain.grad = torch.randn(values.shape, generator=generator).to(values)
        optimizer.step()
        if index in (0, 10):
            if has_streams(values.device):
                streams_of(values.device).synchronize()
            began, before = time.perf_counter(), began
    return (began - before) / 10


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(each, device) for each in value)
    return value
