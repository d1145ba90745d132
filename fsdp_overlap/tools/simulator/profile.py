"""Measured times of operations, from a trace of torch's profiler.

The trace needs shapes: ``torch.profiler.profile(record_shapes=True)``. Of a GPU, what an operation
took are its kernels; of a CPU, the operation itself.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from fsdp_overlap.tools.emulator.dispatch import tensors_in
from fsdp_overlap.tools.profiling.events import events_of, has_possible_duration, load_trace
from fsdp_overlap.tools.simulator.compute_time import flops_of
from fsdp_overlap.tools.simulator.tables import HardwareError

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
"""Those of all tensors among the arguments, also of those in lists, in their order."""
Dtypes = tuple[torch.dtype | None, ...]
"""Theirs. ``None`` where the trace does not tell."""
Tensors = tuple[Shapes, Dtypes]

# Longer pauses between operations are not the host's work: it sleeps, or waits for something.
LONGEST_GAP_US = 1000.0
# The share of a model's elements that may be of matrices whose shape a trace of it does not have.
UNMEASURED = 0.01
DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "long int": torch.int64,
    "int": torch.int32,
}


class _WithoutShapes(Exception):
    pass


class MeasuredOperation(NamedTuple):
    """What an operation on tensors of these shapes took."""

    shapes: Shapes
    dtypes: Dtypes
    seconds: float


@dataclass(frozen=True)
class Profile:
    """What operations took.

    Args:
        calls: by the name of the operator, such as ``"aten::mm"``.
        host_seconds: what the host took for an operation beside these.
    """

    calls: Mapping[str, Sequence[MeasuredOperation]]
    host_seconds: float

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return the operations of a trace.

        Raises:
            HardwareError: the file is no trace, or one without shapes.
        """
        path = Path(path)
        try:
            return cls._of(events_of(load_trace(path)))
        except _WithoutShapes:
            raise HardwareError(
                f"{path} has no shapes of operations: profile with record_shapes=True"
            ) from None
        except Exception as error:  # there are many ways not to be a trace
            kind = type(error).__name__
            raise HardwareError(f"{path} cannot be read as a trace: {kind}: {error}") from error

    @classmethod
    def _of(cls, events: Iterable[Mapping[str, Any]]) -> Self:
        spans = [
            event
            for event in events
            if event.get("ph") == "X" and "args" in event and has_possible_duration(event)
        ]
        operators = [
            span
            for span in spans
            if span.get("cat") == "cpu_op" and span["name"].startswith("aten::")
        ]
        measured = [span for span in operators if "Input Dims" in span["args"]]
        if not measured:
            raise _WithoutShapes
        kernels = _of_kernels(spans)
        found: dict[str, dict[Tensors, list[float]]] = defaultdict(lambda: defaultdict(list))
        taken = _of_operators(operators, kernels) if kernels else None
        for span in measured:
            seconds = 1e-6 * span["dur"] if taken is None else taken[id(span)]
            found[span["name"]][_tensors_of(span)].append(seconds)
        calls = {
            name: [
                MeasuredOperation(shapes, dtypes, statistics.median(each))
                for (shapes, dtypes), each in by_tensors.items()
            ]
            for name, by_tensors in found.items()
        }
        return cls(calls, _gaps(operators))

    def check_model(self, model: nn.Module) -> None:
        """Check that the trace may be one of ``model``, or of one that differs in depth alone.

        Raises:
            HardwareError: it has no operation on matrices of the shape of some of the model's, or
                linear layers of shapes that the model has not.
        """
        measured = {
            _sides(each) for calls in self.calls.values() for c in calls for each in c.shapes
        }
        matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
        # Experts may be multiplied one by one.
        shapes = {_sides(shape) for p in matrices.values() for shape in (p.shape, p.shape[-2:])}
        embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        # Compiled models read embeddings within kernels, which say no shapes.
        missing = {
            name: p
            for name, p in matrices.items()
            if p not in embeddings and _sides(p.shape) not in measured
        }
        size = sum(p.numel() for p in matrices.values())
        if sum(p.numel() for p in missing.values()) > UNMEASURED * size:
            name, shape = next((name, list(p.shape)) for name, p in missing.items())
            raise HardwareError(
                "the profile is of another model: none of its operations has a matrix of the "
                f"shape {shape}, as {name} is; profile a step of this model"
            )
        for call in self.calls.get("aten::linear", ()):
            if len(call.shapes) > 1 and _sides(call.shapes[1]) not in shapes:
                raise HardwareError(
                    "the profile is of another model: it has a linear layer of the shape "
                    f"{list(call.shapes[1])}, which this one has not; profile a step of this model"
                )

    def seconds_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
        """Return what ``func(*args, **kwargs)`` takes, an ``OpOverload``: as measured with these
        shapes, and with these dtypes if there are such, or in proportion to the nearest shapes that
        were. ``None`` if the operator was not measured at all."""
        known = self.calls.get(func._schema.name)
        if not known:
            return None
        tensors = tensors_in([*args, *kwargs.values()])
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if same := [call for call in known if call.shapes == shapes]:
            dtypes = [tensor.dtype for tensor in tensors]
            same_dtypes = [call for call in same if _may_be(call.dtypes, dtypes)]
            return max(call.seconds for call in same_dtypes or same)
        work = _work(func, tensors)

        def distance(call: MeasuredOperation) -> float:
            return abs(math.log(max(1.0, work) / max(1.0, _work_of_call(func, call))))

        nearest = min(known, key=distance)
        return nearest.seconds * work / max(1.0, _work_of_call(func, nearest))


def _sides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return what is equal for a matrix, or stacked ones, and what is transposed of it."""
    return tuple(sorted(shape))


def _may_be(traced: Dtypes, dtypes: Sequence[torch.dtype]) -> bool:
    return all(one in (None, other) for one, other in zip(traced, dtypes, strict=True))


def _of_operators(
    operators: Iterable[Mapping[str, Any]], kernels: Mapping[Any, float]
) -> dict[int, float]:
    """Return the seconds of each operator's kernels, by the ``id()`` of its span. Those of
    operators that it has called are its own too."""
    seconds: dict[int, float] = {}
    open_on: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for span in sorted(operators, key=lambda span: (span["ts"], -span["dur"])):
        calling = open_on[span["tid"]]
        while calling and calling[-1]["ts"] + calling[-1]["dur"] <= span["ts"]:
            calling.pop()
        calling.append(span)
        seconds[id(span)] = 0.0
        for each in calling:
            seconds[id(each)] += kernels.get(span["args"].get("External id"), 0.0)
    return seconds


def _of_kernels(spans: Iterable[Mapping[str, Any]]) -> dict[Any, float]:
    """Return the seconds of the kernels of each operation, by its id."""
    seconds: dict[Any, float] = defaultdict(float)
    for span in spans:
        if span.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            seconds[span["args"].get("External id")] += 1e-6 * span["dur"]
    return seconds


def _gaps(operators: Sequence[Mapping[str, Any]]) -> float:
    """Return what passes between one operation and the next on its thread, on average."""
    gaps: list[float] = []
    ends: dict[Any, float] = {}
    for span in sorted(operators, key=lambda span: span["ts"]):
        last = ends.get(span["tid"])
        if last is not None and span["ts"] >= last:
            gaps.append(span["ts"] - last)
        ends[span["tid"]] = max(last or 0.0, span["ts"] + span["dur"])
    short = [gap for gap in gaps if gap < LONGEST_GAP_US]
    return 1e-6 * statistics.mean(short) if short else 0.0


def _tensors_of(span: Mapping[str, Any]) -> Tensors:
    shapes: list[Shape] = []
    dtypes: list[torch.dtype | None] = []
    for dims, kind in zip(span["args"]["Input Dims"], span["args"]["Input type"], strict=True):
        if kind == "TensorList":
            shapes += map(tuple, dims)
            dtypes += [None] * len(dims)
        elif kind not in ("", "Scalar", "ScalarList", "GenericList"):
            shapes.append(tuple(dims))
            dtypes.append(DTYPES.get(kind))
    return tuple(shapes), tuple(dtypes)


def _work_of_call(func: Any, call: MeasuredOperation) -> float:
    tensors = [
        torch.empty(shape, dtype=dtype or torch.float32, device="meta")
        for shape, dtype in zip(call.shapes, call.dtypes, strict=True)
    ]
    return _work(func, tensors)


def _work(func: Any, tensors: Sequence[torch.Tensor]) -> float:
    """Return FLOPs of products, and bytes of all else."""
    try:
        flops = flops_of(func, tensors, {}, None)
    except (AttributeError, TypeError, ValueError, IndexError, AssertionError):
        flops = 0.0  # an operation that has other arguments between its tensors
    return flops or float(sum(tensor.nbytes for tensor in tensors))
