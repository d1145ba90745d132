"""Where modules have registered the parameters of a bucket, and in which of their two forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from fsdp_overlap.engine.ownership import OwnedParameter
from fsdp_overlap.tensor.row_tensor import Sharded

Place = tuple[dict[str, Any], str, torch.Tensor, Sharded]
"""A module's ``_parameters``, the name in it, the unsharded parameter and the sharded one."""


class Places:
    """The places of one bucket. A parameter that modules share has several."""

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        parameters: Sequence[torch.Tensor],
        sharded: Sequence[Sharded],
    ) -> None:
        self._indices = {id(each): index for index, each in enumerate(sharded)}
        self._all: list[Place] = [
            (registered, name, its_parameter, its_sharded)
            for item, its_parameter, its_sharded in zip(owned, parameters, sharded, strict=True)
            for registered, name in item.places
        ]

    def __iter__(self) -> Iterator[Place]:
        return iter(self._all)

    def index_of(self, sharded: torch.Tensor) -> int | None:
        """Return the index of a sharded parameter in the bucket. ``None`` if it is none of it."""
        return self._indices.get(id(sharded))

    def use_unsharded(self, label: str) -> None:
        """Registers the unsharded parameters. ``label`` names the unit in errors.

        Raises:
            RuntimeError: something else was registered in their place.
        """
        for registered, name, parameter, sharded in self._all:
            found = registered.get(name)
            if found is not sharded and found is not parameter:
                _refuse(name, label)
            registered[name] = parameter

    def check(self, label: str) -> None:
        """Checks that nothing else was registered in the place of a parameter.

        Raises:
            RuntimeError: something was.
        """
        for registered, name, parameter, sharded in self._all:
            found = registered.get(name)
            if found is not sharded and found is not parameter:
                _refuse(name, label)

    def use_sharded(self) -> None:
        """Registers the sharded parameters."""
        for registered, name, _, sharded in self._all:
            registered[name] = sharded

    def use_none(self) -> None:
        """Registers nothing, so that what is done to all parameters of a module skips these."""
        for registered, name, _, _ in self._all:
            registered[name] = None

    def assigned(self) -> dict[int, torch.Tensor]:
        """The tensors that somebody else has registered in place of parameters, by the index of the
        parameter in the bucket. If a shared parameter has several, the last. Tensors on the meta
        device are left out."""
        return {
            self._indices[id(sharded)]: found
            for registered, name, parameter, sharded in self._all
            if (found := registered.get(name)) is not sharded
            and found is not parameter
            and isinstance(found, torch.Tensor)
            and not found.is_meta
        }


def _refuse(name: str, label: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name!r} of unit {label!r} was replaced after fully_shard(), which would not "
        "be trained: assign and tie parameters before, or tie those of one unit before the first "
        "forward, and edit them in place, under torch.no_grad(), as with copy_(), after; "
        "load_state_dict(assign=True) takes others over. torch.func.functional_call() replaces "
        "them too: call the model itself, or functional_call() with an unsharded copy of it"
    )
