"""A flat tensor whose storage comes and goes while its views stay."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from fsdp_overlap.layout import Plan
from fsdp_overlap.torch_internals import allow_access, refuse_access


class Memory(Protocol):
    """Where buffers can take their memory."""

    def use(self) -> AbstractContextManager[None]:
        """What this thread allocates within comes from there."""
        ...


class FlatBuffer:
    """The flat storage behind a bucket's unsharded parameters or unreduced gradients.

    ``flat`` has shape ``[plan.numel]``, and ``views[i]`` has the shape of ``plan.specs[i]``.
    ``gaps`` are the parts of ``flat`` that belong to no view, if there are any. All are made once:
    :meth:`allocate` and :meth:`free` only resize the storage underneath. A view must not be
    read while :attr:`allocated` is false. Such a read ends the process, unless torch can raise
    :attr:`when_freed`.
    """

    def __init__(self, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        # A tensor that is made in inference mode can never take part in autograd.
        with torch.inference_mode(False), torch.no_grad():
            self.flat = torch.empty(plan.numel, dtype=dtype, device=device)
            self.views = [
                self.flat[offset : offset + spec.numel].view(spec.shape)
                for spec, offset in zip(plan.specs, plan.offsets, strict=True)
            ]
            ends = [o + spec.numel for spec, o in zip(plan.specs, plan.offsets, strict=True)]
            self.gaps = [
                self.flat[end:start]
                for end, start in zip([0, *ends], [*plan.offsets, plan.numel], strict=True)
                if end < start
            ]
        self._storage = self.flat.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self.allocated = True
        self.keeps_storage = False
        """Whether :meth:`free` leaves the storage alone, so that addresses stay the same."""
        self.memory: Memory | None = None
        """Where :meth:`allocate` takes memory. ``None``: where torch takes it."""
        self.when_freed = ""
        """The text of the error that reading the freed buffer raises. Empty: no error."""
        self._refuses = False
        self.free()

    def nbytes_of_others(self, rank: int) -> int:
        """The bytes that ranks other than ``rank`` hold. So many travel to it in an all-gather, and
        from it in a reduce-scatter."""
        return (self.plan.numel - self.plan.shard_numels[rank]) * self.flat.element_size()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this buffer's storage."""
        return tensor.untyped_storage()._cdata == self._storage._cdata

    def allocate(self) -> None:
        """Gives the buffer storage on the current stream; its contents are undefined."""
        if self._refuses and allow_access is not None:
            allow_access(self._storage._cdata)
            self._refuses = False
        if self.memory is None:
            self._storage.resize_(self.nbytes)
        else:
            with self.memory.use():
                self._storage.resize_(self.nbytes)
        self.allocated = True

    def free(self) -> None:
        """Gives the storage back to the current stream's allocator."""
        if self.keeps_storage or not self.allocated:
            return
        self._storage.resize_(0)
        self.allocated = False
        if self.when_freed and refuse_access is not None and allow_access is not None:
            refuse_access(self._storage._cdata, self.when_freed)
            self._refuses = True
