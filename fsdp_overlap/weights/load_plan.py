"""Plan which parts of files a rank reads, and find where files and the model differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fsdp_overlap.checkpoint.files import CheckpointError
from fsdp_overlap.weights import transformers_conversions
from fsdp_overlap.weights.exchange import WeightExchange, hash_of
from fsdp_overlap.weights.file_views import FilePiece, ViewTracer
from fsdp_overlap.weights.model_weights import Names, named_weights, refuse_subclass
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
    """What this rank reads: the pieces of each weight by its name in the model. ``strict``: whether
    missing and unexpected names are problems."""

    strict: bool
    files: list[SafetensorsFile] = field(default_factory=list)
    pieces: dict[str, list[FilePiece]] = field(default_factory=dict)
    modules_to_init: list[nn.Module] = field(default_factory=list)
    """Those with buffers that get memory, and no values from files."""
    init_buffers: Callable[[nn.Module], object] | None = None
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

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
        by_tensor: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, tensor in named_weights(model):
            by_tensor.setdefault(id(tensor), (tensor, []))[1].append(name)
        of_transformers = transformers_conversions.is_of_transformers(model)
        if of_transformers:
            every = [name for _, tied in by_tensor.values() for name in tied]
            convert = convert or partial(transformers_conversions.convert, model, names=every)
            init_buffers = init_buffers or model._init_weights  # type: ignore[assignment]
        tracer = ViewTracer(in_files)
        available: Mapping[str, torch.Tensor] = tracer.tensors
        if convert is not None:
            with tracer:
                available = convert(dict(tracer.tensors))
        rename = _renaming(names)
        used: set[str] = set()
        for tensor, tied in by_tensor.values():
            if rename(tied[0]) is None:
                continue
            found = [name for name in filter(None, map(rename, tied)) if name in available]
            used.update(found)
            if found:
                refuse_subclass(tied[0], tensor, "load it by load_state_dict()")
                self._add(tied[0], tensor, found[0], available[found[0]], tracer)
            elif tensor.is_meta and not self.strict:
                self.problems.append(f"{tied[0]} is on the meta device, and would get no values")
            else:
                self.missing.append(tied[0])
        self.unused = [name for name in available if name not in used]
        if of_transformers:
            self._leave_out_ignored(model, {tied[0]: tensor for tensor, tied in by_tensor.values()})
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
            try:
                self.pieces[name] = list(tracer.pieces(value))
            except ValueError as error:
                self.problems.append(f"{what}: {error}")

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
        self.init_buffers = init_buffers
        for prefix, module in model.named_modules():
            for name in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(name)
                if buffer is None or not buffer.is_meta:
                    continue
                if module not in self.modules_to_init[-1:]:
                    self.modules_to_init.append(module)
                if init_buffers is None:
                    self.problems.append(
                        f"{prefix}.{name} is a buffer on the meta device that is in no state dict: "
                        "make it on a device, or give its values by init_buffers="
                    )

    def compare(self, exchange: WeightExchange) -> tuple[list[str], list[str]]:
        """Return the names of weights that are missing on some rank, and of tensors in the files
        that no rank uses. Collective.

        Raises:
            ValueError: ranks have other files, or a rank cannot load them. Lists all problems.
        """
        files = hash_of(
            [
                (one.name, one.dtype, one.shape)
                for file in self.files
                for one in file.tensors.values()
            ]
        )
        by_rank = exchange.gather((files, self.missing, self.unused, self.problems))
        hashes, missing, unused, problems = zip(*by_rank, strict=True)
        found = list(dict.fromkeys(problem for of_rank in problems for problem in of_rank))
        found += [
            f"rank {exchange.global_rank(rank)} has other files than rank {exchange.global_rank(0)}"
            for rank, its in enumerate(hashes)
            if its != hashes[0]
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
