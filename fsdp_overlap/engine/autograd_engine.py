"""What the autograd engine says of the backward under way.

This module is the :class:`~fsdp_overlap.schedule.interface.Engine` that ``schedule/`` asks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from fsdp_overlap.engine.untraced import untraced
from fsdp_overlap.torch_internals import (
    current_autograd_node,
    current_graph_task_id,
    current_graph_task_keeps_graph,
    is_checkpoint_valid,
    queue_callback,
    will_engine_execute_node,
)

is_grad_enabled = torch.is_grad_enabled
keeps_graph = current_graph_task_keeps_graph
graph_task = current_graph_task_id
"""The number of the backward under way on this thread, -1 if there is none."""


def is_in_backward() -> bool:
    """Whether the engine is running on this thread."""
    return current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Has ``function`` called when the backward under way has run."""
    queue_callback(partial(_call, function))


@untraced
def _call(function: Callable[[], None]) -> None:
    function()


def is_for_all_leaves() -> bool:
    """Whether the backward under way is for all leaves of its graph, as ``backward()`` is, and not
    for given inputs."""
    if not is_checkpoint_valid():
        return False
    # A checkpoint is valid also in hooks of the very tensor that torch.autograd.grad() was asked
    # about. The nodes behind that tensor do not run.
    node = current_autograd_node()
    return any(
        will_engine_execute_node(behind) for behind, _ in node.next_functions if behind is not None
    )


def is_to_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the backward under way will accumulate into ``parameter``, which requires grad."""
    with torch.enable_grad():
        view: Any = parameter.view_as(parameter)
    accumulation = view.grad_fn.next_functions[0][0]
    with suppress(RuntimeError):  # autograd.grad() was asked about this very parameter
        return will_engine_execute_node(accumulation)
    return False
