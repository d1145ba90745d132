"""Draws docs/step.svg: one training step of three blocks, as the schedule runs it on the emulated
device. ``--table`` prints what each hook commands, which docs/design.md explains line by line.

Times are made up: a matrix product takes 3 units of time, a collective 2, the optimizer 2, and the
host is busy for 0.4 with each hook and each operation. The order of commands, and what waits for
what, are the schedule's and the streams'."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.comm.comm_streams import DeviceCommStream, DeviceWorkHandle
from fsdp_overlap.tools.emulator import EmulatedDevice, Operation, fake_ranks, running, torch_module
from fsdp_overlap.tools.emulator.queues import Queue
from fsdp_overlap.tools.simulator.simulate import BACKEND

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "step.svg"
BLOCKS = 3
RANKS = 4
HOST = 0.4
SECONDS = {"mm": 3.0, "all_gather": 2.0, "reduce_scatter": 2.0, "all_reduce": 0.5, "adamw": 2.0}


# ---- Recording ----


@dataclass(frozen=True)
class Box:
    """Something that takes time in one row of the picture. ``number`` is that of the hook which has
    enqueued it, 0 if none has. The products of one backward are one box."""

    row: str
    text: str
    start: float
    end: float
    block: int
    number: int = 0


@dataclass
class Hook:
    """A hook that ran, and the commands that it gave, in their order."""

    name: str
    commands: list[str] = field(default_factory=list)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recorder:
    """Records what hooks command, and says how long operations take."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.boxes: list[Box] = []
        self.block = -1
        """The block whose forward or backward runs."""
        self.is_in_backward = False
        self.collective = -1
        """The block whose collective is being enqueued."""
        self.held: dict[tuple[str, int], float] = {}
        """Since when memory is held, by row and block."""

    # The emulated device's timing

    def on_host(self, operation: Operation) -> float:
        return HOST

    def end(self, operation: Operation, stream: Queue, enqueued: float, ready: float) -> float:
        kind = "adamw" if "adamw" in operation.name else operation.name
        end = ready + SECONDS.get(kind, 0.0)
        if end > ready:
            compute = "backward" if self.is_in_backward else "forward"
            row, text, block = {
                "mm": ("compute", f"{compute} {self.block}", self.block),
                "adamw": ("compute", "AdamW", -1),
                "all_gather": ("all-gather stream", f"gather {self.collective}", self.collective),
                "reduce_scatter": (
                    "reduce-scatter stream",
                    f"reduce {self.collective}",
                    self.collective,
                ),
                "all_reduce": ("reduce-scatter stream", "", -1),
            }[kind]
            if kind == "all_gather":
                self.held["full buffers", self.collective] = ready
            number = len(self.hooks) if row != "compute" else 0
            of_row = [at for at, box in enumerate(self.boxes) if box.row == row]
            if row == "compute" and of_row and self.boxes[of_row[-1]].text == text:
                self.boxes[of_row[-1]] = replace(self.boxes[of_row[-1]], end=end)
            else:
                self.boxes.append(Box(row, text, ready, end, block, number))
        return end

    # What the schedule commands

    def command(self, text: str) -> None:
        if self.hooks:
            self.hooks[-1].commands.append(text)

    def give_back(self, row: str, block: int, at: float) -> None:
        self.boxes.append(Box(row, f"{block}", self.held.pop((row, block)), at, block))


class RecordingStream(DeviceCommStream):
    def __init__(self, recorder: Recorder, start: torch_module.Event, device: torch.device) -> None:
        super().__init__(device)
        self._recorder = recorder
        self._start = start

    def enqueue(self, kind: str, label: str, *args: Any, **options: Any) -> Any:
        if label:
            self._recorder.collective = block_in(label)
            self._recorder.command(f"{kind.replace('_', '-')} {block_in(label)}")
        else:
            self._recorder.command("order check")
        work = super().enqueue(kind, label, *args, **options)
        vars(work)["name"] = f"{kind.replace('_', '-')} {block_in(label)}" if label else ""
        return work

    def free(self, label: str, buffer: Any, after: Any, waits: bool = True) -> None:
        self._recorder.command(f"free {block_in(label)}")
        super().free(label, buffer, after, waits)
        read = self._start.elapsed_time(after) / 1e3
        self._recorder.give_back("full buffers", block_in(label), read)


def block_in(label: str) -> int:
    """Return the block's number in a unit's label, such as ``blocks.1``."""
    return int(label.rpartition(".")[2])


@contextmanager
def watching(ctx: FsdpContext, device: EmulatedDevice, recorder: Recorder) -> Iterator[None]:
    """Record each hook of a block, and what it commands."""
    schedule, comm = ctx.schedule, ctx.comm_context
    names = {unit.index: unit.name for unit in ctx.units}

    def hook(name: str, block: int, run: Callable[[], Any]) -> Any:
        recorder.hooks.append(Hook(name))
        start = device.host.ends
        device.host.ends += HOST
        number = len(recorder.hooks)
        recorder.boxes.append(Box("host", "", start, device.host.ends, block, number))
        if block >= 0:
            recorder.block = block
        return run()

    def of_forward(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(unit: Any, *args: Any) -> Any:
            if not unit.has_parameters:  # the root
                return method(unit, *args)
            block = block_in(unit.name)
            return hook(f"{name} {block}", block, lambda: method(unit, *args))

        return run

    def before_backward(call: Any, method: Any = schedule.before_backward) -> Any:
        recorder.is_in_backward = True
        block = block_in(names[call.unit_index])
        return hook(f"gradient of output {block}", block, lambda: method(call))

    def end_backward(method: Any = schedule._end_backward) -> Any:
        return hook("end of backward", -1, method)

    def allocate_input(gradients: Any, method: Any = comm.allocate_input) -> None:
        block = block_in(gradients.param_group.label)
        recorder.held["reduce inputs", block] = device.default.ends
        method(gradients)

    def finish(gradients: Any, work: Any, method: Any = comm.finish) -> None:
        method(gradients, work)
        block = block_in(gradients.param_group.label)
        recorder.give_back("reduce inputs", block, device.default.ends)

    def wait(work: Any, method: Any = DeviceWorkHandle.wait) -> None:
        if name := vars(work).get("name"):
            recorder.command(f"wait for {name}")
        method(work)

    with (
        patch.object(
            schedule, "before_forward", of_forward("pre-forward", schedule.before_forward)
        ),
        patch.object(schedule, "after_forward", of_forward("post-forward", schedule.after_forward)),
        patch.object(schedule, "before_backward", before_backward),
        patch.object(schedule, "_end_backward", end_backward),
        patch.object(comm, "allocate_input", allocate_input),
        patch.object(comm, "finish", finish),
        patch.object(DeviceWorkHandle, "wait", wait),
    ):
        yield


def record() -> tuple[list[Hook], list[Box]]:
    """Train three steps, and return what the hooks of the third command, and what runs when."""
    recorder = Recorder()
    device = EmulatedDevice(timing=recorder)
    with fake_ranks(RANKS, BACKEND), running(device):
        start = torch_module.Event()
        start.record()  # at time 0
        model: Any = Model().to("emulated")
        ctx = FsdpContext(init_device_mesh("emulated", (RANKS,)))
        ctx.comm_stream_factory = lambda name, on: RecordingStream(recorder, start, on)
        for block in model.blocks:
            fully_shard(block, ctx)
        fully_shard(model, ctx)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        inputs = torch.ones(8, 64, device="emulated")

        def step() -> None:
            recorder.is_in_backward = False
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        torch.accelerator.synchronize()
        recorder.boxes.clear()
        begun = device.host.ends
        with watching(ctx, device, recorder):
            step()
    assert not device.findings
    return recorder.hooks, [
        replace(box, start=round(box.start - begun, 2), end=round(box.end - begun, 2))
        for box in recorder.boxes
    ]


# ---- Drawing ----

LEFT, TOP, UNIT = 150, 34, 26.5
HEIGHT, THIN = 24, 13
ROWS = {  # where each begins, and how high a box is
    "host": (TOP, 16),
    "compute": (TOP + 36, HEIGHT),
    "all-gather stream": (TOP + 78, HEIGHT),
    "reduce-scatter stream": (TOP + 120, HEIGHT),
    "full buffers": (TOP + 162, THIN),
    "reduce inputs": (TOP + 222, THIN),
}
END = TOP + 222 + BLOCKS * (THIN + 3)
LABELS = {"host": "host: hooks", "compute": "compute stream"}
STYLE = """
  .page { fill: #ffffff } .label { fill: #24292f } .faint { fill: #57606a }
  .line { stroke: #d0d7de } .b0 { fill: #3b6ea5 } .b1 { fill: #1a7f5a } .b2 { fill: #99407f }
  .other { fill: #6e7781 } text { font: 12px sans-serif } .in { fill: #ffffff }
  .small { font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .label { fill: #e6edf3 } .faint { fill: #9198a1 }
    .line { stroke: #3d444d }
  }
"""


def svg(boxes: list[Box]) -> str:
    """Return the picture. It brings its own background, so it can be read on any page."""
    width = round(LEFT + UNIT * max(box.end for box in boxes) + 12)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {END + 12}" role="img">',
        "<title>One training step of three blocks</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{END + 12}"/>',
    ]
    for row, (top, height) in ROWS.items():
        middle = top + height // 2 + 4
        if row not in ("full buffers", "reduce inputs"):
            lines.append(f'<path class="line" d="M{LEFT} {top + height}.5H{width - 12}"/>')
        lines.append(text_at(LEFT - 10, middle, LABELS.get(row, row), "label", "end"))
    backward = min(box.start for box in boxes if box.text.startswith("backward"))
    last = max(box.end for box in boxes if box.text.startswith("backward"))
    for name, start in (("forward", 0.0), ("backward", backward), ("end of backward", last)):
        lines.append(text_at(x_of(start), 16, name, "faint"))
        lines.append(f'<path class="line" d="M{x_of(start):g} 22V{END}" stroke-dasharray="2 3"/>')
    lines += itertools.chain.from_iterable(map(drawn, boxes))
    return "\n".join([*lines, "</svg>", ""])


def drawn(box: Box) -> Iterator[str]:
    top, height = ROWS[box.row]
    if box.row in ("full buffers", "reduce inputs"):
        top += box.block * (THIN + 3)
    left, right = x_of(box.start), x_of(box.end)
    color = f"b{box.block}" if box.block >= 0 else "other"
    yield (
        f'<rect class="{color}" x="{left:g}" y="{top}" width="{round(right - left - 1, 1):g}" '
        f'height="{height}" rx="2"/>'
    )
    middle = round((left + right - 1) / 2, 1)
    if box.row == "host":
        yield text_at(middle, top - 4, f"{box.number}", "label", "middle", "small")
    elif box.text:
        yield text_at(middle, top + height // 2 + 4, box.text, "in", "middle", "small")
        if box.number:
            yield text_at(left, top - 3, f"{box.number}", "label", "start", "small")


def text_at(
    x: float, y: float, text: str, color: str, anchor: str = "start", size: str = ""
) -> str:
    classes = f"{color} {size}".strip()
    return f'<text class="{classes}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def x_of(time: float) -> float:
    return round(LEFT + UNIT * time, 1)


def main() -> None:
    hooks, boxes = record()
    if "--table" in sys.argv:
        for number, hook in enumerate(hooks, 1):
            print(f"| {number} | {hook.name} | {', '.join(hook.commands) or 'none'} |")
    else:
        PICTURE.write_text(svg(boxes))


if __name__ == "__main__":
    main()
