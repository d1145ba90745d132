"""Operations of random programs: training, and what a sharded model is told of it.

Each does the same to the model and to its unsharded twin, on every rank, and says whether it did
anything: one that makes no sense where it stands, as a backward without a loss, is skipped. So
every part of a program is a program, and what fails is made smaller quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap import RaggedDTensor
from fsdp_overlap.features.rows.row_tensor import RowTensor
from fsdp_overlap.optim import clip_grad_norm_
from support.fuzz_run import Run
from support.twins import same

MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Operation:
    def run(self, run: Run) -> bool:
        """Return whether anything was done."""
        raise NotImplementedError


@dataclass(frozen=True)
class Nothing(Operation):
    def run(self, run: Run) -> bool:
        return False


@dataclass(frozen=True)
class Train(Operation):
    """A microbatch."""

    def run(self, run: Run) -> bool:
        return Forward().run(run) and Backward(newest=True, retain=False).run(run)


@dataclass(frozen=True)
class Forward(Operation):
    def run(self, run: Run) -> bool:
        losses = run.forward()
        if losses[0].requires_grad:
            run.open.append(losses)
        return losses[0].requires_grad


@dataclass(frozen=True)
class Backward(Operation):
    newest: bool
    retain: bool

    def run(self, run: Run) -> bool:
        if not run.open:
            return False
        losses = run.open.pop(-1 if self.newest else 0)
        if self.retain:
            run.open.append(losses)
        run.backward_of(losses, self.retain)
        return True


@dataclass(frozen=True)
class Penalize(Operation):
    """A loss of the weights themselves, unsharded by hand."""

    unit: int

    def run(self, run: Run) -> bool:
        unit = run.unit(self.unit)
        mine = [i for i, owner in enumerate(run.owners) if owner is unit]
        if not any(run.whole[i].requires_grad for i in mine):
            return False
        was_at_rest, was_by_hand = run.at_rest, run.by_hand
        run.module_of(unit).unshard()
        registered = dict(run.model.named_parameters())
        weights = [registered[run.names[i]] for i in mine]
        twin_weights = [run.whole[i] for i in mine]
        loss, twin_loss = (
            sum(full(w.square().sum()) for w in of) for of in (weights, twin_weights)
        )
        run.backward_of((loss, twin_loss))  # type: ignore[arg-type]
        run.module_of(unit).reshard()
        # This backward passes no other unit.
        run.at_rest, run.by_hand = was_at_rest and not run.keeps, was_by_hand
        return True


@dataclass(frozen=True)
class Evaluate(Operation):
    mode: str

    def run(self, run: Run) -> bool:
        with MODES[self.mode]():
            run.evaluate()
        return True


@dataclass(frozen=True)
class Step(Operation):
    def run(self, run: Run) -> bool:
        if run.setup.optimizer == "AdamW of torch":  # ours wait by themselves
            run.before_edit()
        run.optimizer.step()
        run.twin_optimizer.step()
        run.edited()
        return True


@dataclass(frozen=True)
class ZeroGrad(Operation):
    set_to_none: bool

    def run(self, run: Run) -> bool:
        run.zero_grad(self.set_to_none)
        return True


@dataclass(frozen=True)
class Clip(Operation):
    most: float
    ours: bool

    def run(self, run: Run) -> bool:
        # Rows are plain DTensors to torch, and it stacks norms of one mesh only.
        meshes = {p.device_mesh for p in run.sharded if isinstance(p, RowTensor)}
        ours = self.ours or len(meshes) > 1
        clip: Any = clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_
        norm = clip(run.sharded, self.most)
        expected = torch.nn.utils.clip_grad_norm_(run.whole, self.most)
        same(full(norm).to(expected.dtype), expected, "norm of gradients")
        return any(parameter.grad is not None for parameter in run.whole)


@dataclass(frozen=True)
class Sync(Operation):
    """``set_requires_gradient_sync`` of one unit, or of all."""

    enable: bool
    unit: int | None

    def run(self, run: Run) -> bool:
        unit = None if self.unit is None else run.unit(self.unit)
        module = run.model if unit is None else run.module_of(unit)
        module.set_requires_gradient_sync(self.enable, recurse=unit is None)
        run.tell(unit, synchronizes=self.enable, all_reduce_grads=self.enable)
        return True


@dataclass(frozen=True)
class AllReduce(Operation):
    """``set_requires_all_reduce``, where there are copies."""

    enable: bool

    def run(self, run: Run) -> bool:
        run.model.set_requires_all_reduce(self.enable)
        run.tell(None, all_reduce_grads=self.enable)
        return any(told.has_replicas for told in run.told.values())


@dataclass(frozen=True)
class Last(Operation):
    """``set_is_last_backward``."""

    is_last: bool

    def run(self, run: Run) -> bool:
        run.model.set_is_last_backward(self.is_last)
        run.tell(None, is_last=self.is_last)
        return True


@dataclass(frozen=True)
class Stage(Operation):
    stage: int

    def run(self, run: Run) -> bool:
        run.model.set_zero_stage(self.stage)
        run.tell(None, last_only=self.stage == 1)
        return True


@dataclass(frozen=True)
class ReshardAfter(Operation):
    forward: bool
    enable: bool
    unit: int

    def run(self, run: Run) -> bool:
        module = run.module_of(run.unit(self.unit))
        if self.forward:
            module.set_reshard_after_forward(self.enable, recurse=False)
        else:
            module.set_reshard_after_backward(self.enable, recurse=False)
        return True


@dataclass(frozen=True)
class Unshard(Operation):
    unit: int
    is_async: bool

    def run(self, run: Run) -> bool:
        unit = run.unit(self.unit)
        handle = run.module_of(unit).unshard(async_op=self.is_async)
        if handle is not None:
            handle.wait()
        registered = dict(run.model.named_parameters())
        for name, owner, whole in zip(run.names, run.owners, run.whole, strict=True):
            if owner is unit:
                assert not isinstance(registered[name], (RaggedDTensor, RowTensor))
                same(full(registered[name].detach()), whole.detach(), name)
        run.at_rest, run.by_hand = False, True
        return unit in run.owners


@dataclass(frozen=True)
class Reshard(Operation):
    unit: int

    def run(self, run: Run) -> bool:
        run.module_of(run.unit(self.unit)).reshard()
        return run.by_hand or not run.at_rest


@dataclass(frozen=True)
class ParamSync(Operation):
    """``"start_param_sync"`` and the like."""

    verb: str

    def run(self, run: Run) -> bool:
        getattr(run.ctx, self.verb)()
        if self.verb == "release_unsharded":
            run.at_rest, run.by_hand = True, False
        return True


@dataclass(frozen=True)
class Prefetch(Operation):
    """``set_modules_to_forward_prefetch`` and ``..._backward_prefetch``."""

    forward: bool
    unit: int
    others: tuple[int, ...]

    def run(self, run: Run) -> bool:
        module = run.module_of(run.unit(self.unit))
        others = [run.module_of(run.unit(other)) for other in self.others]
        if self.forward:
            module.set_modules_to_forward_prefetch(others)
        else:
            module.set_modules_to_backward_prefetch(others)
        return True


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Freeze(Operation):
    """Or train again, all parameters of some module."""

    module: int
    requires_grad: bool

    def run(self, run: Run) -> bool:
        # A checkpoint that runs again would save other tensors than before, which is an error.
        waits = run.open and run.setup.node.has("checkpoint", "reentrant")
        chosen = [] if waits else run.under(self.module)
        for index in chosen:
            run.sharded[index].requires_grad_(self.requires_grad)
            run.whole[index].requires_grad_(self.requires_grad)
        return bool(chosen)
