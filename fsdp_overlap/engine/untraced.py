"""Keeps ``torch.compile`` from tracing our hooks. See Note [compile]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fsdp_overlap.torch_internals import keep_from_compile

HookT = TypeVar("HookT", bound=Callable[..., Any])


def untraced(hook: HookT) -> HookT:
    """Makes ``torch.compile`` end its graph before ``hook``, run it and all that it calls as they
    are, and begin another graph behind it."""
    keep_from_compile(hook, "fsdp_overlap gathers, frees or reduces parameters here")
    return hook
