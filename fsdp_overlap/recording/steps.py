"""Follows the training steps of any program, by hooks that torch calls for all modules, optimizers
and backwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer, optimizer
from torch.utils.hooks import RemovableHandle

from fsdp_overlap.torch_internals import (
    active_fake_mode,
    are_functorch_transforms_active,
    current_graph_task_id,
    dispatch_mode_count,
    without_inner_modes,
)


class StepObserver:
    """What :func:`observing` calls. A step begins with the first forward with gradients after
    those of an optimizer, and ends where the next begins.

    Attributes:
        stop_following_modules: leaves out calls of modules from now on, whose hooks take time. Then
            steps begin with the first backward.
    """

    stop_following_modules: Callable[[], None]

    def begin_step(self, step: int) -> None:
        """Be called before the first forward of each step, which are counted from 0."""

    def before_any_forward(self, root: nn.Module) -> None:
        """Be called before each forward of an outermost module, with gradients or without."""

    def before_forward(self, module: nn.Module, is_root: bool) -> None:
        """Be called before a forward with gradients, not for those that backward repeats."""

    def after_forward(
        self, module: nn.Module, is_root: bool, inputs: Sequence[Any], output: Any
    ) -> None:
        """Be called after it, before the module's own hooks. ``output`` is ``None`` if it
        raised, and empty if it returned ``None``."""

    def before_backward(self, losses: Sequence[torch.Tensor]) -> None:
        """Be called at the beginning of a backward."""

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Be called before an optimizer's step, not for those within another's."""

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Be called after it."""


@contextmanager
def observing(observer: StepObserver) -> Iterator[None]:
    """Call ``observer`` for what the program does within the ``with`` block, in all threads."""
    hooks = _Hooks(observer)
    observer.stop_following_modules = hooks.remove_module_hooks
    with hooks.installed():
        yield


class _Hooks:
    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._module_hooks: list[RemovableHandle] = []
        self._depth = self._depth_of_all = 0
        self._optimizers: list[Optimizer] = []
        """Those that step now, the outermost first."""
        self._step = -1
        self._process = os.getpid()
        self._is_stepped = True
        self._modes = dispatch_mode_count()

    @contextmanager
    def installed(self) -> Iterator[None]:
        self._module_hooks = [
            modules.register_module_forward_pre_hook(self._before_forward),
            modules.register_module_forward_hook(
                self._after_forward, with_kwargs=True, always_call=True
            ),
        ]
        of_optimizers = [
            optimizer.register_optimizer_step_pre_hook(self._before_optimizer),
            optimizer.register_optimizer_step_post_hook(self._after_optimizer),
        ]
        backward = torch.autograd.backward

        def observed(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(tensors, (torch.Tensor, tuple)):
                tensors = tuple(tensors)  # of a generator
            if not self._is_ignored():
                if self._is_stepped:
                    self._begin_step()
                losses = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                # The others are edges of the graph.
                self._observer.before_backward(
                    [loss for loss in losses if isinstance(loss, torch.Tensor)]
                )
            backward(tensors, *args, **kwargs)

        try:
            with patch.object(torch.autograd, "backward", observed):
                yield
        finally:
            self.remove_module_hooks()
            for hook in of_optimizers:
                hook.remove()

    def remove_module_hooks(self) -> None:
        for hook in self._module_hooks:
            hook.remove()
        self._module_hooks.clear()

    def _begin_step(self) -> None:
        self._is_stepped = False
        self._step += 1
        self._observer.begin_step(self._step)

    def _is_ignored(self) -> bool:
        """Return whether what is called is no part of a step: backward repeats it, ``torch.func``
        transforms it, it has no values, or a worker that was forked calls it."""
        return (
            current_graph_task_id() != -1
            or are_functorch_transforms_active()
            or active_fake_mode() is not None
            or os.getpid() != self._process
        )

    # Where Dynamo traces them, hooks add nothing to the graph, and do not break it.

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._begin_forward(module)

    def _after_forward(self, module: nn.Module, args: Sequence[Any], *rest: Any) -> None:
        if not torch.compiler.is_compiling():
            self._end_forward(module, args, *rest)

    def _begin_forward(self, module: nn.Module) -> None:
        if self._is_ignored():
            return
        self._depth_of_all += 1
        if self._depth_of_all == 1:
            with without_inner_modes(self._modes):
                self._observer.before_any_forward(module)
        if not torch.is_grad_enabled():
            return
        self._depth += 1
        is_root = self._depth == 1
        if is_root and self._is_stepped:
            self._begin_step()
        with without_inner_modes(self._modes):
            self._observer.before_forward(module, is_root)

    def _end_forward(self, module: nn.Module, args: Sequence[Any], *rest: Any) -> None:
        if self._is_ignored():
            return
        self._depth_of_all = max(0, self._depth_of_all - 1)
        if not torch.is_grad_enabled():
            return
        # torch leaves out the keyword arguments where forward raised.
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        if len(rest) == 2 and output is None:
            output = ()
        self._depth = max(0, self._depth - 1)
        inputs = [*args, *kwargs.values()]
        with without_inner_modes(self._modes):
            self._observer.after_forward(module, self._depth == 0, inputs, output)

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if os.getpid() != self._process:
            return
        if optimizer in self._optimizers:  # its last step raised
            del self._optimizers[self._optimizers.index(optimizer) :]
        self._optimizers.append(optimizer)
        if len(self._optimizers) == 1:
            self._observer.before_optimizer(optimizer)

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if os.getpid() != self._process:
            return
        self._optimizers = self._optimizers[:-1]
        if not self._optimizers:
            self._is_stepped = True
            self._depth = self._depth_of_all = 0
            self._observer.after_optimizer(optimizer)
