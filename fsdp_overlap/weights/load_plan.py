"""Plan which parts of files a rank reads, and find where files and the model differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.checkpoint.files import CheckpointError
from fsdp_overlap.weights import transformers_conversions
from fsdp_overlap.weights.chunks import full_chunk, local_chunks
from fsdp_overlap.weights.exchange import WeightExchange, hash_of
from fsdp_overlap.weights.file_reads import same_bytes, sample_of
from fsdp_overlap.weights.file_views import FilePiece, ViewTracer
from fsdp_overlap.weights.model_weights import Names, check_class, name_of, named_weights, units_of
from fsdp_overlap.weights.safetensors_format import (
    FileTensor,
    SafetensorsFile,
    find_files,
    read_header,
)

Conversion = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Makes tensors of a model of those in files, by name, by views, ``cat`` and ``stack``."""

_MAX_PROBLEMS = 20  # in an error


@dataclass
class LoadPlan:
    """What this rank reads. ``strict``: whether missing and unexpected names are problems.
    ``broadcasts``: whether of replicas the first one reads."""

    strict: bool
    broadcasts: bool = False
    files: list[SafetensorsFile] = field(default_factory=list)
    pieces: dict[str, list[list[FilePiece]]] = field(default_factory=dict)
    """What each local chunk of a weight consists of, by the weight's name in the model."""
    without_memory: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of no unit that are on the meta device, and are to get memory, by name."""
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _to_init: list[tuple[str, nn.Module, list[str]]] = field(default_factory=list)
    """Modules with buffers on the meta device that are in no state dict: the module's name, and the
    names of the buffers."""
    _digest: int = 0
    """A hash of names, dtypes, shapes and some values in the files."""
    _init_buffers: Callable[[nn.Module], object] | None = None

    def find(
        self,
        model: nn.Module,
        path: Path,
        names: Names | Mapping[str, str] | None,
        convert: Conversion | None,
        init_buffers: Callable[[nn.Module], object] | None,
    ) -> None:
        """Find what the weights of ``model`` consist of, by the arguments of ``load_weights``."""
        self.files = [read_header(file) for file in find_files(path)]
        in_files = _by_name(self.files)
        tensors = [in_files[name] for name in sorted(in_files)]
        layout = [(each.name, str(each.dtype), each.shape) for each in tensors]
        self._digest = hash_of(layout, sample_of(tensors))
        by_tensor: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, tensor in named_weights(model):
            by_tensor.setdefault(id(tensor), (tensor, []))[1].append(name)
        # What torch.compile() wraps has no name of its own.
        [*_, inner] = (each for at, each in model.named_modules() if not name_of(at, ""))
        of_transformers = transformers_conversions.is_of_transformers(inner)
        if of_transformers:
            every = [name for _, tied in by_tensor.values() for name in tied]
            convert = convert or partial(transformers_conversions.convert, inner, names=every)
            init_buffers = init_buffers or transformers_conversions.init_of(inner)
        opaque = {
            id(parameter)
            for unit in units_of(model)
            for param_group in unit.param_groups
            if param_group.never_cast
            for parameter in param_group.sharded_parameters
        }
        tracer = ViewTracer(in_files)
        available = tracer.tensors if convert is None else _converted(convert, tracer)
        rename = _renaming(names)
        used: dict[str, str] = {}
        for tensor, tied in by_tensor.values():
            if rename(tied[0]) is None:
                continue
            found = [name for name in filter(None, map(rename, tied)) if name in available]
            if found and id(tensor) in opaque:
                self.problems.append(
                    f"{tied[0]} is quantized, and its class alone knows what elements are: load "
                    "it before fully_shard(), and leave it out by names="
                )
            elif found:
                check_class(tied[0], tensor, "load it by load_state_dict()")
                self._add(tied[0], tensor, found[0], available[found[0]], tracer)
                self._compare_tied(tied[0], {name: available[name] for name in found}, tracer)
            elif tensor.is_meta and not self.strict:
                self.problems.append(f"{tied[0]} is on the meta device, and would get no values")
            else:
                self.missing.append(tied[0])
            for name in found:
                if used.setdefault(name, tied[0]) != tied[0]:
                    self.problems.append(f"names= gives {used[name]} and {tied[0]} the name {name}")
            if tensor.is_meta and not isinstance(tensor, DTensor):
                self.without_memory[tied[0]] = tensor
        self.unused = [name for name in available if name not in used]
        if of_transformers:
            self._leave_out_ignored(inner, {tied[0]: tensor for tensor, tied in by_tensor.values()})
        self._find_buffers(model, init_buffers)

    def _add(
        self, name: str, tensor: torch.Tensor, in_file: str, value: torch.Tensor, tracer: ViewTracer
    ) -> None:
        what = name if in_file == name else f"{name} ({in_file} in the files)"
        given, wanted = list(value.shape), list(tensor.shape)
        if given != wanted:
            self.problems.append(f"{what} has shape {given} in the files, {wanted} in the model")
        elif not _can_cast(value.dtype, tensor.dtype):
            self.problems.append(
                f"{what} is {value.dtype} in the files and {tensor.dtype} in the model: only "
                "floating-point values of 16 bits and more are cast"
            )
        else:
            outer = full_chunk(value.shape)
            try:
                self.pieces[name] = [
                    list(tracer.pieces(chunk.of(outer, value))) for chunk, _ in local_chunks(tensor)
                ]
            except ValueError as error:
                self.problems.append(f"{what}: {error}")

    def _compare_tied(
        self, name: str, values: Mapping[str, torch.Tensor], tracer: ViewTracer
    ) -> None:
        """Look whether ``values``, by name in the files, are equal. The model ties them: one."""
        (first, value), *others = values.items()
        for other, its in others:
            both = [tracer.whole(each) for each in (value, its)]
            if None in both or not same_bytes(*both):  # type: ignore[arg-type]
                self.problems.append(f"{name} is {first} and {other} in the files, which differ")

    def _leave_out_ignored(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        """Leave out names that a model of transformers says may be missing, or may be too many."""
        ignored = transformers_conversions.without_ignored
        unexpected, missing = (
            getattr(model, f"_keys_to_ignore_on_load_{kind}") for kind in ("unexpected", "missing")
        )
        self.unused = ignored(self.unused, unexpected)
        kept = set(ignored(self.missing, missing))
        self.missing = [name for name in self.missing if name in kept or weights[name].is_meta]

    def _find_buffers(
        self, model: nn.Module, init_buffers: Callable[[nn.Module], object] | None
    ) -> None:
        self._init_buffers = init_buffers
        for prefix, module in model.named_modules():
            buffers = {
                name: buffer
                for name, buffer in module._buffers.items()
                if name in module._non_persistent_buffers_set and buffer is not None
            }
            found = [name for name, buffer in buffers.items() if buffer.is_meta]
            if not found:
                continue
            self._to_init.append((prefix, module, found))
            self.without_memory |= {name_of(prefix, name): buffers[name] for name in found}
            if init_buffers is None:
                self.problems += [
                    f"{name_of(prefix, name)} is a buffer on the meta device that is in no state "
                    "dict: make it on a device, or give its values by init_buffers="
                    for name in found
                ]

    def initialize_buffers(self) -> None:
        """Give values to buffers that have got memory, and are in no state dict.

        Raises:
            RuntimeError: one got none.
        """
        for prefix, module, names in self._to_init:
            assert self._init_buffers is not None
            before = {name: _state(module, name) for name in names}
            self._init_buffers(module)
            if left := [name for name in names if _state(module, name) == before[name]]:
                raise RuntimeError(
                    f"init_buffers= gave no values to {name_of(prefix, left[0])}, which is in no "
                    "state dict: make it on a device, or give a function that does"
                )

    def compare(self, exchange: WeightExchange) -> tuple[list[str], list[str]]:
        """Return the names of weights that are missing on some rank, and of tensors in the files
        that no rank uses. Collective.

        Raises:
            ValueError: ranks have other files, or a rank cannot load them. Lists all problems.
        """
        # Weights are sent to replicas one by one, in this order.
        order = [*self.pieces] if self.broadcasts else []
        arguments = hash_of(self.strict, self.broadcasts, order)
        by_rank = exchange.gather(
            (self._digest, arguments, self.missing, self.unused, self.problems)
        )
        of_files, of_arguments, missing, unused, problems = zip(*by_rank, strict=True)
        found = list(dict.fromkeys(problem for of_rank in problems for problem in of_rank))
        for what, numbers in (("other files", of_files), ("other arguments", of_arguments)):
            found += [
                f"rank {exchange.global_rank(rank)} has {what} than rank {exchange.global_rank(0)}"
                for rank, number in enumerate(numbers)
                if number != numbers[0]
            ]
        lacking = list(dict.fromkeys(name for of_rank in missing for name in of_rank))
        unexpected = [name for name in unused[0] if all(name in of_rank for of_rank in unused)]
        if self.strict:
            found += [f"no file has {name}" for name in lacking]
            found += [f"the model has no {name}" for name in unexpected]
        if found:
            more = (
                f"\n  and {len(found) - _MAX_PROBLEMS} more" if len(found) > _MAX_PROBLEMS else ""
            )
            lines = "".join(f"\n  {problem}" for problem in found[:_MAX_PROBLEMS])
            raise ValueError(f"{exchange.what}: nothing was loaded:{lines}{more}")
        return lacking, unexpected


def _by_name(files: Iterable[SafetensorsFile]) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{name!r} is in {tensors[name].path} and in {file.path}")
            tensors[name] = tensor
    return tensors


def _converted(convert: Conversion, tracer: ViewTracer) -> Mapping[str, torch.Tensor]:
    with tracer:
        tensors = convert(dict(tracer.tensors))
    if not isinstance(tensors, Mapping):
        raise TypeError(f"convert= returned a {type(tensors).__name__}: return tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"convert= made {name!r} a {type(tensor).__name__}, and no tensor")
    return tensors


def _state(module: nn.Module, name: str) -> tuple[int, int]:
    buffer = module._buffers[name]
    return id(buffer), 0 if buffer is None else buffer._version


def _renaming(names: Names | Mapping[str, str] | None) -> Names:
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    patterns = [(re.compile(pattern), replacement) for pattern, replacement in names.items()]

    def rename(name: str) -> str:
        for pattern, replacement in patterns:
            name = pattern.sub(replacement, name)
        return name

    return rename


def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    return source == target or all(
        dtype.is_floating_point and dtype.itemsize > 1 for dtype in (source, target)
    )
