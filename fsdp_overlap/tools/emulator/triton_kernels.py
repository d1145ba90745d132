"""Triton kernels, as opaque operations.

Triton's own interpreter runs them on the host. A kernel counts as reading all tensors that it is
given, and writing those that it changes; where Triton was imported before, nothing runs, and it
counts as writing all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from fsdp_overlap.tools.emulator.device import EmulatedDevice, Operation
from fsdp_overlap.tools.emulator.dispatch import tensors_in, unseen
from fsdp_overlap.tools.torch_internals import DisableTorchFunction

_INTERPRET = "TRITON_INTERPRET"


@contextmanager
def noting_triton(device: EmulatedDevice, is_seen: Callable[[], bool]) -> Iterator[None]:
    """Note on ``device`` the kernels of Triton that are launched within while it ``is_seen``. Else
    an operation around them is noted."""
    if find_spec("triton") is None:
        yield
        return
    if "triton" not in sys.modules:
        os.environ.setdefault(_INTERPRET, "1")
    jit, autotuner, interpreter = (
        import_module(f"triton.runtime.{name}") for name in ("jit", "autotuner", "interpreter")
    )
    interpret: Callable[..., Any] = interpreter.InterpretedFunction.run

    def note(kernel: Any, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        name = getattr(kernel, "__name__", "kernel")
        device.note_opaque(f"the Triton kernel {name}")
        if is_seen():
            with DisableTorchFunction():
                device.run(Operation(name, reads, writes))

    @wraps(interpret)
    def run_on_host(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        given = tensors_in([*args, *kwargs.values()])
        if not device.values:
            note(kernel, given, given)
            return None
        with unseen():
            before = [_bytes_of(tensor).clone() for tensor in given]
            output = interpret(kernel, *args, **kwargs)
            pairs = zip(given, before, strict=True)
            changed = [each for each, old in pairs if not torch.equal(_bytes_of(each), old)]
        note(kernel, given, changed)
        return output

    def skip(kernel: Any, *args: Any, **kwargs: Any) -> None:
        given = tensors_in([*args, *kwargs.values()])
        note(kernel, given, given)

    def run_first(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the first configuration: there is nothing to measure."""
        return tuner.fn.run(*args, **kwargs, **tuner.configs[0].all_kwargs())

    with (
        patch.object(interpreter.InterpretedFunction, "run", run_on_host),
        patch.object(jit.JITFunction, "run", skip),
        patch.object(autotuner.Autotuner, "run", run_first),
    ):
        yield


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
