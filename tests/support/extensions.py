"""Parameters whose class says how they are gathered, in models that FSDP2 shards too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as keep_version
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

WIDTH = 8

TOLD: list[tuple[Any, ...]] = []
"""What each call of the newer ``fsdp_pre_all_gather`` was told of its surroundings."""


class Wrapped(torch.Tensor):
    """Wraps a tensor. Operations give plain tensors, but those that make another one like it."""

    KEEP = frozenset(
        getattr(torch.ops.aten, name)
        for name in "empty_like new_zeros slice copy_ view as_strided _to_copy split clone "
        "detach alias zeros_like".split()
    )

    @staticmethod
    def __new__(cls: type, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_inside = data

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.data_inside})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> Any:
        return cls(inner["data_inside"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(Wrapped, lambda x: x.data_inside, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if result is None:
            return None
        if func._schema.name.endswith("_"):
            return args[0]
        if func.overloadpacket not in Wrapped.KEEP:
            return result
        return pytree.tree_map_only(torch.Tensor, cls, result)


def padded(rows: torch.Tensor, outer: torch.Size, mesh: Any) -> torch.Tensor:
    """Return ``rows`` with as many as any rank has."""
    room = rows.new_zeros((math.ceil(outer[0] / mesh.size()), *outer[1:]))
    room[: len(rows)] = rows
    return room


def refill(out: torch.Tensor, whole: torch.Tensor) -> None:
    """FSDP2 wants this to be no edit, as far as autograd knows."""
    out = out._local_tensor if isinstance(out, DTensor) else out
    with torch.no_grad(), keep_version(out):
        out.copy_(whole)


class Rounded(Wrapped):
    """Travels in bfloat16. The unsharded parameter is a plain tensor."""

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> Any:
        TOLD.append((tuple(mesh.mesh.tolist()), outer_size, outer_stride, type(module), mp_policy))
        return (padded(self.data_inside, outer_size, mesh).bfloat16(),), outer_size

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        [gathered] = outputs
        assert gathered.dtype == torch.bfloat16
        if out is not None:
            refill(out, gathered[: metadata[0]])
            return None
        whole = gathered.to(param_dtype)
        return whole, (gathered, whole)


class Same(Wrapped):
    """Travels as it is."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (padded(self.data_inside, outer_size, mesh),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return None if out is not None else (outputs[0], ())


class Coded(Wrapped):
    """Travels as codes and, for each row, a scale: two tensors of other dtypes and sizes."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        values = self.data_inside
        scales = values.abs().amax(1, keepdim=True) / 127 + 1e-12
        return ((values / scales).round().to(torch.int8), scales.double()), len(values)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        codes, scales = outputs
        assert metadata == len(self)
        whole = (codes * scales).to(param_dtype)
        if out is not None:
            refill(out, whole)
            return None
        return whole, (whole,)


class Pair(TwoTensor):
    """Computes with both of its tensors. So the unsharded parameter is of the class, too."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.a, self.b), "told"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        a, b = outputs
        assert metadata == "told"
        if out is None:
            return Pair(a, b).to(param_dtype), (a, b)
        assert isinstance(out, Pair)
        if param_dtype == a.dtype:
            assert out.a.untyped_storage()._cdata == a.untyped_storage()._cdata
        else:
            out.a.copy_(a)
            out.b.copy_(b)
        return None


class Early(Rounded):
    """As `Rounded`, but what is gathered is not needed when it was cast."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        whole = outputs[0].to(param_dtype, copy=True)
        return whole, (whole,)


MAKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": torch.clone,
    "rounded": Rounded,
    "coded": Coded,
    "pair": lambda weight: Pair(weight, weight.clone()),
    "early": Early,
}


def with_matrices_of(cls: Any, build: Callable[[], nn.Module]) -> nn.Module:
    """Return a model in which weights of linear layers are of a class of their own."""
    model = build()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(cls(module.weight.detach()))
    return model


class Layer(nn.Module):
    """Its matrices are of the class; the norm and the bias are plain."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, kind: str = "rounded", inner: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(inner) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 4)
        for layer in self.layers:
            for linear in (layer.up, layer.down):  # type: ignore[union-attr]
                linear.weight = nn.Parameter(MAKE[kind](linear.weight.detach()))  # type: ignore[union-attr,arg-type,operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return plain(self.head(x))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return what both sides compare. A pair has twice the same."""
    if isinstance(tensor, TwoTensor):
        assert torch.equal(tensor.a, tensor.b)
    return tensor


def parts(tensor: Any) -> list[torch.Tensor]:
    """Return the plain tensors in ``tensor``."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return [part for name in names for part in parts(getattr(tensor, name))] or [tensor]


# What checkpoints hold of them.
torch.serialization.add_safe_globals([Rounded, Coded, Early, Pair])
