"""Methods that count as forwards of a unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import update_wrapper
from typing import Any

from torch import nn

from fsdp_overlap.engine.unit import Unit, unit_of


class ForwardMethod:
    """Replaces a method of one module: it stands in the module's ``__dict__`` and so hides the
    method of the class. It refers to the module weakly, so that the two do not keep each other
    alive. ``hooks_for`` gives what is called before and after each forward of a unit."""

    def __init__(self, module: nn.Module, method: Any, hooks_for: Callable[[Unit], Any]) -> None:
        self._hooks_for = hooks_for
        self._module = weakref.ref(module)
        self._is_bound = getattr(method, "__self__", None) is module
        self._function = method.__func__ if self._is_bound else method
        update_wrapper(self, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        unit = None if module is None else unit_of(module)
        if module is None or unit is None:
            raise ReferenceError(f"the module of {self._function.__qualname__} was deleted")
        before, after = self._hooks_for(unit)
        try:
            args, kwargs = before(unit, module, args, kwargs)
            bound = (module, *args) if self._is_bound else args
            output = self._function(*bound, **kwargs)
        except BaseException:
            after(unit, module, args, None)
            raise
        return after(unit, module, args, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardMethod:
        duplicate = ForwardMethod.__new__(ForwardMethod)
        vars(duplicate).update(vars(self))
        original = self._module()
        assert original is not None  # it is being copied, and this with it
        duplicate._module = weakref.ref(deepcopy(original, memo))
        return duplicate
