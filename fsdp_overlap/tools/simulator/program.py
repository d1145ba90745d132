"""Predict the steps of a program that is written for GPUs, as it is."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fsdp_overlap.patching import patch_fsdp2
from fsdp_overlap.tools.emulator.cuda import NotEmulated
from fsdp_overlap.tools.emulator.sites import line_of
from fsdp_overlap.tools.profiling import read_report
from fsdp_overlap.tools.races.runner import Program, StepsDone, explain
from fsdp_overlap.tools.races.testing import being_one_of
from fsdp_overlap.tools.simulator.clock import Clock, TimedOperation
from fsdp_overlap.tools.simulator.costs import Costs
from fsdp_overlap.tools.simulator.observed import ObservedCollective, ObservedDevice, traffic
from fsdp_overlap.tools.simulator.trace import TracedRange, marking, trace_of
from fsdp_overlap.tools.simulator.uncertainty import KNOWN
from fsdp_overlap.tools.torch_internals import drawing_without_bounds

STEPS = 4
"""The first one learns the order of units, the next ones are equal."""
_NOT_READS = {"barrier", "empty_cache", "synchronize", "Event.synchronize", "Stream.synchronize"}


class ProgramError(ValueError):
    """A program cannot be predicted; says why, and at which of its lines."""


@dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one kind, and the bytes of their full buffers."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class ProgramPrediction:
    """What a step of a program takes. The step is the last one that ran: from the end of its first
    optimizer's step to the end of the next.

    Args:
        world_size: the number of ranks.
        seconds: of the step.
        low: seconds of the step by the least of published ones, as a share of the predicted.
        high: the same by the most.
        exposed: seconds of communication in the step that compute did not hide.
        compute: seconds that compute would take in the step if nothing else ran.
        host_bound: seconds of the step in which compute waited for the host.
        allocated: the most bytes that tensors had at once after the first step.
        reserved: the most that the allocator had taken from the device, also while the model was
            built.
        collectives: those of the step by kind, as ``"all_gather"``.
        arriving: bytes that come to this rank in the step, within its node and from others.
        host_copies: bytes that the step copies between the host and the device, whose time is not
            predicted.
        seconds_of_steps: of all steps from the second one on. They differ where steps do.
        not_seen: what ran otherwise than on a GPU, as ``torch.compile``, and where it was called.
        trace: the step, as torch's profiler would have traced it.
    """

    world_size: int
    seconds: float
    low: float
    high: float
    exposed: float
    compute: float
    host_bound: float
    allocated: int
    reserved: int
    collectives: Mapping[str, CollectiveTotal]
    arriving: Mapping[str, float]
    host_copies: int
    seconds_of_steps: Sequence[float]
    not_seen: Mapping[str, str]
    trace: dict[str, Any]


def predict_program(
    program: Program, costs: Costs, gpus: int, *, ours: bool, steps: int = STEPS
) -> ProgramPrediction:
    """Predict a step of ``program``, which calls FSDP2's ``fully_shard``.

    It runs in a process of its own, as the first of ``gpus`` ranks, of which the others do not
    exist, on the slowest of their devices. Its tensors have no values: the host reads zeros, except
    of integers. What it prints goes to stderr.

    Args:
        program: what to run. It is ended after ``steps``, whatever its own ``steps``.
        costs: how long everything takes, and how memory is allocated. ``compiles`` is not for
            programs.
        gpus: the number of ranks, of which each has a device.
        ours: whether FSDP2's names give this library, as within ``patch_fsdp2()``.
        steps: how many steps of its optimizer run, if the program makes as many; at least 2.

    Raises:
        ProgramError: the program cannot run without values, calls what is not emulated, makes fewer
            than 2 steps, or fails for another reason.
        ValueError: wrong ``steps``, ``gpus`` or ``costs``.
    """
    if steps < 2 or gpus < 1:
        raise ValueError(f"steps={steps}, gpus={gpus}: use at least 2 steps and 1 GPU")
    if costs.compiles:
        raise ValueError("compiles=True: what a program compiles is not predicted; leave it out")
    # A process of its own, as modules that the program imports keep the names that they found.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _begin) as pool:
        running = pool.submit(predict_here, replace(program, steps=steps), costs, gpus, ours)
        try:
            return running.result()
        except BrokenProcessPool as error:
            raise ProgramError(f"{program.target}: its process was killed") from error


def _begin() -> None:
    torch.set_num_threads(1)
    os.dup2(2, 1)


class _Step(NamedTuple):
    """What ran between the ends of two steps of the optimizer."""

    seconds: float
    start: float
    end: float
    """When the host was there."""
    compute: float
    host_bound: float
    host_copies: int
    marks: Sequence[TracedRange]
    ran: Sequence[TimedOperation]
    backwards: Sequence[tuple[float, float]]
    collectives: Sequence[ObservedCollective]


class _Recorder:
    """Records the steps of a program on ``device``."""

    def __init__(self, device: ObservedDevice, clock: Clock, marks: list[TracedRange]) -> None:
        self.device, self.clock, self.marks = device, clock, marks
        self.seconds: list[float] = []
        self.last: _Step | None = None
        self.allocated = self.reserved = 0
        self._begun: tuple[float, float, float, int] | None = None

    def end_step(self) -> None:
        """Note that the optimizer has made a step."""
        device, clock, allocator = self.device, self.clock, self.device.allocator
        copied = device.copied_to_device + device.copied_to_host
        now = device.default.ends, device.host.ends, clock.computed, copied
        self.reserved = max(self.reserved, allocator.peak_reserved)
        if self._begun is None:
            allocator.count_peaks_anew()
        else:
            ends, start, computed, copied_before = self._begun
            self.seconds.append(now[0] - ends)
            self.last = _Step(
                seconds=self.seconds[-1],
                start=start,
                end=device.host.ends,
                compute=clock.computed - computed,
                host_bound=sum(stretch.waited for stretch in device.stretches),
                host_copies=copied - copied_before,
                # The optimizer's mark ends after this is called.
                marks=[mark for mark in self.marks if mark.start >= start],
                ran=list(clock.ran),
                backwards=list(device.backwards),
                collectives=list(device.collectives),
            )
            self.allocated = max(self.allocated, allocator.peak_allocated)
        self._begun = now
        for noted in (
            self.marks,
            clock.ran,
            device.backwards,
            device.collectives,
            device.stretches,
        ):
            noted.clear()


def predict_here(program: Program, costs: Costs, gpus: int, ours: bool) -> ProgramPrediction:
    """Predict in this process what :func:`predict_program` predicts in another one. ``program`` is
    ended after its own ``steps``.

    Raises:
        ProgramError: as :func:`predict_program`.
    """
    clock = Clock(costs, pace=costs.slowest(gpus))
    devices = min(gpus, costs.fabric.ranks_a_node)
    device = ObservedDevice(
        clock, costs.expandable_segments, device_type="cuda", keeps_integers=True
    )
    with (
        patch_fsdp2() if ours else nullcontext(),
        being_one_of(device, gpus, devices=devices),
        marking(device) as marks,
        drawing_without_bounds(),
    ):
        recorder = _Recorder(device, clock, marks)
        try:
            program.run(recorder.end_step)
        except StepsDone:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                status = f"{program.target} ended with exit status {end.code}"
                raise ProgramError(status) from end
        except Exception as error:  # whatever a program raises
            raise ProgramError(_why(program, device, error)) from error
    step = recorder.last
    if step is None:
        made = "made one step" if recorder.reserved else "made no step"
        raise ProgramError(
            f"{program.target} {made} of a torch.optim.Optimizer, and a step is predicted between "
            "the ends of two: let it make more steps"
        )
    return _prediction(step, recorder, costs, gpus)


def _prediction(step: _Step, recorder: _Recorder, costs: Costs, gpus: int) -> ProgramPrediction:
    marks = [*step.marks, TracedRange("ProfilerStep#0", step.start, step.end)]
    trace = trace_of(step.ran, marks, step.backwards, gpus)
    sizes: dict[str, list[int]] = {}
    for kind, _, nbytes in step.collectives:
        sizes.setdefault(kind, []).append(nbytes)
    return ProgramPrediction(
        world_size=gpus,
        seconds=step.seconds,
        low=step.seconds * KNOWN.least,
        high=step.seconds * KNOWN.most,
        exposed=read_report(trace, steps=1).ranks[0].exposed_time * 1e-6,
        compute=step.compute,
        host_bound=step.host_bound,
        allocated=recorder.allocated,
        reserved=recorder.reserved,
        collectives={kind: CollectiveTotal(len(of), sum(of)) for kind, of in sizes.items()},
        arriving=traffic(costs.fabric, step.collectives),
        host_copies=step.host_copies,
        seconds_of_steps=recorder.seconds,
        not_seen=recorder.device.opaque,
        trace=trace,
    )


def _why(program: Program, device: ObservedDevice, error: Exception) -> str:
    """Return why ``program`` cannot be predicted, and at which of its lines."""
    text = f"{program.target} cannot be predicted: {explain(error)}"
    if isinstance(error, NotEmulated):
        return text  # it names the line
    line = line_of(error)
    if line is not None and line.place not in text:
        text += f" ({line})"
    reads = [sync for sync in device.syncs if sync.operation not in _NOT_READS]
    if reads and "depends on a value" not in text:
        last = f"{reads[-1].operation} at {reads[-1].site.place}"
        text += f". Tensors have no values here: the host reads zeros, last by {last}"
    return text
