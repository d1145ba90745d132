"""Confirmation: ranks ask each other before a collective that was not predicted. On a CPU alone."""

from __future__ import annotations

# At least so many of the last codes are remembered, at most twice as many. Enough for steps of some
# thousand collectives.
REMEMBERED = 1 << 15

NOWHERE = 2 * REMEMBERED
"""The place at which nothing is expected."""


class ExpectedOrder:
    """Predicts the next code from the codes observed so far, the history.

    It expects the code at one place of the history. While that is right, the place moves along. If
    it is wrong, the place moves to behind the previous occurrence of the last two codes. So, if
    anything repeats, the place comes to be one period behind.

    The prediction follows from the history alone. Two ranks with the same history predict the same.
    See Note [confirmation].
    """

    def __init__(self) -> None:
        self._history: list[int] = []
        self._place = NOWHERE
        self._last = 0
        self._behind: dict[tuple[int, int], int] = {}

    def observe(self, code: int) -> bool:
        """Append ``code`` to the history. Return whether it was expected."""
        history, place = self._history, self._place
        is_expected = place < len(history) and history[place] == code
        history.append(code)
        pair = self._last, code
        self._place = place + 1 if is_expected else self._behind.get(pair, NOWHERE)
        self._behind[pair] = len(history)
        self._last = code
        if len(history) > 2 * REMEMBERED:
            self._forget()
        return is_expected

    def _forget(self) -> None:
        del self._history[:REMEMBERED]
        self._behind = {
            pair: place - REMEMBERED for pair, place in self._behind.items() if place >= REMEMBERED
        }
        self._place = self._place - REMEMBERED if self._place >= REMEMBERED else NOWHERE
