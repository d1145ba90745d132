"""Runs a program in a rank's process as one of the ways that are compared, and leaves what it saw.

``python -m fsdp_overlap.tools.comparison.program RUN.json`` is started by ``runs``, with the
variables that torchrun sets.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from fsdp_overlap import patch_fsdp2
from fsdp_overlap.engine.unit import Unit, unit_of
from fsdp_overlap.features.dtypes import described_dtypes
from fsdp_overlap.features.meta_init import UnwrittenParams
from fsdp_overlap.features.numerics import NumericsWarning
from fsdp_overlap.recording.recorder import Recorder
from fsdp_overlap.recording.steps import StepObserver, observing
from fsdp_overlap.tools.comparison.first_weights import (
    restore_first,
    restore_random,
    save_first,
    save_random,
)
from fsdp_overlap.tools.comparison.options import OursOptions
from fsdp_overlap.tools.comparison.replicated import replicate_instead
from fsdp_overlap.tools.emulator.cuda import as_cuda
from fsdp_overlap.tools.emulator.device import EmulatedDevice
from fsdp_overlap.tools.emulator.process_groups import real_nccl
from fsdp_overlap.tools.races.runner import Program, StepsDone
from fsdp_overlap.weights.model_weights import units_of, weights_of

WAYS = ("fsdp2", "ours", "replicated")


@dataclass(frozen=True)
class ProgramRun:
    """What a rank's process is to do.

    Attributes:
        way: one of ``WAYS``.
        recorded: how many steps are recorded; 0 in later rounds.
        timed: how many are timed after them, and after one that is neither.
        profiled: how many are profiled after these.
        folder: where results go.
        on_emulated_gpus: whether the program, which is written for GPUs, runs on emulated ones.
        first: the folder of the first run, whose first weights are taken.
    """

    program: Program
    way: str
    folder: Path
    recorded: int
    timed: int
    profiled: int
    seed: int
    on_emulated_gpus: bool = False
    keep: str | None = None
    first: Path | None = None
    options: Path | None = None

    @property
    def steps(self) -> int:
        return self.recorded + 1 + self.timed + self.profiled

    def write(self, path: Path) -> None:
        fields = {**asdict(self), "program": asdict(self.program)}
        path.write_text(json.dumps(fields, default=str), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ProgramRun:
        fields = json.loads(path.read_text(encoding="utf-8"))
        for name in ("folder", "first", "options"):
            # The program may change to another directory.
            fields[name] = None if fields[name] is None else Path(fields[name]).resolve()
        return cls(**fields | {"program": Program(**fields["program"])})


@dataclass
class RankResult:
    """What a rank has seen of its run. Times in seconds, memory in bytes.

    Attributes:
        steps: how many it has completed.
        losses: of each step, those of its backwards.
        seconds: of each timed step.
        host: the processor time of the main thread in each of them.
        peak: the most memory that tensors took in them, on a CPU that of the process.
        reserved: the most that the allocator of an accelerator had.
        units: how many modules were sharded, by which library.
        dtypes: the lines of a table of the dtypes of our units.
        notes: what else is worth knowing.
        error: why the program ended early.
    """

    rank: int
    ranks: int = 1
    device: str = "cpu"
    steps: int = 0
    losses: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    peak: int = 0
    reserved: int | None = None
    units: dict[str, int] = field(default_factory=dict)
    dtypes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    def write(self, folder: Path) -> None:
        path = result_path(folder, self.rank)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> RankResult:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def result_path(folder: Path, rank: int) -> Path:
    """Return where a rank leaves its result."""
    return folder / f"result-{rank}.json"


class _Measurement(StepObserver):
    """Records the first steps, times later ones, profiles the last, and ends the program."""

    def __init__(self, run: ProgramRun, result: RankResult) -> None:
        self._run, self._result = run, result
        self._recorder = Recorder(run.folder, run.recorded, run.keep)
        self._losses: list[list[torch.Tensor]] = []
        self._marks: list[tuple[float, float, Any]] = []
        self._profiler: profile | None = None
        self._has_first = False
        self._units: list[Unit] = []
        self._weights: dict[str, torch.Tensor] = {}
        """The first model's, as they are before it has run."""
        self._is_stepped = self._has_gradients = False

    # ---- Steps ----

    def begin_step(self, step: int) -> None:
        run, result = self._run, self._result
        result.steps, self._is_stepped, self._has_gradients = step, False, False
        self._recorder.begin_step(step)
        self._losses.append([])
        if step == 1:
            result.dtypes = described_dtypes(self._units)
            self._units = []
        if step == run.recorded:
            self.stop_following_modules()
            _reset_peak()
        first = run.recorded + 1
        if first <= step <= first + run.timed:
            self._marks.append((time.perf_counter(), time.thread_time(), _event()))
        if step == first + run.timed:
            result.peak, result.reserved = _peak()
            if run.profiled:
                self._begin_profile()
        elif self._profiler is not None:
            self._profiler.step()
        if step == run.steps:
            self._end_profile()
            raise StepsDone(0)

    def before_first_optimizer(self) -> None:
        """Be called before the first optimizer is made: when weights have been drawn, and before
        data are."""
        run, rank = self._run, self._result.rank
        if run.first is not None:
            self._result.notes += restore_random(run.first, rank)
        elif run.recorded:
            save_random(run.folder, rank)

    def before_any_forward(self, root: nn.Module) -> None:
        if not self._weights:
            self._weights = weights_of(root)
        self._recorder.before_any_forward(root)

    def before_forward(self, module: nn.Module, is_root: bool) -> None:
        if is_root and not self._has_first and any(True for _ in module.parameters()):
            self._has_first = True
            self._look(module)
            run, rank = self._run, self._result.rank
            if run.first is not None and not self._is_unwritten():
                self._result.notes += restore_first(self._weights, run.first, rank)
            elif run.first is None and run.recorded:
                save_first(self._weights, run.folder, rank)
            self._weights = {}
        self._recorder.before_forward(module, is_root)

    def after_forward(
        self, module: nn.Module, is_root: bool, inputs: Sequence[Any], output: Any
    ) -> None:
        self._recorder.after_forward(module, is_root, inputs, output)

    def before_backward(self, losses: Sequence[torch.Tensor]) -> None:
        self._has_gradients = True
        if self._losses:
            self._losses[-1] += [loss.detach().clone() for loss in losses if loss.numel() == 1]
        self._recorder.before_backward(losses)

    def before_optimizer(self, optimizer: Optimizer) -> None:
        self._recorder.before_optimizer(optimizer)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        self._is_stepped = True
        self._recorder.after_optimizer(optimizer)

    # ---- What is seen ----

    def _look(self, model: nn.Module) -> None:
        """Note how ``model`` was sharded."""
        counts = self._result.units
        self._units = units_of(model)
        for module in model.modules():
            if unit_of(module) is not None:
                counts["ours"] = counts.get("ours", 0) + 1
            elif isinstance(module, torch.distributed.fsdp.FullyShardedDataParallel):
                counts["fsdp1"] = counts.get("fsdp1", 0) + 1
            elif isinstance(module, _FSDP2_MODULE):
                counts["fsdp2"] = counts.get("fsdp2", 0) + 1

    def _is_unwritten(self) -> bool:
        """Return whether the first forward will say that weights were never written."""
        param_groups = [group for unit in self._units for group in unit.param_groups]
        fresh = [group for group in param_groups if group.init_hashes is not None]
        return bool(UnwrittenParams.unwritten(fresh))

    def _begin_profile(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)  # of bytes
        self._profiler.start()

    def _end_profile(self) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        traces = self._run.folder / "traces"
        traces.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(traces / f"rank-{self._result.rank}.json.gz"))

    def finish(self) -> None:
        """Read what was measured off the device."""
        result = self._result
        result.steps += (
            self._is_stepped or self._has_gradients
        )  # the last, before the program ended
        if self._has_gradients and not self._is_stepped:
            result.notes.append(
                "no torch.optim.Optimizer has stepped after the last backwards, which are one step"
            )
        if torch.cuda.is_available():
            result.device = torch.cuda.get_device_name()
        if dist.is_initialized():
            result.ranks = dist.get_world_size()
        with suppress(RuntimeError):  # of a device that failed
            self._recorder.close()
            result.losses = [[float(_local(loss)) for loss in each] for each in self._losses]
            for (then, host, begun), (now, host_now, ended) in zip(
                self._marks, self._marks[1:], strict=False
            ):
                seconds = now - then
                if begun is not None and ended is not None:
                    ended.synchronize()
                    seconds = begun.elapsed_time(ended) / 1e3
                result.seconds.append(seconds)
                result.host.append(host_now - host)
        if not result.peak:
            result.peak, result.reserved = _peak()


_FSDP2_MODULE = torch.distributed.fsdp.FSDPModule


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _event() -> Any:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _reset_peak() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # where the kernel has no such file
            Path("/proc/self/clear_refs").write_text("5")


def _peak() -> tuple[int, int | None]:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024, None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None


@contextmanager
def _as(run: ProgramRun, notes: list[str]) -> Iterator[None]:
    """Let what is imported within the ``with`` block shard in the way of ``run``. Note what does
    not run as on a GPU."""
    with ExitStack() as stack:
        if run.on_emulated_gpus:
            rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
            device = EmulatedDevice(device_type="cuda", index=rank)
            stack.enter_context(as_cuda(device, ranks))
            stack.enter_context(real_nccl())
            stack.callback(
                lambda: notes.extend(
                    f"{what}, called at {where}, is not as on a GPU"
                    for what, where in device.opaque.items()
                )
            )
        if run.way == "ours":
            options = OursOptions() if run.options is None else OursOptions.read(run.options)
            stack.enter_context(patch_fsdp2(**options.context))
            stack.enter_context(options.replacing())
        elif run.way == "replicated":
            stack.enter_context(replicate_instead())
        yield


@contextmanager
def _noting_warnings(notes: list[str]) -> Iterator[None]:
    """Add warnings about numerics to ``notes``, beside where they are shown."""
    show = warnings.showwarning

    def note(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, NumericsWarning):
            notes.append(str(message).rstrip("."))
        show(message, category, *args, **kwargs)

    with patch.object(warnings, "showwarning", note):
        yield


@contextmanager
def _before_the_first_optimizer(call: Callable[[], None]) -> Iterator[None]:
    made, is_first = Optimizer.__init__, True

    @wraps(made)
    def make(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            call()
        made(self, *args, **kwargs)

    with patch.object(Optimizer, "__init__", make):
        yield


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % (1 << 32))


def main() -> int:
    """Run what the file in the command line says. Return the exit status."""
    run = ProgramRun.read(Path(sys.argv[1]))
    result = RankResult(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    measurement = _Measurement(run, result)
    _seed(run.seed)
    with _as(run, result.notes):
        try:
            with (
                _noting_warnings(result.notes),
                _before_the_first_optimizer(measurement.before_first_optimizer),
                observing(measurement),
            ):
                run.program.run(lambda: None)
        except SystemExit as end:
            if end.code not in (None, 0):
                result.error = f"the program ended with exit status {end.code}"
        except Exception as error:
            traceback.print_exc()
            result.error = "".join(traceback.format_exception_only(error)).strip()
        measurement.finish()
    result.write(run.folder)
    sys.stdout.flush()
    if dist.is_initialized() and not result.error:
        with suppress(Exception):  # the program may have left it in any state
            dist.destroy_process_group()
    return int(result.error is not None)


if __name__ == "__main__":
    sys.exit(main())
