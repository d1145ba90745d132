"""What ``torch.compile`` does with our hooks: it lets them be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

HookT = TypeVar("HookT", bound=Callable[..., Any])


def untraced(hook: HookT) -> HookT:
    """Makes ``torch.compile`` end its graph before ``hook``, run it and all that it calls as they
    are, and begin another graph behind it.

    It is ``torch.compiler.disable()`` without what that costs: importing ``torch._dynamo``, half a
    second in every rank, and two frames around every call.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(hook.__code__, strategy)
    marks: Any = hook
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "fsdp_overlap gathers, frees or reduces parameters here"
    return hook
