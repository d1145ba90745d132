"""What planning needs to know about a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

# A parameter starts on a multiple of both. 16 bytes are what vectorized kernels ask of a pointer.
_ALIGN_ELEMENTS, _ALIGN_BYTES = 8, 16


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as layouts see it.

    ``fqn`` is its name relative to its unit. ``is_embedding`` says that it is the weight of an
    ``nn.Embedding`` or ``nn.EmbeddingBag``. ``keeps_dtype`` says that compute uses it in its own
    dtype, whatever the policy of its unit. ``cut_dim`` is the dimension along which
    ``PerTensor()`` cuts it. ``block`` is how many neighbouring elements no layout may cut, counted
    from the first one. ``is_kept`` says that it travels in full where others of its unit travel in
    few bits. ``grad_dtype`` is what its user set as the dtype of its gradients. ``None`` if nobody
    did: they have its own then. ``is_opaque`` says that its elements are no numbers: nothing may
    cast or quantize them.
    ``is_extension`` says that its tensor is of a class that says itself how it is gathered.
    ``piece`` is the number of the piece that it travels in, counted from 1. It is 0 in a unit that
    travels whole.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    is_embedding: bool = False
    keeps_dtype: bool = False
    cut_dim: int = 0
    block: int = 1
    is_kept: bool = False
    grad_dtype: torch.dtype | None = None
    is_opaque: bool = False
    is_extension: bool = False
    piece: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def alignment(self) -> int:
        """It starts on a multiple of this many elements of a flat buffer. Where it may be cut
        anywhere, cuts do so too."""
        return max(_ALIGN_ELEMENTS, _ALIGN_BYTES // self.dtype.itemsize)
