"""Confirmation: ranks ask each other before a collective that was not predicted. On a CPU alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fsdp_overlap.comm.objects import wait_for
from fsdp_overlap.desync.order_check import NEW_UNIT, CheckedParamGroup, OrderCheck

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


class ConfirmingOrderCheck(OrderCheck):
    """The order check of a mesh whose ranks communicate by gloo, with confirmation.

    A rank predicts what it issues next from what it issued before (:class:`ExpectedOrder`). Two
    ranks with the same history predict the same next collective. So at the first collective on
    which ranks differ, at most some of them issue what was predicted. Each of the others, before it
    issues its own, waits for all ranks to say that they issue the same. A predicted collective
    costs nothing, and no data of one unit is taken for another's.

    ``groups`` together connect all ranks. ``confirmed`` is called for each confirmation.
    """

    confirms = True

    def __init__(
        self,
        device: torch.device,
        explain: Callable[[str], str],
        is_read_at_once: bool,
        groups: Callable[[], Sequence[dist.ProcessGroup]],
        confirmed: Callable[[], None],
    ) -> None:
        self._groups = groups
        self._confirmed = confirmed
        super().__init__(device, explain, is_read_at_once)

    def _forget(self) -> None:
        super()._forget()
        self._expectation = ExpectedOrder()

    def record(self, code: int, param_group: CheckedParamGroup, dtype: torch.dtype) -> None:
        """Also wait for the other ranks if the collective was not predicted.

        Raises:
            RuntimeError: they issue other collectives; names what each issues. Or they planned
                ``param_group`` differently, or have other param groups on the mesh.
        """
        super().record(code, param_group, dtype)
        if not self._expectation.observe(code):
            self._confirm(code, param_group, dtype)

    def record_new_param_group(self) -> None:
        """Expect nothing any more: earlier confirmations do not tell whether all ranks added the
        param group, so everything is confirmed again."""
        if self._count:
            self._issued.append(NEW_UNIT)
            self._expectation = ExpectedOrder()

    def _confirm(self, code: int, param_group: CheckedParamGroup, dtype: torch.dtype) -> None:
        self._confirmed()
        mine = [self._count, code, param_group.signature(dtype)]
        for group in self._groups():
            others = self._gather(param_group.label, mine, group)
            if any(other != mine for other in others):
                raise RuntimeError(self._explain(param_group.label))

    def _wait(self, work: dist.Work, group: dist.ProcessGroup, label: str) -> None:
        wait_for(work, group, "order_check", label)
