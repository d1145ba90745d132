"""What is to be expected next of somebody who does the same again and again."""

from __future__ import annotations

# Of what was taken in, twice as many: steps of some thousand collectives.
REMEMBERED = 1 << 15

NOWHERE = 2 * REMEMBERED
"""Where nothing is expected."""


class Expectation:
    """Expects what followed the last time that all was as now: a place in what was taken in so far
    moves along while expectation holds. Where it does not, it moves behind the last occurrence of
    the two codes taken in last. So it comes to walk one period behind, whatever repeats.

    What is expected follows from what was taken in alone: two that took in the same expect the
    same.
    """

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._place = NOWHERE
        self._last = 0
        self._behind: dict[tuple[int, int], int] = {}

    def take(self, code: int) -> bool:
        """Takes ``code`` in; returns whether it was expected."""
        taken, place = self._taken, self._place
        is_expected = place < len(taken) and taken[place] == code
        taken.append(code)
        pair = self._last, code
        self._place = place + 1 if is_expected else self._behind.get(pair, NOWHERE)
        self._behind[pair] = len(taken)
        self._last = code
        if len(taken) > 2 * REMEMBERED:
            self._forget()
        return is_expected

    def _forget(self) -> None:
        del self._taken[:REMEMBERED]
        self._behind = {
            pair: place - REMEMBERED for pair, place in self._behind.items() if place >= REMEMBERED
        }
        self._place = self._place - REMEMBERED if self._place >= REMEMBERED else NOWHERE
