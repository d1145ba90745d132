"""The gradient of a sharded parameter, as an attribute of ours."""

from __future__ import annotations

from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch


def _count_references() -> int:
    probe = object()
    return getrefcount(probe)


# The count of an object to which one variable refers. It depends on the Python version.
_UNSHARED = _count_references()

_NOTHING = torch.empty(0)


class HoldsGradient:
    """A sharded parameter. Reduced gradients are given to it, and optimizers read and write its
    ``.grad`` in every step. torch's own attribute would go through ``__torch_function__`` for each.
    """

    _spec: Any
    _gradient: Any = None
    _spare_gradient: Any = None

    def _fits(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` may be the gradient of this tensor."""
        raise NotImplementedError

    def _check_grad_dtype(self, dtype: torch.dtype | None) -> None:
        """Checks what somebody sets ``grad_dtype`` to.

        Raises:
            RuntimeError: it is another dtype than the parameter's own.
        """
        own = self._spec.tensor_meta.dtype
        if dtype != own:
            raise RuntimeError(
                f"grad_dtype = {dtype} on a sharded parameter of {own}: sharded gradients have the "
                "dtype of their parameters; for the dtype they are reduced in, use "
                "MixedPrecisionPolicy(reduce_dtype=...)"
            )

    def _set_grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            dropped = self._gradient
            self._gradient = None
            # Making a wrapper takes longer than all else that is done for a gradient. So one that
            # nobody else holds is kept for the next gradient, without its memory.
            if dropped is None or dropped._spec is not self._spec:
                return
            if getrefcount(dropped) == _UNSHARED:
                dropped._local_tensor = _NOTHING
                self._spare_gradient = dropped
        elif self._fits(gradient):
            self._gradient = gradient
        else:
            raise TypeError(
                f"the gradient of {self!r} must be of the same kind, shape and layout or None, got "
                f"a {type(gradient).__name__}"
            )

    def _delete_grad(self) -> None:
        self._set_grad(None)

    # attrgetter is a getter without a Python frame.
    grad = property(attrgetter("_gradient"), _set_grad, _delete_grad)
