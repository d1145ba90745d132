"""Batches of matrices, and the ordinary optimizers that LayerWise has step them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_overlap.engine.mesh import ParamGroupEdits
from fsdp_overlap.optim.contiguous import local_of
from fsdp_overlap.optim.states import same_option
from fsdp_overlap.tensor.ragged_dtensor import ShardEdits

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an ordinary optimizer of parameters."""

States = Mapping[torch.Tensor, dict[str, Any]]
"""The states of each parameter's matrices, by their number."""

_NOT_OPTIONS = {"params", "param_names", "layer_wise", "split"}


def value_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, flat. Edits of it are not counted."""
    return local_of(parameter).data.view(-1)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of the gradient, flat, in the dtype of the parameter."""
    assert parameter.grad is not None
    return local_of(parameter.grad).reshape(-1).to(local_of(parameter).dtype)


class Matrix:
    """One matrix that this rank steps: ``plain`` is what the optimizer is given."""

    def __init__(
        self,
        parameter: torch.Tensor,
        number: str,
        shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.parameter = parameter
        self.number = number
        self.shape = shape
        dtype = local_of(parameter).dtype
        # A placeholder without memory: a step gives it the values.
        self.plain = nn.Parameter(torch.empty(1, dtype=dtype, device=device).expand(shape))

    def set(self, value: torch.Tensor, gradient: torch.Tensor) -> None:
        self.plain.data = value.view(self.shape)
        self.plain.grad = gradient.view(self.shape)

    def drop(self, target: torch.Tensor) -> None:
        """Let go of all memory. The values are in ``target`` then, which is what was set."""
        value = self.plain.data
        self.plain.grad = None
        self.plain.data = value.new_empty(1).expand(self.shape)
        if value.data_ptr() != target.data_ptr():  # some replace a parameter's data
            target.copy_(value.view(target.shape))


class GroupOptimizer:
    """The optimizer of those matrices of a batch that are in one param group. Without any it counts
    steps, as some optimizers do in their group."""

    def __init__(self, group: dict[str, Any], matrices: Sequence[Matrix], factory: Factory) -> None:
        self.group = group
        self.matrices = matrices
        plain = [matrix.plain for matrix in matrices]
        self.optimizer = factory(plain or [nn.Parameter(torch.zeros(1, 1))])
        self._known: dict[str, Any] = {}
        """The options as they were when the last step ended."""

    @property
    def options(self) -> dict[str, Any]:
        return options_of(self.optimizer)

    @property
    def has_gradient(self) -> bool:
        return any(matrix.plain.grad is not None for matrix in self.matrices)

    def changed_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return those options of ``group`` that were changed since the last step. What the
        optimizer itself changes, such as a number of steps, is its own."""
        return {
            name: copy.deepcopy(group[name])
            for name in group.keys() - _NOT_OPTIONS
            if name not in self._known or not same_option(group[name], self._known[name])
        }

    def step(self, states: States, changed_options: Mapping[str, Any]) -> None:
        """Step the matrices that have a gradient, whose states are in ``states``."""
        (own_group,) = self.optimizer.param_groups
        own_group.update(changed_options)
        of_plain = self.optimizer.state
        for matrix in self.matrices:  # somebody may have removed or replaced a state
            if state := states[matrix.parameter].get(matrix.number):
                of_plain[matrix.plain] = state
            else:
                of_plain.pop(matrix.plain, None)
        self.optimizer.step()
        for matrix in self.matrices:
            if matrix.plain in of_plain:
                states[matrix.parameter][matrix.number] = of_plain[matrix.plain]

    def end_step(self) -> None:
        """Note the options that the group has after the step."""
        names = self.group.keys() - _NOT_OPTIONS
        self._known = copy.deepcopy({name: self.group[name] for name in names})

    def own_options(self) -> dict[str, Any]:
        """Return the options of which the optimizer's are newer than those that the group shows."""
        changed = self.changed_options(self.group)
        return copy.deepcopy({k: v for k, v in self.options.items() if k not in changed})


class Batch:
    """Matrices that are stepped together: ``parts`` has those of each param group."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = matrices
        self.parts: list[GroupOptimizer] = []

    def regroup(
        self, group_of: Mapping[torch.Tensor, dict[str, Any]], factory: Factory, states: States
    ) -> None:
        """Divide the matrices as their parameters are now. What is in no group is not stepped."""
        before = {(id(part.group), *part.matrices): part for part in self.parts}
        members: dict[int, list[Matrix]] = {}
        for matrix in self.matrices:
            if matrix.parameter in group_of:
                members.setdefault(id(group_of[matrix.parameter]), []).append(matrix)
        self.parts = []
        for key, matrices in members.items():
            part = before.get((key, *matrices))
            if part is None:
                part = GroupOptimizer(group_of[matrices[0].parameter], matrices, factory)
                for matrix in matrices:
                    made = part.optimizer.state.get(matrix.plain)  # some do before the first step
                    if made is not None and not states[matrix.parameter].get(matrix.number):
                        states[matrix.parameter][matrix.number] = made
            self.parts.append(part)

    def drop_gradients(self) -> None:
        """Drop what a step that raised has left."""
        for matrix in self.matrices:
            matrix.plain.grad = None


Shards = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A parameter, and the shards of its values and its gradient."""


class OwnBatch(Batch):
    """Matrices of which this rank has all, so that the optimizer works in the shards.

    ``places`` has the start of those that follow each other in the shard of a parameter. ``edits``
    counts the edits of all these shards, if they can be stepped apart from others.
    """

    def __init__(
        self, places: Sequence[tuple[int, Sequence[Matrix]]], edits: ShardEdits | None
    ) -> None:
        self.edits = edits
        super().__init__([matrix for _, matrices in places for matrix in matrices])
        self._places = places

    def wait(self) -> None:
        """Block until no thread steps them."""
        if isinstance(self.edits, ParamGroupEdits):
            self.edits.finish_step()

    def shards(self) -> list[Shards]:
        """Return the shards of the parameters that have a gradient, each once."""
        parameters = dict.fromkeys(matrix.parameter for matrix in self.matrices)
        return [
            (parameter, value_of(parameter), local_of(parameter.grad))
            for parameter in parameters
            if parameter.grad is not None
        ]

    def begin(self, shards: Sequence[Shards]) -> None:
        """Let the optimizers work in ``shards``."""
        self.drop_gradients()
        values = self._each({parameter: value for parameter, value, _ in shards})
        gradients = self._each({p: grad.reshape(-1).to(value.dtype) for p, value, grad in shards})
        for (matrix, value), (_, gradient) in zip(values, gradients, strict=True):
            matrix.set(value, gradient)

    def end(self, shards: Sequence[Shards]) -> None:
        """Let go of ``shards``, whose memory may be another one in the next step."""
        for matrix, value in self._each({parameter: value for parameter, value, _ in shards}):
            matrix.drop(value)

    def plan(self, group_of: Mapping[torch.Tensor, Mapping[str, Any]]) -> Callable[[States], None]:
        """Return what steps all in another thread, with the gradients and options of now."""
        shards = self.shards()
        steps = [
            partial(part.step, changed_options=part.changed_options(group_of[parameter]))
            for part in self.parts
            for parameter in [part.matrices[0].parameter]
        ]

        def run(states: States) -> None:
            self.begin(shards)
            for step in steps:
                step(states)
            self.end(shards)

        return run

    def _each(
        self, shards: Mapping[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[Matrix, torch.Tensor]]:
        """Yield the matrices of the parameters in ``shards``, and what is there of each."""
        for start, matrices in self._places:
            if (shard := shards.get(matrices[0].parameter)) is not None:
                rows, columns = matrices[0].shape
                count = len(matrices)
                held = shard.narrow(0, start, count * rows * columns).view(count, rows, columns)
                yield from zip(matrices, held, strict=True)


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of an optimizer that was made of one list of parameters.

    Raises:
        ValueError: it has several groups.
    """
    if len(optimizer.param_groups) != 1:
        raise ValueError(
            f"{type(optimizer).__name__} made {len(optimizer.param_groups)} groups of one list of "
            "parameters: pass groups to LayerWise instead"
        )
    (group,) = optimizer.param_groups
    return {name: group[name] for name in group.keys() - _NOT_OPTIONS}
