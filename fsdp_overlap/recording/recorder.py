"""Records training steps of a program: sketches of outputs, gradients and weights, and losses."""

from __future__ import annotations

import json
import os
import random
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fsdp_overlap.comm.comm_streams import has_streams
from fsdp_overlap.recording.sketch import SketchBuffer
from fsdp_overlap.recording.steps import StepObserver
from fsdp_overlap.tensor.pytree import tensors_in
from fsdp_overlap.weights.chunks import local_chunks
from fsdp_overlap.weights.model_weights import name_of, named_weights

FORMAT = 2


def recording_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's recording."""
    return folder / f"rank-{rank}.jsonl"


class _PendingTensor(NamedTuple):
    """What is written of a tensor. ``sketches``: the indices of those of its chunks."""

    order: int
    kind: str
    name: str
    part: int
    of_class: str
    shape: tuple[int, ...]
    dtype: str
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
    sketches: list[int]


class Recorder(StepObserver):
    """Writes what ``steps`` compute to a file of this rank in ``folder``, when each ends.

    Events are, in this order: the state of random numbers and, before the first step, the initial
    weights; inputs of the outermost module, the parameters that modules use and their outputs, in
    forward; losses and this rank's gradients of parameters, in backward; the gradients that an
    optimizer steps with, the weights after it, and persistent buffers; the weights of models that
    run without gradients, such as averaged ones.

    Args:
        folder: is made, if it is not there.
        steps: how many steps to record, all by default.
        keep: the name of a module, whose tensors are saved whole, below ``tensors``.
    """

    def __init__(self, folder: Path, steps: int | None = None, keep: str | None = None) -> None:
        folder = folder.resolve()  # the program may change to another directory
        folder.mkdir(parents=True, exist_ok=True)
        self.is_on = False
        self._steps, self._keep, self._folder = steps, keep, folder
        self._rank = 0
        self._lines: TextIO | None = None
        self._step = 0
        self._sketches = SketchBuffer()
        self._pending: list[_PendingTensor] = []
        self._losses: list[tuple[int, torch.Tensor]] = []
        self._order = 0
        self._calls = Counter[tuple[str, str, int]]()
        self._names = _Names()
        self._initial: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._ran: dict[str, weakref.ref[nn.Module]] = {}
        """The outermost modules that have run since an optimizer has stepped."""
        self._evaluated: set[str] = set()
        """Those that have run without gradients in this step."""
        self._nodes: dict[int, tuple[weakref.ref[torch.Tensor], Any, RemovableHandle]] = {}
        self._used: set[int] = set()
        self._last_output: weakref.ref[torch.Tensor] | None = None
        self._input_order = 0
        self._has_gradients = False
        self._left_out: dict[str, None] = {}

    def close(self) -> None:
        """Write the step under way, end the file, and let go of the parameters. Gradients that no
        optimizer has stepped with are written too."""
        if self.is_on and self._has_gradients:
            for name, parameter in self._names.parameters():
                if parameter.grad is not None:
                    self._add("gradient", name, parameter.grad)
            self._add_buffers()
        self._end_step()
        if self._lines is not None:
            self._lines.close()
        for _, _, hook in self._nodes.values():
            hook.remove()
        self._nodes.clear()

    # ---- What hooks call ----

    def begin_step(self, step: int) -> None:
        self._end_step()
        self._step = step
        self.is_on = self._steps is None or step < self._steps
        if self.is_on:
            if self._lines is None:
                self._open()
            self._write_line("random", digest=_random_state())

    def before_any_forward(self, root: nn.Module) -> None:
        # Before FSDP2 has unsharded a model, which it does not undo after an evaluation.
        if self._names.add_root(root):
            weights = self._names.weights_of(root)
            self._initial += [(name, weakref.ref(tensor)) for name, tensor in weights]
        root_name = self._names.of(root)
        self._ran[root_name] = weakref.ref(root)
        if self.is_on and not torch.is_grad_enabled() and root_name not in self._evaluated:
            self._evaluated.add(root_name)
            for name, tensor in self._names.weights_of(root):
                self._add("evaluated weight", name, tensor)

    def before_forward(self, module: nn.Module, is_root: bool) -> None:
        if not self.is_on or not is_root:
            return
        for name, known in self._initial:
            if (tensor := known()) is not None:
                self._add("initial weight", name, tensor)
        self._initial.clear()
        self._input_order = self._next_order()

    def after_forward(
        self, module: nn.Module, is_root: bool, inputs: Sequence[Any], output: Any
    ) -> None:
        if not self.is_on or output is None:
            return
        name = self._names.of(module)
        if is_root:
            for part, tensor in enumerate(tensors_in(inputs)):
                self._add("input", name, tensor, part, self._input_order)
        for parameter_name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type != "meta":
                self._use(name_of(name, parameter_name), parameter)
        outputs = tensors_in(output)
        last = None if self._last_output is None else self._last_output()
        if len(outputs) == 1 and outputs[0] is last:
            return  # of a container
        for part, tensor in enumerate(outputs):
            self._add("output", name, tensor, part, of_class=_class_name(module))
        if outputs:
            self._last_output = weakref.ref(outputs[0])

    def before_backward(self, losses: Sequence[torch.Tensor]) -> None:
        if not self.is_on:
            return
        for loss in losses:
            if loss.numel() == 1:
                value = loss.to_local() if isinstance(loss, DTensor) else loss
                self._losses.append((self._next_order(), value.detach().clone()))
        self._has_gradients = True
        self._used.clear()

    def before_optimizer(self, optimizer: Optimizer) -> None:
        self._has_gradients = False
        if not self.is_on:
            return
        for name, parameter in self._names.parameters_of(optimizer):
            if parameter.grad is not None:
                self._add("gradient", name, parameter.grad)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        if self.is_on:
            for name, parameter in self._names.parameters_of(optimizer):
                self._add("weight", name, parameter)
            self._add_buffers()
        self._ran.clear()

    # ---- Events ----

    def _open(self) -> None:
        """Begin the file. If the program has not joined its ranks yet, its variables tell which."""
        if dist.is_initialized():
            self._rank, ranks = dist.get_rank(), dist.get_world_size()
        else:
            self._rank = int(os.environ.get("RANK", 0))
            ranks = int(os.environ.get("WORLD_SIZE", 1))
        self._lines = recording_path(self._folder, self._rank).open("w", encoding="utf-8")
        self._write({"kind": "run", "format": FORMAT, "torch": torch.__version__, "ranks": ranks})

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _add_buffers(self) -> None:
        for known in self._ran.values():
            if (root := known()) is not None:
                for name, tensor in self._names.weights_of(root):
                    if not isinstance(tensor, nn.Parameter):
                        self._add("buffer", name, tensor)

    def _use(self, name: str, parameter: torch.Tensor) -> None:
        """Record a parameter that a module uses, and have its gradient recorded."""
        if id(parameter) not in self._used:
            self._used.add(id(parameter))
            self._add("parameter", name, parameter)
        known = self._nodes.get(id(parameter))
        if not parameter.requires_grad or (known is not None and known[0]() is parameter):
            return
        # Of the node, not of the parameter, whose hooks libraries read.
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

        def record_gradient(gradients: tuple[torch.Tensor, ...]) -> None:
            if self.is_on and gradients[0] is not None:
                self._add("local gradient", name, gradients[0])

        hook = node.register_prehook(record_gradient)  # type: ignore[union-attr]
        self._nodes[id(parameter)] = weakref.ref(parameter), node, hook

    @torch.no_grad()
    def _add(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor,
        part: int = 0,
        order: int | None = None,
        of_class: str = "",
    ) -> None:
        chunks = _chunks_of(tensor)
        if chunks is None:
            self._left_out[f"{kind} {name}"] = None
            return
        shape = tuple(tensor.shape)
        order = self._next_order() if order is None else order
        indices = [self._sketches.add(values, shape, chunk) for chunk, values in chunks]
        places = [(chunk.offsets, chunk.sizes) for chunk, _ in chunks]
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._pending.append(
            _PendingTensor(order, kind, name, part, of_class, shape, dtype, places, indices)
        )
        if self._keep is not None and f"{name}.".startswith(f"{self._keep}."):
            self._save(kind, name, part, order, chunks)

    def _save(self, kind: str, name: str, part: int, order: int, chunks: Sequence[Any]) -> None:
        folder = self._folder / "tensors" / f"rank-{self._rank}" / f"step-{self._step}"
        folder.mkdir(parents=True, exist_ok=True)
        kept = [(tuple(chunk.offsets), values.detach().cpu().clone()) for chunk, values in chunks]
        torch.save(kept, folder / f"{order}-{kind.replace(' ', '-')}-{name}-{part}.pt")

    def _end_step(self) -> None:
        if not self.is_on:
            return
        self.is_on = False
        sketches = self._sketches.finish()
        losses = [(order, float(loss)) for order, loss in self._losses]
        self._write_line("losses", values=[value for _, value in losses])
        for each in sorted(self._pending):
            key = each.kind, each.name, each.part
            self._calls[key] += 1
            own = [sketches[index] for index in each.sketches]
            self._write_line(
                each.kind,
                name=each.name,
                of_class=each.of_class,
                part=each.part,
                call=self._calls[key] - 1,
                shape=each.shape,
                dtype=each.dtype,
                chunks=each.chunks,
                digests=[sketch.digest for sketch in own],
                squares=[sketch.squares for sketch in own],
                projections=[sketch.projections for sketch in own],
            )
        self._write_line("end", left_out=list(self._left_out))
        self._left_out.clear()
        self._flush()
        self._pending.clear()
        self._losses.clear()
        self._calls.clear()
        self._used.clear()
        self._evaluated.clear()
        self._last_output = None

    def _flush(self) -> None:
        assert self._lines is not None
        self._lines.flush()

    def _write_line(self, kind: str, **fields: Any) -> None:
        self._write({"kind": kind, "step": self._step, **fields})

    def _write(self, line: dict[str, Any]) -> None:
        assert self._lines is not None
        self._lines.write(json.dumps(line) + "\n")


class _Names:
    """The names of modules and parameters of the outermost modules that ran."""

    def __init__(self) -> None:
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._taken: set[str] = set()
        """Their prefixes, also of those that are gone: it depends on the library when they go."""
        self._modules: dict[int, tuple[str, weakref.ref[nn.Module]]] = {}
        self._parameters: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}

    def add_root(self, root: nn.Module) -> bool:
        """Note an outermost module. Return whether it was unknown."""
        root = _unwrapped(root)
        if self._known(root) is not None:
            return False
        self._roots = [each for each in self._roots if each[1]() is not None]
        has_parameters = any(True for _ in root.parameters())
        prefix = "" if has_parameters and "" not in self._taken else _class_name(root)
        if has_parameters and prefix in self._taken:
            numbered = (f"{prefix}-{number}" for number in count(2))
            prefix = next(name for name in numbered if name not in self._taken)
        self._taken.add(prefix)
        self._roots.append((prefix, weakref.ref(root)))
        self._find_modules(prefix, root)
        return True

    def _find_modules(self, prefix: str, root: nn.Module) -> None:
        for name, module in root.named_modules():
            if self._known(module) is None:
                known = name_of(prefix, name) if name else prefix
                self._modules[id(module)] = known, weakref.ref(module)

    def of(self, module: nn.Module) -> str:
        """Return the name of a module: empty for the outermost one with parameters."""
        module = _unwrapped(module)
        if (name := self._known(module)) is None:
            for prefix, known in self._roots:
                if (root := known()) is not None:
                    self._find_modules(prefix, root)
            if (name := self._known(module)) is None:
                name = _class_name(module)
                self._modules[id(module)] = name, weakref.ref(module)
        return name

    def _known(self, module: nn.Module) -> str | None:
        name, known = self._modules.get(id(module), (None, None))
        return name if known is not None and known() is module else None

    def weights_of(self, root: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return the weights of ``root`` by name, each once, where ranks have them at rest."""
        root = _unwrapped(root)
        prefix = self.of(root)
        weights: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in named_weights(root):
            weights.setdefault(id(tensor), (name_of(prefix, name), tensor))
        for name, tensor in weights.values():
            self._parameters.setdefault(id(tensor), (name, weakref.ref(tensor)))
        return list(weights.values())

    def parameters_of(self, optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters of ``optimizer`` by name."""
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if any(self._name_of(parameter) is None for parameter in parameters):
            for parameter in parameters:
                if self._name_of(parameter) is None:
                    self._parameters.pop(id(parameter), None)  # of a tensor that is gone
            for _, known in self._roots:
                if (root := known()) is not None:
                    self.weights_of(root)
            for index, parameter in enumerate(parameters):
                name = f"{type(optimizer).__name__}.{index}"
                self._parameters.setdefault(id(parameter), (name, weakref.ref(parameter)))
        return [(self._name_of(parameter) or "", parameter) for parameter in parameters]

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters that are known, by name."""
        known = [(name, tensor()) for name, tensor in self._parameters.values()]
        return [(name, tensor) for name, tensor in known if isinstance(tensor, nn.Parameter)]

    def _name_of(self, parameter: torch.Tensor) -> str | None:
        name, known = self._parameters.get(id(parameter), (None, None))
        return name if known is not None and known() is parameter else None


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _class_name(module: nn.Module) -> str:
    """Return the name of a module's class, as it was before the module was sharded."""
    own, *bases = [cls.__name__ for cls in type(module).__mro__]
    return next((base for base in bases if own in (f"FSDP{base}", f"Replicated{base}")), own)


def _chunks_of(tensor: torch.Tensor) -> list[Any] | None:
    """Return the chunks that this rank has, ``None`` if they cannot be told."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return None
    if isinstance(tensor, DTensor) and any(at.is_partial() for at in tensor.placements):
        return None
    try:
        return local_chunks(tensor)
    except (TypeError, NotImplementedError):  # of another class
        return None


def _random_state() -> int:
    """Return a checksum of the states of random number generators."""
    states = [torch.get_rng_state()]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and has_streams(accelerator):
        module = torch.get_device_module(accelerator)
        if module.is_initialized():
            states.append(module.get_rng_state())
    checksum = crc32(repr(random.getstate()).encode())
    if (numpy := sys.modules.get("numpy")) is not None:
        checksum = crc32(numpy.random.get_state()[1].tobytes(), checksum)
    for state in states:
        checksum = crc32(bytes(state.tolist()), checksum)
    return checksum
