"""Containers of tensors among the arguments and outputs of a forward, whose tensors are cast: what
stays the caller's own object, what is copied, and what the caller sees of what the forward adds."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, PerTensor, fully_shard
from fsdp_overlap.layout import Flat, LayoutRule
from fsdp_overlap.tensor.pytree import map_arguments, map_tensors, tensors_in
from support.ranks import run_ranks

BF16 = torch.bfloat16


def cast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(BF16) if tensor.is_floating_point() else tensor


@dataclass
class Record:
    x: torch.Tensor
    kept: Any = None


@dataclass
class Doubles:
    """Its constructor changes what it gets."""

    x: torch.Tensor
    factor: InitVar[int]
    y: torch.Tensor = field(init=False)

    def __post_init__(self, factor: int) -> None:
        self.x = self.y = self.x * factor
        self.not_a_field = self.x


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    kept: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: torch.Tensor
    unset: torch.Tensor = field(init=False)


@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    kept: Any = None


class Point(NamedTuple):
    x: torch.Tensor
    name: str


class Config(dict):  # type: ignore[type-arg]
    """A dictionary whose keys are attributes, and whose constructor wants something else."""

    def __init__(self, size: int) -> None:
        super().__init__(x=torch.ones(size))

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Sealed(OrderedDict):  # type: ignore[type-arg]
    """Refuses what its users should not do, as outputs of transformers do."""

    def clear(self) -> None:
        raise AssertionError("clear")

    def __delitem__(self, key: Any) -> None:
        raise AssertionError("delete")


class Named(list):  # type: ignore[type-arg]
    def __init__(self, name: str, items: Any) -> None:
        super().__init__(items)
        self.name = name


class Node:
    """A registered pytree node."""

    def __init__(self, tensors: list[torch.Tensor], size: int) -> None:
        self.tensors = tensors
        self.size = size


_pytree.register_pytree_node(
    Node, lambda node: ([[*node.tensors]], node.size), lambda items, size: Node(*items, size)
)


def ones() -> torch.Tensor:
    return torch.ones(2)


def counting() -> Any:
    found = defaultdict(list, x=ones())
    found["list"].append(ones())
    return found


MAKE: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (ones(), "name"),
    "named tuple": lambda: Point(ones(), "name"),
    "what max() returns": lambda: torch.ones(2, 2).max(0),
    "packed sequence": lambda: pack_sequence([ones()]),
    "list": lambda: [ones(), 3],
    "list with a name": lambda: Named("name", [ones()]),
    "dict": lambda: {"x": ones(), 3: None},
    "dict with attributes": lambda: Config(2),
    "ordered dict": lambda: OrderedDict(b=ones(), a=ones()),
    "dict that refuses": lambda: Sealed(x=ones()),
    "default dict": counting,
    "user dict": lambda: UserDict(x=ones()),
    "user list": lambda: UserList([ones()]),
    "deque": lambda: deque([ones(), ones()], maxlen=2),
    "set": lambda: {ones()},
    "frozen set": lambda: frozenset([ones()]),
    "dataclass": lambda: Record(ones()),
    "dataclass with a constructor that does more": lambda: Doubles(ones(), 2),
    "frozen dataclass": lambda: Frozen(ones()),
    "frozen dataclass with slots": lambda: FrozenSlots(ones()),
    "dataclass with slots": lambda: Slots(ones()),
    "pytree node": lambda: Node([ones()], 2),
    "nested": lambda: [{"a": (Record(ones()), 3)}, deque([Frozen(ones())])],
}
made = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def plain(value: Any) -> Any:
    """What a container holds, to compare. Tensors by dtype and numbers."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, dict):
        own = type(value), isinstance(value, defaultdict) and value.default_factory
        return *own, *((key, plain(each)) for key, each in value.items())
    if isinstance(value, (list, tuple, deque)):
        own = type(value), getattr(value, "maxlen", None), plain(getattr(value, "name", None))
        return *own, *map(plain, value)
    if isinstance(value, (str, int, type(None))):
        return value
    names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
    return type(value), *((name, plain(getattr(value, name, None))) for name in names)


@made
def test_a_copy_is_of_the_same_class_and_holds_the_same(make: Callable[[], Any]) -> None:
    given = make()
    before = plain(given)
    copied = map_tensors(cast, given)
    assert copied is not given
    assert plain(given) == before
    assert repr(plain(copied)) == repr(before).replace("float32", "bfloat16")


@made
def test_a_container_in_which_nothing_changes_is_handed_on(make: Callable[[], Any]) -> None:
    given = map_tensors(cast, make())
    assert map_tensors(cast, given) is given
    args, kwargs, copied = map_arguments(cast, (given, ones()), {"a": given})
    assert args[0] is kwargs["a"] is given
    assert args[1].dtype is BF16
    assert copied is None


def pop_and_set(value: Any) -> None:
    value["new"] = value.pop("x") + 1


def replace_attribute(value: Any) -> None:
    value.kept = value.x + 1
    value.x = None


FILL: dict[str, Callable[[Any], None]] = {
    "list": lambda value: value.insert(0, value[0] + 1),
    "list with a name": lambda value: setattr(value, "name", value.pop() + 1),
    "dict": pop_and_set,
    "dict with attributes": pop_and_set,
    "ordered dict": lambda value: value.move_to_end("b"),
    "dict that refuses": lambda value: value.update(x=value["x"] + 1, z=3),
    "default dict": lambda value: value["new"].append(value["list"].pop() + 1),
    "user dict": pop_and_set,
    "user list": lambda value: value.append(value[0] + 1),
    "deque": lambda value: value.append(value[0] + 1),
    "set": lambda value: value.add(value.pop() + 1),
    "dataclass": replace_attribute,
    "dataclass with slots": replace_attribute,
    "frozen dataclass": lambda value: value.kept.append(value.x + 1),
    "pytree node": lambda value: value.tensors.append(value.tensors[0] + 1),
    "nested": lambda value: value[0].update(b=value[1].pop().x + 1),
}


@pytest.mark.parametrize("name", FILL)
def test_what_a_forward_does_to_a_copy_reaches_the_caller(name: str) -> None:
    given, twin = MAKE[name](), MAKE[name]()
    tensors = tensors_in(given)
    (mine,), _, copied = map_arguments(cast, (given,), {})
    FILL[name](mine)
    FILL[name](twin)
    assert copied is not None
    output = copied.finish((mine, 3))
    assert output[0] is given  # as without a cast
    # What the forward made is in the dtype of compute, what it was given is the caller's own.
    now = tensors_in(given)
    assert all(each.dtype is BF16 or any(each is other for other in tensors) for each in now)
    assert repr(plain(given)).replace("bfloat16", "float32") == repr(plain(twin))


def test_a_tensor_and_a_container_that_are_given_twice_stay_one() -> None:
    x, kept = ones(), [ones()]
    record = Record(x, kept)
    (first, second, same), kwargs, copied = map_arguments(cast, (kept, record, x), {"y": x})
    assert first is second.kept
    assert second.x is same is kwargs["y"]
    first.append(3)
    assert copied is not None
    copied.finish(None)
    assert kept[1:] == [3]
    assert record.kept is kept


def test_containers_that_hold_each_other_are_copied_once() -> None:
    child = Record(ones())
    parent = Record(ones(), [child])
    child.kept = parent
    copied: Any = map_tensors(cast, parent)
    assert copied.kept[0].kept is copied
    assert copied.kept[0].x.dtype is BF16
    assert len(tensors_in(parent)) == 2


def test_values_may_be_replaced_while_the_caller_walks_over_them() -> None:
    features = {"low": ones(), "high": ones()}
    for name in features:
        (mine,), _, copied = map_arguments(cast, (features,), {})
        mine[name] = mine[name] * 2
        assert copied is not None
        copied.finish(None)
    assert [each.tolist() for each in features.values()] == [[2, 2]] * 2


def test_a_module_is_no_container() -> None:
    @dataclass(eq=False)
    class Layer(nn.Module):
        size: int = 2

        def __post_init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

    layer = Layer()
    assert map_tensors(cast, [layer])[0] is layer
    assert not tensors_in(layer)


# In training, against a twin that was cast as a whole.


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, skips: Any) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        if isinstance(skips, (dict, UserDict)):
            skips[len(skips)] = x
        else:
            (skips.kept if isinstance(skips, (Record, Frozen)) else skips).append(x)
        return x * 2


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, skips: Any) -> torch.Tensor:
        if isinstance(skips, (Record, Frozen)):
            skips = [skips.x, *skips.kept]
        values = skips.values() if isinstance(skips, (dict, UserDict)) else skips
        return self.linear(x) + sum(values)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Its skips lie in a container that ``make`` makes of its input."""

    def __init__(self, make: Callable[[torch.Tensor], Any], recomputes: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList(Down() for _ in range(3))
        self.up = Up()
        self.make = make
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        skips = self.make(first)
        for layer in self.down:
            x = layer(x, skips)
        if self.recomputes:
            return checkpoint(self.up, x, skips, use_reentrant=False)  # type: ignore[no-any-return]
        return self.up(x, skips)  # type: ignore[no-any-return]


SKIPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: [x],
    "dict": lambda x: {0: x},
    "user dict": lambda x: UserDict({0: x}),
    "dataclass": lambda x: Record(x, []),
    "frozen dataclass": Frozen,
    "deque": lambda x: deque([x], maxlen=3),
}


def unets(layout: LayoutRule) -> None:
    policy = MixedPrecisionPolicy(BF16, torch.float32)
    for make in SKIPS.values():
        for is_wide in (True, False):
            for recomputes in (True, False):
                torch.manual_seed(0)
                model = UNet(make, recomputes)
                twin = copy.deepcopy(model).bfloat16()
                ctx = FsdpContext(layout=layout)
                for module in (*model.down, model.up):
                    fully_shard(module, ctx, mp_policy=policy)
                # The root leaves the first skip wide, so that the blocks have to copy.
                fully_shard(model, ctx, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
                x = torch.ones(2, 8)
                skip = x if is_wide else x.to(BF16)
                output, expected = model(x, skip), twin(x.to(BF16), x.to(BF16))
                torch.testing.assert_close(output.to(BF16), expected)
                output.float().sum().backward()
                expected.float().sum().backward()
                for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
                    assert mine.grad is not None
                    assert its.grad is not None
                    whole = mine.grad.full_tensor()
                    torch.testing.assert_close(whole.to(BF16), its.grad, rtol=0.02, atol=0.02)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [Flat(), PerTensor()], ids=str)
def test_skips_train_as_without_sharding(layout: LayoutRule) -> None:
    run_ranks(unets, 2, layout)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: Any, fails: bool = False) -> Any:
        batch["h"] = self.linear(batch.get("h", batch["x"]))
        if fails:
            raise ValueError("fails")
        return batch


def batches() -> None:
    model = nn.Sequential(*(Step() for _ in range(3)))
    twin = copy.deepcopy(model).bfloat16()
    ctx = FsdpContext()
    policy = MixedPrecisionPolicy(BF16, torch.float32)
    for layer in (*model, model):
        fully_shard(layer, ctx, mp_policy=policy)
    batch = {"x": torch.ones(2, 8)}
    x = batch["x"]
    expected = twin({"x": x.to(BF16)})["h"]
    assert model(batch) is batch
    assert batch["x"] is x
    assert torch.equal(batch["h"], expected)
    batch["h"].float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"^fails$"):
        model[0](failed := {"x": x}, fails=True)
    assert set(failed) == {"x", "h"}  # as without sharding
    assert model(batch) is batch


def test_a_batch_gets_what_steps_put_into_it() -> None:
    run_ranks(batches, 2)


class Outputs(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.make = make
        self.made: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.made = self.make(self.linear(x))
        return self.made


def outputs() -> None:
    makers: list[Callable[[torch.Tensor], Any]] = [
        lambda x: [x],
        lambda x: UserDict(x=x),
        Frozen,
        Record,
    ]
    for make in makers:
        for dtype in (None, torch.float32, torch.float64):
            policy = MixedPrecisionPolicy(output_dtype=dtype)
            model = fully_shard(Outputs(make), FsdpContext(), mp_policy=policy)
            output = model(torch.ones(1, 2))
            assert (output is model.made) == (dtype is not torch.float64)
            assert type(output) is type(model.made)
            tensors_in(output)[0].sum().backward()
            assert model.linear.weight.grad is not None


def test_outputs_in_containers_are_cast_and_trained() -> None:
    run_ranks(outputs, 2)
