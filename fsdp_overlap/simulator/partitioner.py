"""What compiled programs keep for backward.

torch.compile keeps results of matrix products, attention, lookups and communication, and computes
what lies between them again in backward where that needs less memory. This chooses tensor by
tensor, as autograd saves them; the min-cut partitioner of AOTAutograd sees all of a graph at once.
What a DTensor or another class of tensors holds is kept.

Not as AOTAutograd's: that one keeps what a product reads in backward, so that a Llama layer keeps
20 units where this keeps 14. Activations without checkpointing are predicted too small.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fsdp_overlap.emulator import Operation
from fsdp_overlap.simulator.fusion import RECOMPUTE
from fsdp_overlap.simulator.observed import ObservedDevice
from fsdp_overlap.torch_internals import disable_current_modes

PLAIN = (torch.Tensor, torch.nn.Parameter)
DEPTH = 64
"""Operations in a row that are looked at."""


@dataclass(eq=False)
class Computed:
    """Contents of a storage, which fused operations compute from ``inputs``; None if they cannot be
    computed again."""

    storage: weakref.ref[torch.UntypedStorage] | None
    """None once it has other contents."""
    nbytes: int
    inputs: tuple[Computed, ...] | None = None
    is_kept: bool = False

    @property
    def is_there(self) -> bool:
        return self.storage is not None and self.storage() is not None

    @property
    def cost(self) -> int:
        """Bytes that it takes to keep it."""
        return 0 if self.is_kept and self.is_there else self.nbytes

    def keep(self, device: str) -> torch.UntypedStorage:
        """Return its storage, or one of the same size for contents that eager programs drop."""
        self.is_kept, self.inputs = True, None
        storage = self.storage() if self.storage is not None else None
        if storage is None:
            storage = torch.empty(self.nbytes, dtype=torch.uint8, device=device).untyped_storage()
            self.storage = weakref.ref(storage)
        return storage


@dataclass
class Dropped:
    """A saved tensor that is to be computed again, from ``kept``."""

    kept: Sequence[torch.UntypedStorage]
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Partitioner:
    """Chooses what is kept on ``device``, from the operations that it is shown in order."""

    def __init__(self, device: ObservedDevice) -> None:
        self._device = device
        self._computed: weakref.WeakKeyDictionary[torch.UntypedStorage, Computed] = (
            weakref.WeakKeyDictionary()
        )

    def record(self, operation: Operation, is_recomputed: bool) -> None:
        """Learn what an operation computes from what. Parameters are there in backward."""
        call = operation.call
        is_edit = not is_recomputed or (call is not None and call.func._schema.is_mutable)
        inputs = tuple(
            self._of(tensor)
            for tensor in operation.reads
            if self._device.is_here(tensor) and not self._device.allocator.is_parameter(tensor)
        )
        for tensor in operation.writes:
            if is_edit:
                self._of(tensor).storage = None
                del self._computed[tensor.untyped_storage()]
            else:
                self._of(tensor).inputs = inputs

    def saving(self) -> AbstractContextManager[Any]:
        """Keep what autograd saves within as a compiled program would."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _of(self, tensor: torch.Tensor) -> Computed:
        storage = tensor.untyped_storage()
        if storage not in self._computed:
            self._computed[storage] = Computed(weakref.ref(storage), storage.nbytes())
        return self._computed[storage]

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Dropped:
        device = self._device
        if (
            type(tensor) not in PLAIN
            or not tensor.numel()
            or not device.is_here(tensor)
            or device.allocator.is_parameter(tensor)
        ):
            return tensor
        saved = self._of(tensor)
        kept = _cheapest(saved, {})
        storages = [each.keep(device.device_type) for each in kept]
        if kept == {saved}:
            return tensor.detach()
        return Dropped(storages, tensor.shape, tensor.stride(), tensor.dtype)

    def _unpack(self, saved: torch.Tensor | Dropped) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        output = torch.empty_strided(
            saved.size, saved.stride, dtype=saved.dtype, device=self._device.device_type
        )
        with disable_current_modes():
            reads = [_whole(storage) for storage in saved.kept]
        self._device.run(Operation(RECOMPUTE, reads, [output]))
        return output


def _cheapest(
    target: Computed, known: dict[Computed, frozenset[Computed]], depth: int = DEPTH
) -> frozenset[Computed]:
    """Return what is best kept to have ``target``: itself, or what it is computed from."""
    if target not in known:
        known[target] = frozenset({target})
        if target.inputs is not None and target.cost and depth:
            others = frozenset[Computed]().union(
                *(_cheapest(each, known, depth - 1) for each in target.inputs)
            )
            if _cost(others) < target.cost:
                known[target] = others
    return known[target]


def _cost(kept: Iterable[Computed]) -> int:
    return sum(each.cost for each in kept)


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    alias = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return alias.set_(storage, 0, (storage.nbytes(),), (1,))
