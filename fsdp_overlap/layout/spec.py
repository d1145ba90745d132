"""Parameter specs, the input of planning."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

# A parameter starts on a multiple of both. 16 bytes are what vectorized kernels ask of a pointer.
_ALIGN_ELEMENTS, _ALIGN_BYTES = 8, 16


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as layouts see it."""

    fqn: str
    """Its name relative to its unit."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    is_embedding: bool = False
    """Whether it is the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag``."""
    keeps_dtype: bool = False
    """Whether compute uses it in its own dtype, whatever the policy of its unit."""
    cut_dim: int = 0
    """The dimension along which ``PerTensor()`` cuts it."""
    block: int = 1
    """How many adjacent elements no layout may cut, counted from the first one."""
    is_kept: bool = False
    """Whether it is sent unquantized where others of its unit are quantized."""
    grad_dtype: torch.dtype | None = None
    """The dtype of its gradients that the user set. ``None``: its own."""
    is_opaque: bool = False
    """Whether its elements are packed quantized values, which nothing may cast or quantize."""
    is_extension: bool = False
    """Whether its tensor's class defines how it is gathered (``fsdp_pre_all_gather``)."""
    piece: int = 0
    """The number, from 1, of the part of its unit that it is gathered and reduced with. 0 if the
    unit is not divided."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def kind(self) -> tuple[object, ...]:
        """What parameters of one param group have in common."""
        dtypes = self.dtype, self.keeps_dtype, self.grad_dtype
        travels = self.is_opaque, self.is_extension, self.is_kept, self.requires_grad
        return dtypes, travels, self.piece

    @property
    def alignment(self) -> int:
        """It starts on a multiple of this many elements of a flat buffer. Where it may be cut
        anywhere, cuts do so too."""
        return max(_ALIGN_ELEMENTS, _ALIGN_BYTES // self.dtype.itemsize)
