"""Edits of unsharded parameters, which would be lost: only shards last."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

import torch

from fsdp_overlap.engine.param import tp_local_tensor, unwrap
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.tensor.flat_buffer import VersionCounters, version_of

INSTEAD = (
    "Edit the sharded parameter, under torch.no_grad(), before forward or after optimizer.step(); "
    "what forward itself has to change must be a buffer"
)

FREED = (
    "a parameter of unit {!r}, or a view of one, was used after its memory was freed: keep a "
    "clone() of what is used after forward, or read the sharded parameter of the module"
)

Uncompared = list[tuple["UnshardedEdits", torch.Tensor]]
"""Param groups whose first forward has run, and for each of their parameters whether it changed."""


def compare(uncompared: Uncompared) -> str | None:
    """Return what the forwards in ``uncompared`` edited, in words. ``None`` if they edited nothing.
    The host waits for them. Empty the list."""
    changes = [(edits, changed.tolist()) for edits, changed in uncompared]
    uncompared.clear()
    edited = [edits.describe(changed.index(True)) for edits, changed in changes if any(changed)]
    return edited[0] if edited else None


class UnshardedEdits:
    """Finds changes of a param group's unsharded parameters. The shards do not get such changes,
    and another rank may have made different ones.

    Autograd's version counters count edits in place. They do not count all-gathers, which write
    underneath, and they do not count edits through ``.data``. To find the latter, the first forward
    in each mode, training and evaluation, compares the values before and after.

    ``tables`` are the ``_parameters`` of all modules of the unit.
    """

    def __init__(self, param_group: ParamGroup, tables: Sequence[dict[str, Any]]) -> None:
        self._param_group = param_group
        self._tiles = list(map(tp_local_tensor, param_group.parameters))
        # Opaque parameters have slow attributes, and share their counters with plain tensors.
        counted: list[torch.Tensor] = [*param_group.parameters]
        if param_group.is_opaque:
            counted = [*map(unwrap, counted)]
        if param_group.is_tensor_parallel:
            counted += self._tiles  # a DTensor does not count what is done to its own
        self._counters = param_group.counters = VersionCounters(counted)
        self._tables = tables
        self._registered = self._count()
        self._forwards = 0
        self._digest: torch.Tensor | None = None

    def begin_comparison(self) -> None:
        """Take digests of the parameters, which are unsharded, before a forward runs."""
        self._digest = self._param_group.full.digests()
        self._forwards = 0  # so that changed() looks for everything

    def end_comparison(self, uncompared: Uncompared) -> None:
        """Compare with the digests after the forward. The result goes to ``uncompared``."""
        if self._digest is not None:
            uncompared.append((self, self._digest != self._param_group.full.digests()))
            self._digest = None

    def edited(self) -> str | None:
        """Return which parameter was edited in place since this was last asked, in words. ``None``
        if none was."""
        index = self._counters.edited()
        return None if index is None else self.describe(index % len(self._tiles))

    def changed(self) -> str | None:
        """Return what :meth:`edited` does, and also find a parameter that was replaced, given other
        memory or registered again. The full buffer must exist."""
        counters = self._counters  # as edited(), without a call in each forward
        versions = tuple(map(version_of, counters.counted))
        if versions != counters.versions and (edit := self.edited()) is not None:
            return edit
        info = self._param_group.module_info
        are_in_place = all(map(is_, map(dict.get, *info.places), info.unsharded))
        if not are_in_place and (replaced := self._replaced()) is not None:
            return replaced
        # What the checks below find lasts, so forwards 1, 2, 4, 8 ... of a mode are enough.
        self._forwards += 1
        if self._forwards & (self._forwards - 1):
            return None
        if moved := self._param_group.full.give_back(self._tiles):
            return self._moved(moved[0])
        return None if self._count() == self._registered else self._registered_again()

    def _replaced(self) -> str | None:
        if (name := self._param_group.module_info.replaced()) is None:
            return None
        return (
            f"parameter {name!r} of unit {self._param_group.label!r} was replaced while it was "
            f"unsharded, and the new one would be lost. {INSTEAD}"
        )

    def forbid_old_graphs(self, tables: Collection[int]) -> None:
        """Make autograd refuse to read the parameters for a graph that was made before: those
        registered in ``tables``, which are ids, or all if there are none."""
        self._counters.increment(
            [
                item.parameter
                for item in self._param_group.owned
                if not tables or any(id(table) in tables for table, _ in item.registrations)
            ]
        )

    def describe(self, index: int) -> str:
        """Return an edit of parameter ``index``, in words. Make the next use of the full buffer,
        which has the edit, gather it again."""
        self._param_group.mark_stale()
        return (
            f"{self._name(index)} was edited in place while it was unsharded, by a forward, a "
            "backward or a hook, as nn.Embedding(max_norm=...) does. The edit would be lost, "
            f"because only shards last, and ranks may have made different ones. {INSTEAD}"
        )

    def _moved(self, index: int) -> str:
        return (
            f"{self._name(index)} was given other memory, by an assignment to its .data or by "
            f"flatten_parameters(), which all-gathers do not reach. {INSTEAD}"
        )

    def _registered_again(self) -> str | None:
        known = {(id(table), name) for table, name, _, _ in self._param_group.module_info}
        own = {id(parameter): index for index, parameter in enumerate(self._param_group.parameters)}
        for table in self._tables:
            for name, parameter in table.items():
                if id(parameter) in own and (id(table), name) not in known:
                    return (
                        f"{self._name(own[id(parameter)])} was registered again while it was "
                        f"unsharded, as {name!r}, where its memory will be freed: keep a clone(), "
                        "or register it under both names before fully_shard()"
                    )
        self._registered = self._count()
        return None

    def _count(self) -> int:
        return sum(map(len, self._tables))

    def _name(self, index: int) -> str:
        param_group = self._param_group
        return f"parameter {param_group.plan.specs[index].fqn!r} of unit {param_group.label!r}"
