"""torch's AdamW, stepping on the flat ranges behind sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_overlap.optim.fused_adamw import FusedAdamW
from fsdp_overlap.optim.next_forward import NextForward
from fsdp_overlap.optim.states import restore


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` with fewer kernels: parameters that are neighbours in
    memory are stepped as one. Parameters of the same unit and parameter group are neighbours.

    Results and state dict are the same as torch's, so checkpoints move between the two, both ways.
    Parameters that are not sharded are stepped too.

    Args:
        moment_dtype: the dtype of the moments. The default is the dtype of each parameter.
            ``torch.bfloat16`` halves the memory of float32 moments. It keeps 8 bits, so the second
            moment cannot decay if ``betas[1]`` is above 0.998: use 0.99 or less with it.
        prefetch_next_forward: whether the units that the next forward needs first are stepped
            first and all-gathered under the rest of the step. Their full buffers are there until
            that forward. Do not edit weights on some ranks only between the two, nor by
            ``to_local().data``: other edits are followed.

    The others are those of ``torch.optim.AdamW``. Steps can be captured in a CUDA graph with and
    without ``capturable``; a replay follows ``lr`` if that is a tensor on the device. A step is
    computed in the widest dtype of parameter, gradient and moments.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        moment_dtype: torch.dtype | None = None,
        prefetch_next_forward: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            capturable=capturable,
            fused=True,
        )
        self._moment_dtype = moment_dtype
        self._prefetch_next_forward = prefetch_next_forward
        self._kernel = FusedAdamW(moment_dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        restore(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        own = {
            "_moment_dtype": self._moment_dtype,
            "_prefetch_next_forward": self._prefetch_next_forward,
        }
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kernel = FusedAdamW(self._moment_dtype)
        for group in self.param_groups:
            group["fused"] = True  # the loaded state may be of an AdamW without it
            self._kernel.load(self.state, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the parameters that have a gradient.

        Raises:
            RuntimeError: the dtype of a parameter is not floating-point, or a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        next_forward = NextForward(self.param_groups if self._prefetch_next_forward else ())
        lots = [
            (lot, group)
            for index, group in enumerate(self.param_groups)
            for lot in self._kernel.lots(index, group, next_forward.edits)
        ]
        for lot, group in lots:
            if lot.is_first:
                self._kernel.step(self.state, lot, group, *scaling)
        next_forward.begin(sum(len(lot.parameters) for lot, _ in lots if lot.is_first))
        for lot, group in lots:
            if not lot.is_first:
                self._kernel.step(self.state, lot, group, *scaling)
        next_forward.finish()
        return loss
