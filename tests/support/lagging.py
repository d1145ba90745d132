"""A backend that is not gloo by name, cannot be closed, and does not make the host wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

BACKEND = "lagging"


class Options:
    """What a group is made with."""

    def __init__(self, timeout: timedelta = timedelta(minutes=10), max_ctas: int = 0) -> None:
        self._timeout = timeout
        self.max_ctas = max_ctas
        self.is_high_priority_stream = False


class LaggingGroup(dist.ProcessGroup):
    """Real ranks. A collective that the others do not join stays under way, as on a GPU, while the
    host goes on after its ``patience``, without the result."""

    patience: timedelta | None = None

    def __init__(self, options: Any, given: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.given = given
        self.options = Options(options.timeout)
        self.ranks = options.global_ranks_in_group
        self._inner = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        self._issued = 0
        self.aborted = False

    def name(self) -> str:
        return BACKEND

    getBackendName = name

    @property
    def group_name(self) -> str:
        return c10d._world.pg_names.get(self, "")

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def abort(self) -> None:
        self.aborted = True
        peer = (self.rank() + 1) % self.size()
        with pytest.raises(RuntimeError):
            self._inner.recv([torch.empty(1)], peer, 7).wait(timedelta(milliseconds=1))

    def shutdown(self) -> None:
        pass

    def _run(self, work: dist.Work, arrive: Callable[[], object]) -> dist.Work:
        self._issued += 1
        if LaggingGroup.patience is None:
            work.wait()
            arrive()
        else:
            with suppress(RuntimeError):
                work.wait(LaggingGroup.patience)
                arrive()
        future: Future[list[torch.Tensor]] = Future()
        future.set_result([])
        return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[no-any-return]

    def _allgather_base(self, whole: torch.Tensor, own: torch.Tensor, opts: Any) -> dist.Work:
        parts = [torch.empty_like(own) for _ in range(self.size())]
        work = self._inner.allgather([parts], [own.detach().clone()])
        return self._run(work, lambda: whole.detach().copy_(torch.cat(parts)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        parts = [torch.empty_like(output) for output in outputs[0]]
        work = self._inner.allgather([parts], [inputs[0].detach().clone()])
        return self._run(work, lambda: torch._foreach_copy_(outputs[0], parts))

    def _reduce_scatter_base(self, own: torch.Tensor, whole: torch.Tensor, opts: Any) -> dist.Work:
        total = whole.detach().clone()
        work = self._inner.allreduce([total])
        ranges = total.chunk(self.size())
        return self._run(work, lambda: own.copy_(ranges[self.rank()] / self.size()))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        values = tensors[0].detach().clone()
        work = self._inner.allreduce([values], opts)
        return self._run(work, lambda: tensors[0].detach().copy_(values))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        values = tensors[0].detach().clone()
        work = self._inner.broadcast([values], opts)
        return self._run(work, lambda: tensors[0].detach().copy_(values))


dist.Backend.register_backend(BACKEND, LaggingGroup, extended_api=True, devices=["cpu"])
