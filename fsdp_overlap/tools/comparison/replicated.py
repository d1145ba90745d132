"""Trains a program that is written for FSDP2 without sharding: each rank keeps all weights, and
gradients are averaged after each backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn


class _Replicated:
    """The methods of FSDP2's ``FSDPModule``, of a module that is not sharded."""

    syncs_gradients = True

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        for module in self.modules() if recurse else [self]:
            if isinstance(module, _Replicated):
                module.syncs_gradients = requires_gradient_sync

    def unshard(self, async_op: bool = False) -> Any:
        return _Done() if async_op else None

    def __getattr__(self, name: str) -> Any:
        if name in _OTHERS:
            return _nothing
        return super().__getattr__(name)  # type: ignore[misc]


_OTHERS = frozenset(
    name
    for name in vars(torch.distributed.fsdp.FSDPModule)
    if not name.startswith("_") and name not in vars(_Replicated)
)


class _Done:
    def wait(self) -> None:
        """Return at once."""


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: there are no shards."""


@contextmanager
def replicate_instead() -> Iterator[None]:
    """Make FSDP2's ``fully_shard`` shard nothing within the ``with`` block. Gradients of the
    parameters are summed in float64 over all ranks, and divided by their number, so that no order
    of sums matters. ``mp_policy`` is left out: all is computed in the dtype of the parameters.
    """
    fsdp: Any = torch.distributed.fsdp
    roots: list[nn.Module] = []

    def fully_shard(module: Any, **_options: Any) -> Any:
        for each in module if isinstance(module, (list, tuple)) else [module]:
            cls = type(each)
            each.__class__ = type(f"Replicated{cls.__name__}", (_Replicated, cls), {})
            roots.append(each)
        return module

    backward = torch.autograd.backward
    summed: dict[nn.Parameter, torch.Tensor] = {}

    def averaging(*args: Any, **kwargs: Any) -> None:
        parameters = {
            parameter: root
            for root in roots
            for parameter in root.parameters()
            if parameter.requires_grad
        }
        before = {
            parameter: parameter.grad
            for parameter in parameters
            if parameter.grad is not None and summed.get(parameter) is parameter.grad
        }
        for parameter in before:
            parameter.grad = None
        backward(*args, **kwargs)
        for parameter, root in parameters.items():
            if root.syncs_gradients and _anywhere(parameter.grad is not None, parameter.device):
                own = parameter.grad
                wide = (
                    torch.zeros_like(parameter, dtype=torch.float64)
                    if own is None
                    else own.double()
                )
                dist.all_reduce(wide)
                parameter.grad = (wide / dist.get_world_size()).to(parameter.dtype)
            if (old := before.get(parameter)) is not None:
                parameter.grad = old if parameter.grad is None else old + parameter.grad
            if root.syncs_gradients and parameter.grad is not None:
                summed[parameter] = parameter.grad

    with ExitStack() as stack:
        stack.enter_context(patch.object(fsdp, "fully_shard", fully_shard))
        stack.enter_context(patch.object(fsdp, "FSDPModule", _Replicated))
        stack.enter_context(patch.object(torch.autograd, "backward", averaging))
        yield


def _anywhere(is_here: bool, device: torch.device) -> bool:
    """Return whether something holds on some rank."""
    flag = torch.tensor(float(is_here), device=device)
    dist.all_reduce(flag)
    return bool(flag)
