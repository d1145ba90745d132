"""A cache of what operations return for tensors without values.

torch finds that out by kernels in Python, which take much of the time of a simulated step. A step
has the same operations on the same shapes many times, so each is asked of torch once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_MOST = 100_000  # cases, so that a long process does not grow


class _NewTensor(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _ArgumentIndex(NamedTuple):
    number: int
    """Among the tensors of the call."""


class _CannotBeRemembered(Exception):
    pass


_returned: dict[Any, Any] = {}


def run_on_shapes(func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what ``func`` returns. ``tensors``: all that are among its arguments, in the order of
    its schema, all without values."""
    try:
        key = (func, torch.get_default_dtype(), _key_of(args), _key_of(tuple(kwargs.items())))
        hash(key)
    except (TypeError, _CannotBeRemembered):
        return func(*args, **kwargs)
    if key in _returned:
        known = _returned[key]
        if known is not _CannotBeRemembered:
            return _made(known, tensors)
        return func(*args, **kwargs)
    output = func(*args, **kwargs)
    if len(_returned) >= _MOST:
        _returned.clear()
    try:
        _returned[key] = _described(output, tensors)
    except _CannotBeRemembered:
        _returned[key] = _CannotBeRemembered
    return output


def _key_of(value: Any) -> Any:
    """Return what of an argument decides what is returned. 1, 1.0 and True are told apart."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_complex():
            raise _CannotBeRemembered
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key_of, value))
    return type(value), value


def _described(output: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(output, torch.Tensor):
        for index, tensor in enumerate(tensors):
            if tensor is output:
                return _ArgumentIndex(index)
        new = _NewTensor(tuple(output.shape), output.stride(), output.dtype)
        made, memory = _made(new, ()), output.untyped_storage()
        is_alone = all(memory._cdata != each.untyped_storage()._cdata for each in tensors)
        if output.is_meta and is_alone and memory.nbytes() == made.untyped_storage().nbytes():
            return new
    elif isinstance(output, (list, tuple)):
        return type(output), [_described(each, tensors) for each in output]
    elif output is None or type(output) in (int, float, bool):
        return output
    raise _CannotBeRemembered


def _made(known: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(known, _NewTensor):
        return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
    if isinstance(known, _ArgumentIndex):
        return tensors[known.number]
    if isinstance(known, tuple):
        kind, each = known
        return kind(_made(one, tensors) for one in each)
    return known
