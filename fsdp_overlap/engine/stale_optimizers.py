"""Finds optimizers that have parameters which were replaced and are not trained any more. See
Note [replaced parameters]."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_overlap.engine.ownership import owner_of

# The number of replacements, and of the optimizer's parameters, when it was last looked at.
_looked_at: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
_replacements = 0


def note_replacement() -> None:
    """Notes that parameters were replaced. Each optimizer is looked at in its next step."""
    global _replacements
    if not _replacements:
        register_optimizer_step_pre_hook(_before_step)
    _replacements += 1


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Looks at the optimizer, unless nothing has changed since the last look.

    Raises:
        RuntimeError: it has a parameter that was replaced. Names the parameter.
    """
    now = _replacements, sum([len(group["params"]) for group in optimizer.param_groups])
    if _looked_at.get(optimizer) == now:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if owner is not None and owner.replaced_by:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was made before {owner.replaced_by}, which put "
                    f"another parameter in the place of {owner.fqn!r} of {owner.unit}: this step "
                    "would change nothing that the model computes with; make the optimizer "
                    "afterwards, from model.parameters()"
                )
    _looked_at[optimizer] = now
