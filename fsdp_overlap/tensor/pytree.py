"""Tensors inside the arguments and outputs of a forward."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from operator import is_
from types import BuiltinMethodType, MemberDescriptorType
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_overlap.torch_internals import SUPPORTED_NODES

Change = Callable[[torch.Tensor], torch.Tensor]

_BUILTIN = (OrderedDict, dict, list, tuple, set, frozenset, deque)
# Containers that hold everything in attributes.
_OF_ATTRIBUTES = (UserDict, UserList)

# Types that cannot hold a tensor. An object of any other type might.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    """Return each tensor in nested lists, tuples, sets, mappings, dataclasses and registered pytree
    nodes, once."""
    # A single tensor is by far the most common.
    if isinstance(value, torch.Tensor):
        return (value,)
    tensors: dict[int, torch.Tensor] = {}
    _collect(_contents(value), tensors, {id(value): value})
    return tuple(tensors.values())


def _collect(
    values: Iterable[Any], tensors: dict[int, torch.Tensor], containers: dict[int, Any]
) -> None:
    """Add what ``values`` hold to ``tensors`` and ``containers``, by the ids of both."""
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif not isinstance(value, _PLAIN) and id(value) not in containers:
            containers[id(value)] = value
            _collect(_contents(value), tensors, containers)


def _contents(value: Any) -> Iterable[Any]:
    """Return what a container holds, or nothing if ``value`` is no container."""
    kind = type(value)
    if kind is tuple or kind is list:
        return value
    if kind is dict:
        return value.values()
    if not _is_container(value):
        return ()
    items, attributes = _read(value)
    found = [*items.values(), *attributes.values()]
    # A mapping of any other class may keep its values where only its methods find them.
    return [*found, *value.values()] if isinstance(value, Mapping) and not items else found


def _is_container(value: Any) -> bool:
    if isinstance(value, (type, nn.Module)):  # a dataclass may be either
        return False
    return (
        isinstance(value, (*_BUILTIN, Mapping, *_OF_ATTRIBUTES))
        or is_dataclass(value)
        or type(value) in SUPPORTED_NODES
    )


def map_tensors(change: Change, value: Any) -> Any:
    """Return ``value`` with every tensor in it replaced by ``change(tensor)``. Containers in which
    nothing changes stay the same objects, and the others become copies of the same class."""
    if isinstance(value, torch.Tensor):
        return change(value)
    changed = _changed(change, value)
    return _Copies(changed).copy(value) if changed else value


def map_arguments(
    change: Change, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], CopiedArguments | None]:
    """Do what :func:`map_tensors` does to the arguments of a forward. A container that is given
    twice is copied once. The third result is ``None`` if no container was copied, and else is to be
    finished after the forward."""
    changed = _changed(change, (args, kwargs))
    if not changed:
        return args, kwargs, None
    copies = _Copies(changed)
    args = tuple(map(copies.copy, args))
    kwargs = {name: copies.copy(value) for name, value in kwargs.items()}
    return args, kwargs, CopiedArguments(copies.made) if copies.made else None


def _changed(change: Change, value: Any) -> list[tuple[Any, Any]]:
    """Return each tensor in ``value`` that ``change`` changes, and the result."""
    return [
        (tensor, result) for tensor in tensors_in(value) if (result := change(tensor)) is not tensor
    ]


class CopiedArguments:
    """The containers among the arguments of a forward that were copied."""

    def __init__(self, made: list[_Copy]) -> None:
        self._made = made

    def finish(self, output: Any) -> Any:
        """Make the caller's containers hold what the forward added to, or removed from, their
        copies. Return ``output`` with the caller's containers in place of their copies."""
        originals = {id(each.copy): each.original for each in self._made}
        for each in self._made:
            each.write_back(originals)
        return _Copies([(each.copy, each.original) for each in self._made]).copy(output)


class _Contents(NamedTuple):
    """What a container holds: items by key, or by place in a sequence, and attributes by name, or
    by their descriptors if they are slots."""

    items: dict[Any, Any]
    attributes: dict[Any, Any]

    def map(self, change: Callable[[Any], Any]) -> _Contents:
        return _Contents(*({key: change(each) for key, each in part.items()} for part in self))

    def holds_same(self, other: _Contents) -> bool:
        return all(
            list(mine) == list(its) and all(map(is_, mine.values(), its.values()))
            for mine, its in zip(self, other, strict=True)
        )


class _Copy:
    """A copy of a mutable container, whose ``contents`` were ``given`` in place of others."""

    def __init__(self, original: Any, copy: Any, contents: _Contents, given: _Contents) -> None:
        self.original = original
        self.copy = copy
        self._given = given
        self._own = [
            (new, old)
            for olds, news in zip(contents, given, strict=True)
            for old, new in zip(olds.values(), news.values(), strict=True)
        ]

    def write_back(self, originals: dict[int, Any]) -> None:
        """Make the original hold what the copy holds now, in the caller's own form. ``originals``
        has those of all copies."""
        now = _read(self.copy)
        if not now.holds_same(self._given):
            both = originals | {id(new): old for new, old in self._own}
            _write(self.original, now.map(lambda each: both.get(id(each), each)))


class _CopiedNode(_Copy):
    """A copy of a node. The containers in which it shows its tensors may be made whenever it is
    asked, so the tensors alone tell what changed."""

    def __init__(self, original: Any, copy: Any) -> None:
        super().__init__(original, copy, _tensors_of(original), _tensors_of(copy))

    def write_back(self, originals: dict[int, Any]) -> None:
        if not _tensors_of(self.copy).holds_same(self._given):
            node = _rebuilt(self.copy, _read(self.copy).map(_Copies(self._own).copy))
            _write(self.original, _Contents({}, _attributes(node)))


def _tensors_of(node: Any) -> _Contents:
    return _Contents(dict(enumerate(tensors_in(node))), {})


class _Copies:
    """Copies containers that hold certain objects, in which others replace these. ``pairs`` are of
    an object and what replaces it."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._replacements = {id(old): new for old, new in pairs}
        self._replaced = [old for old, _ in pairs]  # kept alive, so that their ids stay theirs
        self.made: list[_Copy] = []
        """The copies of mutable containers."""

    def _replace(self, old: Any, new: Any) -> None:
        self._replacements[id(old)] = new
        self._replaced.append(old)

    def copy(self, value: Any) -> Any:
        """Return ``value``, a copy of it, or what replaces it."""
        if id(value) in self._replacements:
            return self._replacements[id(value)]
        if isinstance(value, (torch.Tensor, *_PLAIN)) or not _is_container(value):
            return value
        contents = _read(value)
        if not self._are_in(contents):
            return value
        if _is_node(value):
            copy = _rebuilt(value, contents.map(self.copy))
            self.made.append(_CopiedNode(value, copy))
        elif isinstance(value, (tuple, frozenset)):
            items, attributes = contents.map(self.copy)
            copy = _new(value, items.values())
            _write(copy, _Contents({}, attributes))
        else:
            copy = _new(value)
            self._replace(value, copy)  # what it holds may lead back to it
            given = contents.map(self.copy)
            _write(copy, given)
            self.made.append(_Copy(value, copy, contents, given))
        self._replace(value, copy)
        return copy

    def _are_in(self, contents: _Contents) -> bool:
        tensors: dict[int, torch.Tensor] = {}
        containers: dict[int, Any] = {}
        for part in contents:
            _collect(part.values(), tensors, containers)
        ids = self._replacements.keys()
        return not (ids.isdisjoint(tensors) and ids.isdisjoint(containers))


def _is_node(value: Any) -> bool:
    """Return whether only the functions of a registered pytree node can look into ``value``."""
    return type(value) in SUPPORTED_NODES and not (
        isinstance(value, _BUILTIN) or is_dataclass(value)
    )


def _rebuilt(node: Any, contents: _Contents) -> Any:
    functions = SUPPORTED_NODES[type(node)]
    return functions.unflatten_fn(list(contents.items.values()), functions.flatten_fn(node)[1])


def _builtin_of(value: Any) -> Any:
    """Return the builtin container that the class of ``value`` derives from, or ``None``."""
    return next((base for base in _BUILTIN if isinstance(value, base)), None)


# Classes of containers override methods, and have constructors that do more than fill them. So they
# are read, made and written by the methods of the builtin class alone.


def _read(value: Any) -> _Contents:
    if _is_node(value):
        return _Contents(dict(enumerate(SUPPORTED_NODES[type(value)].flatten_fn(value)[0])), {})
    builtin = _builtin_of(value)
    if builtin is None:
        return _Contents({}, _attributes(value))
    if issubclass(builtin, dict):
        return _Contents(dict(builtin.items(value)), _attributes(value))
    return _Contents(dict(enumerate(builtin.__iter__(value))), _attributes(value))


def _attributes(value: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = dict(getattr(value, "__dict__", ()))
    for slot in _slots(value):
        try:
            found[slot] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return found


def _slots(value: Any) -> list[MemberDescriptorType]:
    if isinstance(value, tuple):  # has none, but builtin ones have items that look like them
        return []
    return [
        each
        for base in type(value).__mro__
        for each in vars(base).values()
        if isinstance(each, MemberDescriptorType)
    ]


def _new(value: Any, *items: Iterable[Any]) -> Any:
    """Return an object of the class of ``value`` that holds ``items``, made without its
    constructor."""
    makers = (vars(base).get("__new__") for base in type(value).__mro__)
    made = next(each for each in makers if isinstance(each, BuiltinMethodType))(type(value), *items)
    if isinstance(value, deque):
        deque.__init__(made, (), value.maxlen)
    return made


def _write(value: Any, contents: _Contents) -> None:
    """Make ``value`` hold ``contents``. Items of what cannot be changed are left alone."""
    items, attributes = contents
    builtin = _builtin_of(value)
    if builtin in (OrderedDict, dict):
        if list(builtin.keys(value)) != list(items):
            builtin.clear(value)
        for key, item in items.items():
            builtin.__setitem__(value, key, item)
    elif builtin is list:
        list.__setitem__(value, slice(None), items.values())
    elif builtin in (set, deque):
        builtin.clear(value)
        (set.update if builtin is set else deque.extend)(value, items.values())
    for name in _attributes(value).keys() - attributes.keys():
        if isinstance(name, str):
            del value.__dict__[name]
        else:
            name.__delete__(value)
    for name, attribute in attributes.items():
        if isinstance(name, str):
            value.__dict__[name] = attribute
        else:
            name.__set__(value, attribute)
