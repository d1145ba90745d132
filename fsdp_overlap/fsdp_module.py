"""The verbs that :func:`fully_shard` gives a module."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_overlap.runtime.context import unit_of
from fsdp_overlap.runtime.unit import Unit
from fsdp_overlap.sharded_module import ShardedModule


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Makes compute wait for the all-gather and registers the unsharded parameters."""
        if self._unit is not None:
            self._unit.wait()
            self._unit.use_unsharded()
            self._unit = None


class FsdpModule(ShardedModule):
    """Mixed into the class of every module given to :func:`fully_shard`."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters, not those of inner units, and registers them in the
        module until :meth:`reshard` or the end of its next forward. Collective over the mesh.

        With ``async_op`` returns a handle; the parameters may be used after its ``wait()``.
        """
        unit = self._fsdp_unit
        unit.context.settle()
        unit.follow_trainability()
        unit.watch_gradients()
        gathers = unit.context.schedule.gathers
        gathers.after_edits()
        gathers.use(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients. Without, they are summed on each rank, unsharded and
        in the reduce dtype, until a backward that does: gradient accumulation without
        communication. ``zero_grad()`` does not know of such sums; ``ctx.reset()`` drops them."""
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer's step. At stage 1 of
        :meth:`set_zero_stage` it is the one that reduces gradients."""
        for unit in self._units(recurse=True):
            unit.is_last_backward = is_last_backward

    def set_zero_stage(self, stage: int, *, recurse: bool = True) -> None:
        """What is sharded at rest, in the words of ZeRO (arXiv 1910.02054).

        3: all, as :func:`fully_shard` does by default. 2: gradients and optimizer states; full
        buffers are kept, and gathered again after the optimizer's step, under the next forward. 1:
        as 2, and gradients too are full until the last backward of a step, which alone reduces
        them; say which is by :meth:`set_is_last_backward`.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in (1, 2, 3):
            raise ValueError(f"set_zero_stage({stage!r}): use 1, 2 or 3")
        for unit in self._units(recurse):
            unit.reshard_after_forward = None if stage == 3 else False
            unit.reshard_after_backward = stage == 3
            unit.reduces_last_only = stage == 1

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, *, recurse: bool = True
    ) -> None:
        """Whether forward frees the full buffers. As the argument of :func:`fully_shard`."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward frees the full buffers. Buffers that are kept are gathered again before
        their next use if the parameters were edited."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def _units(self, recurse: bool) -> Iterable[Unit]:
        modules = self.modules() if recurse else [self]
        return [unit for unit in map(unit_of, modules) if unit is not None]
