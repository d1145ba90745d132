"""A model of AOTAutograd's partitioner: what compiled programs keep for backward.

As AOTAutograd's min-cut partitioner, this keeps what products, attention, lookups and communication
return, and what they read in backward; what lies between is computed again there if that needs less
memory. That one sees all of a graph at once, this one chooses tensor by tensor, as autograd saves
them. Blocks that are checkpointed keep what their checkpoints keep, and DTensors are kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fsdp_overlap.tools.emulator import Operation
from fsdp_overlap.tools.simulator.fusion import RECOMPUTE, moves_rows
from fsdp_overlap.tools.simulator.observed import ObservedDevice
from fsdp_overlap.tools.torch_internals import disable_current_modes

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


@dataclass(eq=False)
class Saved:
    """What autograd has saved: ``tensor``, or if that is None what it is computed from."""

    tensor: torch.Tensor | None
    operation: int
    """How many operations had run."""
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    kept: Sequence[torch.UntypedStorage] = ()


class Partitioner:
    """Chooses what is kept on ``device``, from the operations that it is shown in order."""

    def __init__(self, device: ObservedDevice) -> None:
        self._device = device
        self._computed: weakref.WeakKeyDictionary[torch.UntypedStorage, Computed] = (
            weakref.WeakKeyDictionary()
        )
        self._operations = 0
        self._undecided: list[Saved] = []
        """What was saved before the operation that reads it has run."""

    def record(self, operation: Operation, is_fused: bool) -> None:
        """Learn what an operation computes from what, or that it reads what must be kept.
        Parameters are there in backward."""
        self._operations += 1
        call, device = operation.call, self._device
        read = [self._of(tensor) for tensor in operation.reads if self._is_activation(tensor)]
        if not is_fused:
            for each in read:
                each.inputs = None
        is_recomputed = (
            is_fused
            and not moves_rows(operation)
            and not (call is not None and _changes_when_repeated(call.func))
            and all(device.is_here(tensor) or not tensor.dim() for tensor in operation.reads)
        )
        for tensor in operation.writes:
            if is_recomputed:
                self._of(tensor).inputs = tuple(read)
            else:
                self._of(tensor).storage = None
                del self._computed[tensor.untyped_storage()]

    def saving(self) -> AbstractContextManager[Any]:
        """Keep what autograd saves within as a compiled program would."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        return self._device.is_here(tensor) and self._device.allocator.is_activation(tensor)

    def _of(self, tensor: torch.Tensor) -> Computed:
        storage = tensor.untyped_storage()
        if storage not in self._computed:
            self._computed[storage] = Computed(weakref.ref(storage), storage.nbytes())
        return self._computed[storage]

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        self._decide()
        if type(tensor) not in PLAIN or not tensor.numel() or not self._is_activation(tensor):
            return tensor
        layout = tensor.shape, tensor.stride(), tensor.dtype
        self._undecided.append(Saved(tensor.detach(), self._operations, *layout))
        return self._undecided[-1]

    def _decide(self) -> None:
        """Choose what to keep of what was saved, once the next operation has run: a product is
        seen after its operands were saved."""
        while self._undecided and self._undecided[0].operation < self._operations:
            saved = self._undecided.pop(0)
            assert saved.tensor is not None
            computed = self._of(saved.tensor)
            kept = _cheapest(computed, {})
            storages = [each.keep(self._device.device_type) for each in kept]
            if kept != {computed}:
                saved.tensor, saved.kept = None, storages

    def _unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        self._decide()
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.tensor is not None:
            return saved.tensor
        with disable_current_modes():
            output = torch.empty_strided(saved.size, saved.stride, dtype=saved.dtype, device="meta")
            reads = [_whole(storage) for storage in saved.kept]
        self._device.place(output, on_device=True)
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


def _changes_when_repeated(func: Any) -> bool:
    return func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    alias = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return alias.set_(storage, 0, (storage.nbytes(),), (1,))
