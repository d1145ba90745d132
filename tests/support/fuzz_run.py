"""A random program's model and its unsharded twin, and what must hold after each operation."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.comm_streams import has_streams
from fsdp_overlap.engine.unit import Unit, unit_of
from support.fuzz_setup import Setup
from support.held import held_of
from support.random_models import TensorAtomic
from support.twins import Twins, same

MAX_BATCHES = 1000

Losses = tuple[torch.Tensor, torch.Tensor]


@dataclass
class ReduceOptions:
    """What a unit was told of its reductions."""

    has_replicas: bool
    synchronizes: bool = True
    all_reduce_grads: bool = True
    is_last: bool = True
    last_only: bool = False

    @property
    def completes(self) -> bool:
        is_asked = self.synchronizes and (self.is_last or not self.last_only)
        return is_asked and (self.all_reduce_grads or not self.has_replicas)


class Run(Twins):
    """Both models, and what is expected of the sharded one.

    ``open`` are the losses that no backward has come back to. ``unreduced`` are the gradients, by
    parameter, of backwards that did not reduce them. ``at_rest``: nothing is to be unsharded but
    what the settings keep. ``by_hand``: some unit's parameters may be registered unsharded.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        meshes = setup.make_meshes()
        super().__init__(
            lambda: TensorAtomic(setup.node),
            partial(setup.shard, meshes=meshes),
            device=setup.device,
            ctx=setup.make_context(meshes),
        )
        # Ranks of tensor parallelism see the same rows.
        self.rank //= setup.tensor_ranks
        self.world //= setup.tensor_ranks
        self.optimizer = setup.make_optimizer(self.model)
        self.twin_optimizer = setup.make_twin_optimizer(self.twin)
        self.data = self.batches(MAX_BATCHES)
        self.whole = list(self.twin.parameters())
        self.saved: Any = None
        self.seen = Counter(setup.notes)
        self.folders: list[Any] = []
        self.adopt(self.model, self.optimizer)

    def adopt(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Go on with ``model``, whose parameters have the twin's values."""
        unit = unit_of(model)
        assert unit is not None
        self.model, self.optimizer, self.ctx = model, optimizer, unit.context
        self.names = [name for name, _ in model.named_parameters()]
        self.sharded = [parameter for _, parameter in model.named_parameters()]
        owners = {
            id(parameter): unit
            for unit in self.ctx.units
            for param_group in unit.param_groups
            for parameter in param_group.sharded_parameters
        }
        self.owners = [owners[id(parameter)] for parameter in self.sharded]
        self.told = {unit: ReduceOptions(has_replicas(unit)) for unit in self.ctx.units}
        self.open: list[Losses] = []
        self.unreduced: list[torch.Tensor | None] = [None] * len(self.sharded)
        self.accumulates = False
        self.at_rest = True
        self.by_hand = False

    # Forward and backward of both

    def forward(self) -> Losses:
        tokens, targets = next(self.data)
        losses = self.losses(tokens, targets)
        self.check_loss(*losses)
        assert losses[0].requires_grad == losses[1].requires_grad
        self.at_rest = not (torch.is_grad_enabled() or self.open or self.keeps or self.by_hand)
        return losses

    def evaluate(self, model: nn.Module | None = None) -> None:
        """Score of the same tokens on every rank: equal, not only in the mean."""
        tokens, _ = next(self.data)
        same((model or self.model)(tokens), self.twin(tokens), "evaluation")
        if model is None:
            self.at_rest = not (self.open or self.keeps or self.by_hand)

    def backward_of(self, losses: Losses, retain: bool = False) -> None:
        losses[0].backward(retain_graph=retain)
        if all(told.completes for told in self.told.values()):
            self.by_hand = False
        self.add(self.gradients_of(losses[1], retain))
        self.at_rest = not (self.open or self.keeps or self.by_hand)

    def gradients_of(self, loss: torch.Tensor, retain: bool = False) -> list[torch.Tensor | None]:
        """Return the twin's, and its ``.grad`` as they were."""
        held = [parameter.grad for parameter in self.whole]
        for parameter in self.whole:
            parameter.grad = None
        try:
            loss.backward(retain_graph=retain)
            return [parameter.grad for parameter in self.whole]
        finally:
            for parameter, gradient in zip(self.whole, held, strict=True):
                parameter.grad = gradient

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """A backward has left ``gradients``: where it reduces, they become the twin's ``.grad``
        together with those that earlier backwards left unreduced."""
        for index, gradient in enumerate(gradients):
            total = plus(self.unreduced[index], gradient)
            self.unreduced[index] = None
            if self.told[self.owners[index]].completes:
                self.whole[index].grad = plus(self.whole[index].grad, total)
            else:
                self.unreduced[index] = total
        self.accumulates = not all(told.completes for told in self.told.values())

    def forget(self) -> None:
        """After ``ctx.reset()`` and the like."""
        self.unreduced = [None] * len(self.sharded)
        self.accumulates = False
        self.at_rest, self.by_hand = True, False

    def before_edit(self) -> None:
        """An edit may race with gathers for the next pass, which then are not used: Note [after a
        step]. The emulated device would report it. There the edit waits."""
        if has_streams(torch.device(self.device)) and self.ctx.has_schedule:
            self.ctx.schedule.prefetcher.before_step()

    def edited(self) -> None:
        """Weights were edited: graphs of before are of no use."""
        self.open.clear()

    def shown(self) -> None:
        """``state_dict()`` and ``load_state_dict()`` have registered the shards, and freed what was
        unsharded."""
        self.at_rest, self.by_hand = not self.open, False

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.zero_grad(set_to_none)

    # What is there

    def tell(self, unit: Unit | None, **what: bool) -> None:
        for told in self.told.values() if unit is None else [self.told[unit]]:
            vars(told).update(what)

    def gives_zeros(self, unit: Unit) -> bool:
        """Return whether parameters of ``unit``, if it ran, get zeros where no rank has a gradient
        of them: to know that, the host would have to wait. The twin then gets them too."""
        return unit.mesh.size() > 1 and has_streams(torch.device(self.device))

    @property
    def keeps(self) -> bool:
        """Whether the user asked for full buffers between passes."""
        return any(
            unit.reshard_after_forward is False or not unit.settings.reshard_after_backward
            for unit in self.ctx.units
        )

    def unit(self, index: int) -> Unit:
        return self.ctx.units[index % len(self.ctx.units)]

    def module_of(self, unit: Unit) -> Any:
        return unit.modules[0]

    def under(self, index: int) -> list[int]:
        """Return the parameters of some module, by index."""
        modules = list(self.twin.modules())
        inside = {id(parameter) for parameter in modules[index % len(modules)].parameters()}
        return [i for i, parameter in enumerate(self.whole) if id(parameter) in inside]

    def folder(self) -> str:
        """Return a new one, the same on every rank."""
        made: list[Any] = [None]
        if dist.get_rank() == 0:
            self.folders.append(tempfile.TemporaryDirectory(prefix="fuzz-"))
            made = [self.folders[-1].name + "/checkpoint"]
        dist.broadcast_object_list(made)
        return str(made[0])

    def close(self) -> None:
        for folder in self.folders:
            folder.cleanup()

    # What must hold

    def check(self) -> None:
        parameters = zip(self.names, self.sharded, self.whole, self.owners, strict=True)
        for name, sharded, whole, unit in parameters:
            assert isinstance(sharded, DTensor)
            assert sharded.requires_grad == whole.requires_grad, name
            # Each rank's own elements, which takes no collective.
            same(sharded.detach().to_local().flatten(), held_of(whole.detach(), sharded), name)
            gradient = sharded.grad
            if self.gives_zeros(unit) and gradient is not None and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
            assert (gradient is None) == (whole.grad is None), f"{name}: {gradient}, {whole.grad}"
            if gradient is not None:
                assert isinstance(whole.grad, torch.Tensor)
                expected = held_of(whole.grad, sharded)
                same(gradient.to_local().flatten(), expected, f"gradient of {name}")
        if not self.by_hand:
            registered = list(self.model.parameters())
            assert all(a is b for a, b in zip(registered, self.sharded, strict=True))
        if self.at_rest:
            # A step leaves what the next forward needs first.
            left = self.ctx.schedule.prefetcher._for_next_pass if self.ctx.has_schedule else ()
            alive = sum(len(unit.param_groups) for unit in self.ctx.units if unit.index in left)
            assert self.ctx.stats.current_full_buffers <= alive, self.ctx.stats
            for unit in self.ctx.units:
                for param_group in unit.param_groups if unit.index not in left else ():
                    assert param_group.full.flat.untyped_storage().nbytes() == 0, unit.name
        if not self.accumulates:
            assert self.ctx.stats.current_reduce_inputs == 0, self.ctx.stats
            for unit in self.ctx.units:
                for gradients in unit._known_gradients.values():
                    assert gradients.reduce_scatter_input.flat.untyped_storage().nbytes() == 0, (
                        unit.name
                    )


def has_replicas(unit: Unit) -> bool:
    return unit.mesh.ndim > 1 and unit.mesh.size(0) > 1


def plus(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
