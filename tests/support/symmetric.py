"""torch's symmetric memory, stood in for on real ranks of the emulated device.

    with running(EmulatedDevice()), Symmetric() as symmetric: ...

Registration is collective, as NCCL's is: a rank waits for the others of the group, and finds out
if they do not come, or come with another size. `travelled` says of each all-gather and
reduce-scatter which windows it worked on; a window is a piece that was registered with its group.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from fsdp_overlap.features import symmetric_memory as library
from fsdp_overlap.tools.emulator import active
from fsdp_overlap.tools.emulator.allocator import MemPool
from fsdp_overlap.tools.emulator.nccl_like import CollectiveCall, NcclLikeGroup
from fsdp_overlap.torch_internals import default_store
from fsdp_overlap.torch_internals import symmetric_memory as torchs

# nccl_like adds the operation to the names of reductions.
KINDS = ("all_gather", "reduce_scatter")


class Travelled(NamedTuple):
    """A collective: the windows of what it wrote and read, `None` if a piece is not registered with
    its group, and where in the memory of the window the largest of these begins."""

    kind: str
    group: str
    windows: tuple[int | None, ...]
    offset: int


class Symmetric:
    """Within it torch has symmetric memory on the emulated device, and its groups are NCCL's."""

    def __init__(self, patience: float = 30.0) -> None:
        self.patience = timedelta(seconds=patience)
        """How long a rank waits in a registration for the others."""
        self.pool: MemPool | None = None
        self.registered: list[tuple[str, int]] = []
        """The group and the bytes of each registration."""
        self.travelled: list[Travelled] = []
        self._windows: dict[tuple[str, int], int] = {}
        self._backend: str | None = None
        self._patches = ExitStack()

    def __enter__(self) -> Symmetric:
        for name in ("get_backend", "set_backend", "get_mem_pool", "rendezvous"):
            self._patches.enter_context(patch.object(torchs, name, getattr(self, name)))
        self._patches.enter_context(patch.object(library, "backend_name", lambda *_: "nccl"))
        run = NcclLikeGroup._run

        def noting(group: NcclLikeGroup, collective: CollectiveCall, *rest: Any) -> Any:
            kind, writes, reads, *_ = collective
            # Of one tensor each: ranks compare what they start from by a list.
            if kind.startswith(KINDS) and len(writes) == 1 and active().is_here(writes[0]):
                self._note(kind, group.group_name, [*writes, *reads])
            return run(group, collective, *rest)

        self._patches.enter_context(patch.object(NcclLikeGroup, "_run", noting))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    # ---- torch's functions ----

    def get_backend(self, device: torch.device) -> str | None:
        return self._backend

    def set_backend(self, name: str) -> None:
        self._backend = name

    def get_mem_pool(self, device: torch.device) -> MemPool:
        assert self._backend == "NCCL"
        self.pool = self.pool or MemPool(no_split=True)
        return self.pool

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        name, place = group.group_name, active().address_of(tensor)
        assert self.pool is not None
        assert any(place in segment for segment in self.pool.segments), "not from the pool"
        assert (name, place) not in self._windows, "registered twice"
        number = sum(name == other for other, _ in self.registered)
        keys = [f"symmetric/{name}/{number}/{rank}" for rank in range(group.size())]
        store = default_store()
        store.set(keys[group.rank()], str(tensor.nbytes))
        try:
            store.wait(keys, self.patience)
        except RuntimeError as error:
            raise RuntimeError(f"not all ranks register piece {number} with {name}") from error
        sizes = [int(store.get(key)) for key in keys]
        assert set(sizes) == {tensor.nbytes}, f"ranks register {sizes} bytes"
        self._windows[name, place] = number
        self.registered.append((name, tensor.nbytes))

    # ---- what is seen ----

    def _note(self, kind: str, group: str, tensors: list[torch.Tensor]) -> None:
        windows = tuple(self._windows.get((group, active().address_of(each))) for each in tensors)
        largest = max(tensors, key=lambda tensor: tensor.numel())
        offset = largest.storage_offset() * largest.element_size()
        self.travelled.append(Travelled(kind, group, windows, offset))

    def check_equal(self) -> None:
        """Ranks have registered the same, and each collective worked on the same windows on all of
        them. Collective over all ranks."""
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, (self.registered, self.travelled))
        assert of_all == [of_all[0]] * len(of_all)
        assert all(None not in each.windows for each in self.travelled)
