"""Finds the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

Users = dict[object, set[nn.Module]]
"""For each module and parameter, the modules that it is registered in."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the repeated blocks of ``model``, in registration order. Make a unit of each:

        for block in find_blocks(model):
            fully_shard(block, ctx)
        fully_shard(model, ctx)

    :func:`~fsdp_overlap.fully_shard_model` does that in one call.

    A model may name the classes of its blocks in ``_no_split_modules``, as those of Hugging Face's
    transformers do. If no module is of these classes, the members of its ``nn.ModuleList``s are the
    blocks. If a block lies within another, the outer one is taken.

    A module that shares a parameter with a module outside of it is no block, and the root takes it:
    an embedding that is tied to the head, for example. A module
    within it may still be a block. Tie weights before. This works on the meta device, changes
    nothing, and is not collective.

    Raises:
        ValueError: there are no blocks. The error says what there is instead.
    """
    classes = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", ()) or ()
    }
    users: Users = {}
    for module in model.modules():
        for used in _registered(module):
            users.setdefault(used, set()).add(module)
    blocks = _outermost(model, users, lambda module: type(module).__name__ in classes)
    if not blocks:
        blocks = _outermost(model, users, lambda module: _is_listed(module, users))
    if not blocks:
        raise ValueError(_why_none(model, users, classes))
    return blocks


def _registered(module: nn.Module) -> list[object]:
    registered = (*module._modules.values(), *module._parameters.values())
    return [value for value in registered if value is not None]


def _outermost(
    model: nn.Module, users: Users, is_wanted: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """Return the modules below ``model`` that are wanted and can be units, without those within
    others."""
    blocks, seen = [], {model}
    for module in model.modules():
        if (
            module not in seen
            and is_wanted(module)
            and next(module.parameters(), None) is not None
            and not _shares(module, users)
        ):
            blocks.append(module)
            seen.update(module.modules())
    return blocks


def _is_listed(module: nn.Module, users: Users) -> bool:
    """Return whether it is a member of a list, and no container itself: containers have no
    forward."""
    return not isinstance(module, _CONTAINERS) and any(
        isinstance(user, nn.ModuleList) for user in users[module]
    )


def _shares(module: nn.Module, users: Users) -> bool:
    """Return whether a module outside of ``module`` uses a module or parameter within it too."""
    inner = set(module.modules())
    return any(not users[used] <= inner for child in inner for used in _registered(child))


def _why_none(model: nn.Module, users: Users, classes: set[str]) -> str:
    named = f"no modules of the classes {sorted(classes)}, which it names, and " if classes else ""
    shared = [
        name
        for name, module in model.named_modules()
        if name and _is_listed(module, users) and _shares(module, users)
    ]
    if shared:
        instead = f"{', '.join(shared)} share parameters or modules with what is outside of them"
    else:
        children = {name: type(child).__name__ for name, child in model.named_children()}
        instead = f"its children are {children}"
    return (
        f"{type(model).__name__} has no blocks: {named}no members of an nn.ModuleList that have "
        f"parameters of their own; {instead}. Call fully_shard on modules that you choose, on a "
        "list of those that share parameters, or on the model alone"
    )
