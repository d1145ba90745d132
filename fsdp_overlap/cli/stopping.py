"""Stops a run between two steps, on every rank after the same step."""

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopRequest:
    """Tells all ranks when any of them gets SIGTERM or Ctrl-C.

    Ranks agree once a step, by a collective of one number that runs beside the step. It runs on the
    CPU, because reading a number from a GPU would make the host wait.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def begin_step(self) -> None:
        """Starts to tell the other ranks; collective."""
        self._flag = torch.tensor(int(self._asked))
        self._work = dist.all_reduce(
            self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def end_step(self) -> bool:
        """Whether any rank was asked to stop before this step; the same on every rank."""
        assert self._work is not None
        self._work.wait()
        return bool(self._flag)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
