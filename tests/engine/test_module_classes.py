"""Modules of classes that are awkward to derive from: they train as any, or are refused before
anything is changed."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch import nn

from fsdp_overlap import FsdpContext, FsdpModule, fully_shard
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import VOCABULARY

T = TypeVar("T")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Encoder(abc.ABC):
    @abc.abstractmethod
    def kind(self) -> str: ...


class Encodes(Protocol):
    def kind(self) -> str: ...


class AbcFirst(abc.ABC, Layer):
    pass


class InterfaceFirst(Encoder, Layer):
    def kind(self) -> str:
        return "interface"


class GenericFirst(Generic[T], Layer):
    pass


class ProtocolFirst(Encodes, Layer):
    def kind(self) -> str:
        return "protocol"


class AppliesItself(abc.ABC, Layer):
    """Overrides a method that the library overrides too."""

    applied = 0

    def _apply(self, fn: Any, recurse: bool = True) -> AppliesItself:
        self.applied += 1
        return super()._apply(fn, recurse)  # type: ignore[return-value]


class Slotted(Layer):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


class Registered(Layer):
    """Wants an argument of classes that derive from it, and changes their methods."""

    calls = 0

    def __init_subclass__(cls, *, key: str) -> None:
        inner = cls.forward

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            Registered.calls += 1
            return inner(self, x)

        cls.forward = forward  # type: ignore[method-assign]


class Wrapped(Registered, key="wrapped"):
    pass


class Guarded(Layer):
    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("linear", "training"):
            raise AttributeError(name)
        super().__setattr__(name, value)


CLASSES = [
    AbcFirst,
    InterfaceFirst,
    GenericFirst,
    ProtocolFirst,
    AppliesItself,
    Slotted,
    Wrapped,
    Guarded,
]


def model(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), layer(), layer(), nn.Linear(8, VOCABULARY))


class MadeTwice(Twins):
    """torch does not copy slots."""

    def losses(self, *batch: torch.Tensor) -> Any:
        for made in (self.model, self.twin):
            for layer in made.modules():
                if isinstance(layer, Slotted):
                    layer.scale = 2
        return super().losses(*batch)


def shard(made: Any, ctx: FsdpContext, **options: Any) -> None:
    for layer in (*made, made):
        fully_shard(layer, ctx, **options)


def train() -> None:
    for each in CLASSES:
        twins = MadeTwice(lambda each=each: model(each), shard)
        twins.train(2)
        layer: Any = twins.model[1]
        assert isinstance(layer, FsdpModule)
        assert isinstance(layer, each)
        layer.unshard()
        layer.reshard()
        if each is Wrapped:
            Registered.calls = 0
            layer(torch.ones(1, 8).double())
            assert Registered.calls == 1
        if each is AppliesItself:
            before = layer.applied
            layer.to("cpu")
            assert layer.applied == before + 1
        if each is not Slotted:
            copied = copy.deepcopy(layer)
            assert type(copied) is type(layer)
            assert type(copied.__new__(type(copied))) is each


def test_modules_of_any_class_train_as_without_sharding() -> None:
    run_ranks(train, 2)


class WantsArguments(type):
    def __new__(cls, name: str, bases: Any, namespace: Any, *, key: str) -> Any:
        return super().__new__(cls, name, bases, namespace)

    def __init__(cls, name: str, bases: Any, namespace: Any, **key: str) -> None:
        super().__init__(name, bases, namespace)


class Keyed(Layer, metaclass=WantsArguments, key="keyed"):
    pass


def refused() -> None:
    layer, ctx = Keyed(), FsdpContext()
    x = torch.ones(2, 8)
    before = layer(x)
    for made in (layer, [nn.Linear(8, 8), layer]):
        with pytest.raises(TypeError, match=r"Keyed cannot be sharded.*'key'.*metaclass"):
            fully_shard(made, ctx)  # type: ignore[call-overload]
    assert {type(parameter) for parameter in layer.parameters()} == {nn.Parameter}
    assert not layer._forward_hooks
    assert torch.equal(layer(x), before)
    fully_shard(layer.linear, ctx)  # what it holds may be a unit
    layer(x).sum().backward()
    assert layer.linear.weight.grad is not None


def test_a_class_that_cannot_be_derived_from_is_refused_before_anything_changes() -> None:
    run_on_fake_group(refused, 2)
