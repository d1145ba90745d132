"""Sharded tensors, and the flat buffers that whole parameters lie in."""

from collections.abc import Callable
from typing import Any

from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor


def load_ops() -> None:
    """Load the ops of sharded tensors, and what torch's checkpoints must know of them. The first op
    does it, and whoever hands out sharded tensors that may be saved before any op has run."""
    import fsdp_overlap.tensor.op_table  # noqa: F401  (sets RaggedDTensor._run_op)


def _run_first_op(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    load_ops()
    return RaggedDTensor._run_op(func, args, kwargs)


RaggedDTensor._run_op = staticmethod(_run_first_op)
