"""Gradients that units gave, looked at by bucket: what was given at once is one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress, count
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import torch

from fsdp_overlap.optim.runs import (
    Pieces,
    find_runs,
    flatten,
    gradients_of,
    locals_of,
    numels_of,
    part,
    places_of,
)
from fsdp_overlap.tensor.held_gradient import GivenGradients
from fsdp_overlap.tensor.ragged_dtensor import ShardEdits
from fsdp_overlap.tensor.sums_and_norms import by_cut

_local = attrgetter("_local_tensor")
_given = attrgetter("given")
_recipients = attrgetter("recipients")


@dataclass(frozen=True)
class Facts:
    """How the gradients of a bucket lie in their flat tensor, which is the same in every step.

    ``numels`` is how many elements this rank has of each gradient, ``starts`` where they begin in
    the flat tensor, ``runs`` which elements of it follow each other without gaps: first and number.
    ``is_cut_alike``: whether all gradients are cut among the same ranks."""

    numels: list[int]
    starts: list[int]
    offsets: list[int]
    """Those of ``starts`` of which this rank holds elements, in bytes."""
    runs: list[tuple[int, int]]
    is_cut_alike: bool

    @classmethod
    def of(cls, given: GivenGradients) -> Facts:
        numels = numels_of(given.locals)
        first = int(given.flat.storage_offset())
        starts = [int(local.storage_offset()) - first for local in given.locals]
        held = list(compress(given.locals, numels))
        at = list(compress(starts, numels))
        runs = [(at[row], numel) for row, numel in find_runs([held], [0] * len(held))]
        offsets = [start * given.flat.itemsize for start in at]
        return cls(numels, starts, offsets, runs, len(by_cut(given.gradients)) == 1)


def facts_of(given: GivenGradients) -> Facts:
    facts = given.recipients.facts
    if facts is None:
        facts = given.recipients.facts = Facts.of(given)
    found: Facts = facts
    return found


def are_in_place(given: Iterable[GivenGradients]) -> bool:
    """Whether all gradients still lie where they were given. Their local tensors are in users'
    hands, who may point these, or gradients, at other memory."""
    gradients: list[Any] = []
    locals_: list[torch.Tensor] = []
    places: list[int] = []
    for each in given:
        facts, origin = facts_of(each), each.flat.data_ptr()
        gradients += compress(each.gradients, facts.numels)
        locals_ += compress(each.locals, facts.numels)
        places += [origin + offset for offset in facts.offsets]
    return places_of(locals_) == places and all(map(is_, map(_local, gradients), locals_))


class GivenTo:
    """What units gave to ``parameters``. Parameters of which this rank has something are ``held``.
    ``edits`` are those of their buckets."""

    def __init__(
        self,
        parameters: list[torch.Tensor],
        held: list[torch.Tensor],
        edits: list[ShardEdits],
    ) -> None:
        self._held = held
        self._edits = edits
        self._recipients = [each.recipients for each in edits]
        known = {
            id(parameter): (index, position)
            for index, each in enumerate(self._recipients)
            if each is not None
            for position, parameter in enumerate(each.parameters)
        }
        self._are_recipients = known.keys() >= set(map(id, parameters))
        # Found out now, because a step may come when the model, and with it its buckets, is gone.
        self._positions = [known[id(each)] for each in held] if self._are_recipients else []
        self._rows: list[tuple[int, int]] | None = None

    def is_right(self) -> bool:
        """Whether buckets have the same parameters as before, where they were."""
        return all(map(is_, map(_recipients, self._edits), self._recipients))

    def given(self) -> list[GivenGradients]:
        """What was given, if all parameters have that as their gradients, and else nothing."""
        found = list(map(_given, self._edits))
        return found if self._are_recipients and None not in found else []

    def pieces(self) -> Pieces | None:
        """Where the gradients of those held lie in what was given. ``None`` if some gradient is
        another, or lies elsewhere."""
        given = self.given()
        if not given or not are_in_place(given):
            return None
        if self._rows is None:
            starts = [facts_of(each).starts for each in given]
            self._rows = [(index, starts[index][position]) for index, position in self._positions]
        flats = [each.flat for each in given]
        return Pieces(flats, self._rows, lambda: locals_of(gradients_of(self._held)))


class Segment(NamedTuple):
    """Gradients ``[first, end)`` of those that were given to a bucket at once."""

    given: GivenGradients
    first: int
    end: int

    def gradients(self) -> list[Any]:
        return self.given.gradients[self.first : self.end]

    def flats(self) -> list[torch.Tensor]:
        """What this rank holds of them: a tensor for each run."""
        (_, flat, _, locals_), facts = self.given, facts_of(self.given)
        if self.end - self.first == len(locals_):
            return [part(flat, *run) for run in facts.runs]
        own = slice(self.first, self.end)
        numels = facts.numels[own]
        held = list(compress(locals_[own], numels))
        return flatten(held, find_runs([held], [0] * len(held)))


def segments_of(parameters: list[Any]) -> list[Segment]:
    """The gradients of ``parameters``, in this order. None at all if some gradient is not as a unit
    gave it, or gradients of a bucket are cut among different ranks.

    Parameters are mostly those of one bucket after the other, so that one alone of each is asked
    for its bucket."""
    found: list[Segment] = []
    ends: dict[int, int] = {}
    place = 0
    while place < len(parameters):
        edits = getattr(parameters[place], "edits", None)
        given = edits.given if isinstance(edits, ShardEdits) else None
        if given is None:
            if parameters[place].grad is not None:
                return []
            place += 1
            continue
        first = ends.get(id(given), 0)
        own = given.recipients.parameters[first:]
        same = _common(own, parameters[place : place + len(own)])
        if not same:
            return []
        found.append(Segment(given, first, first + same))
        ends[id(given)] = first + same
        place += same
    given_ = [each.given for each in found if not each.first]  # each once
    if not all(facts_of(each).is_cut_alike for each in given_) or not are_in_place(given_):
        return []
    return found


def _common(tensors: list[Any], others: list[Any]) -> int:
    """How many of both are the same, from the first on."""
    return next(compress(count(), map(is_not, tensors, others)), min(len(tensors), len(others)))
