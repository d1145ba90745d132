"""Saving and loading a sharded model: throughput and memory, ours against FSDP2's.

Gloo ranks hold one model of about 200 million float32 parameters twice, sharded by each system,
every block a unit. Both save with `torch.distributed.checkpoint.save` into a new folder, synced to
the disk, and load in place with `load` what they saved themselves. FSDP2 uses torch's
`FileSystemWriter` and `FileSystemReader`. Ours uses `SafeFileSystemWriter` and
`SafeFileSystemReader`, which compares all checksums before it changes anything; ours is also loaded
by torch's reader, which compares none. All five take turns, round by round in the same processes.

*Time* is from a barrier to the end of the slowest rank, `state_dict()` included; throughput is the
size of the whole model over it. Loads find the files in the page cache, as they were just written:
they measure the software. Saves wait for the disk, so `--folder /dev/shm` is the one to look at for
what the software adds.

*Memory* is the peak of a rank's resident memory during one save or load above what it was before,
on the rank with most; files in the page cache do not count. Freed blocks of 64 KiB and more go back
to the system at once (MALLOC_MMAP_THRESHOLD_), so that none hides in what rested before.

Before anything is timed each reader must bring back every shard, bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bench
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

import fsdp_overlap
from fsdp_overlap.checkpoint import SafeFileSystemReader, SafeFileSystemWriter

SAVE_OURS, SAVE_FSDP2 = "save, ours", "save, FSDP2"
LOAD_OURS, LOAD_FSDP2 = "load, ours", "load, FSDP2"
LOAD_OURS_PLAIN = "load, ours by torch's reader"
COMPARED = {SAVE_OURS: SAVE_FSDP2, LOAD_OURS: LOAD_FSDP2, LOAD_OURS_PLAIN: LOAD_FSDP2}


class Block(nn.Module):
    """The parameters of a transformer block, 12 * width^2 and two norms; nobody computes here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


def build(blocks: int, width: int, shard: Callable[[nn.Module], Any]) -> nn.Sequential:
    """The same model on every rank and for every system, of which no two blocks are ever whole."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(blocks):
        block = Block(width)
        shard(block)
        model.append(block)
    shard(model)
    return model


class PeakMemory:
    """How far resident memory rises above what it is on entry: `nbytes`, known after the end.

    The kernel keeps the peak. Where it may not be reset, a thread looks once a millisecond.
    """

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).malloc_trim(0)
        self._done = threading.Event()
        self._watcher: threading.Thread | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
        except OSError:
            self._watcher = threading.Thread(target=self._watch)
            self._watcher.start()
        self._before = self._peak = _resident("VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._watcher is None:
            self._peak = _resident("VmHWM")
        else:
            self._done.set()
            self._watcher.join()
        self.nbytes = max(0, self._peak - self._before)

    def _watch(self) -> None:
        while not self._done.wait(1e-3):
            self._peak = max(self._peak, _resident("VmRSS"))


def _resident(field: str) -> int:
    """`field` of this process's status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Operation:
    """A save or a load of this rank; keeps the peak of each call, in bytes."""

    def __init__(self, run: Callable[[Path], None], folders: Callable[[], Path]) -> None:
        self._run, self._folders = run, folders
        self.peaks: list[int] = []

    def sample(self) -> float:
        """Seconds on this rank, all ranks starting together."""
        folder = self._folders()
        with PeakMemory() as peak:
            dist.barrier()
            start = time.perf_counter()
            self._run(folder)
            seconds = time.perf_counter() - start
        self.peaks.append(peak.nbytes)
        dist.barrier()
        return seconds


def saving(model: nn.Module, writer: type[dcp.FileSystemWriter]) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        dcp.save(model.state_dict(), storage_writer=writer(folder))

    return save


def loading(model: nn.Module, reader: type[dcp.FileSystemReader]) -> Callable[[Path], None]:
    def load(folder: Path) -> None:
        dcp.load(model.state_dict(), storage_reader=reader(folder))

    return load


def new_folders(parent: Path) -> Callable[[], Path]:
    """A new one in `parent` each time, the same on every rank; the one before is removed."""
    numbers = itertools.count()

    def next_folder() -> Path:
        dist.barrier()
        if dist.get_rank() == 0:
            for old in parent.glob("*"):
                shutil.rmtree(old)
        dist.barrier()
        return parent / str(next(numbers))

    return next_folder


def check(name: str, model: nn.Module, load: Callable[[Path], None], folder: Path) -> None:
    """Fails unless `load` brings back what was saved in `folder` and is in `model`."""
    shards = [parameter.detach().to_local() for parameter in model.parameters()]
    before = [shard.clone() for shard in shards]
    for shard in shards:
        shard.zero_()
    load(folder)
    if not all(map(torch.equal, shards, before)):
        _bench.fail(f"{name}: the model is not what was saved", code=1)


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times and the largest peaks."""
    _, world_size = _bench.join_ranks(timeout_s=args.timeout)
    mesh = init_device_mesh("cpu", (world_size,))
    ctx = fsdp_overlap.FsdpContext(mesh)
    ours = build(args.blocks, args.width, lambda module: fsdp_overlap.fully_shard(module, ctx))
    theirs = build(args.blocks, args.width, lambda module: fsdp2.fully_shard(module, mesh=mesh))
    folder = Path(args.folder)
    kept = {ours: folder / "ours", theirs: folder / "FSDP2"}
    saves = {
        SAVE_OURS: (ours, saving(ours, SafeFileSystemWriter)),
        SAVE_FSDP2: (theirs, saving(theirs, dcp.FileSystemWriter)),
    }
    loads = {
        LOAD_OURS: (ours, loading(ours, SafeFileSystemReader)),
        LOAD_FSDP2: (theirs, loading(theirs, dcp.FileSystemReader)),
        LOAD_OURS_PLAIN: (ours, loading(ours, dcp.FileSystemReader)),
    }
    for model, save in saves.values():
        save(kept[model])
    for name, (model, load) in loads.items():
        check(name, model, load, kept[model])

    folders = new_folders(folder / "saved")
    operations = {name: Operation(save, folders) for name, (_, save) in saves.items()}
    for name, (model, load) in loads.items():
        operations[name] = Operation(load, lambda saved=kept[model]: saved)
    with _bench.quiet_gc():
        seconds = _bench.alternate(
            {name: operation.sample for name, operation in operations.items()}, args.rounds, 1
        )
    mine = {
        name: {"seconds": seconds[name], "bytes": operation.peaks[-args.rounds :]}
        for name, operation in operations.items()
    }
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        _bench.report(
            {
                "numel": sum(parameter.numel() for parameter in ours.parameters()),
                "samples": {
                    name: {
                        unit: [
                            max(ranks)
                            for ranks in zip(*(e[name][unit] for e in everyone), strict=True)
                        ]
                        for unit in mine[name]
                    }
                    for name in mine
                },
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--folder",
        default=tempfile.gettempdir(),
        help="where to save, in a folder that is removed at the end; takes three checkpoints",
    )
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds, for the whole run")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    return parser.parse_args()


def show(args: argparse.Namespace, measured: dict[str, Any]) -> None:
    """Print the table and the ratios, and write the JSON report."""
    numel, samples = measured["numel"], measured["samples"]
    print(
        f"torch {torch.__version__}, {args.ranks} ranks, {args.blocks} blocks of "
        f"12*{args.width}^2, {numel / 1e6:.0f} million parameters in float32, in {args.folder}; "
        f"median of {args.rounds} rounds\n"
    )
    rows, medians = [], {}
    for name, units in samples.items():
        rate = [4 * numel / 1e9 / seconds for seconds in units["seconds"]]
        extra = [nbytes / 1e6 for nbytes in units["bytes"]]
        low, high = _bench.spread(rate)
        least, most = _bench.spread(extra)
        medians[name] = {unit: statistics.median(values) for unit, values in units.items()}
        rows.append(
            [
                name,
                f"{medians[name]['seconds']:.2f}",
                f"{statistics.median(rate):.2f}",
                f"{low:.2f}-{high:.2f}",
                f"{statistics.median(extra):.1f}",
                f"{least:.1f}-{most:.1f}",
            ]
        )
    header = ["", "s", "GB/s", "p10-p90", "extra MB a rank", "p10-p90"]
    print(_bench.markdown_table(header, rows), end="\n\n")
    ratios: dict[str, dict[str, float]] = {}
    for name, reference in COMPARED.items():
        ratios[name] = {
            unit: medians[name][unit] / max(medians[reference][unit], 1e-9)
            for unit in ("seconds", "bytes")
        }
        print(
            f"{name} / FSDP2: time {ratios[name]['seconds']:.2f}, memory "
            f"{ratios[name]['bytes']:.2f} ({medians[name]['bytes'] / 1e6:.1f} against "
            f"{medians[reference]['bytes'] / 1e6:.1f} MB); targets: at most 1.00"
        )
    _bench.write_json(
        args.json,
        {
            "torch": torch.__version__,
            "ranks": args.ranks,
            "blocks": args.blocks,
            "width": args.width,
            "numel": numel,
            "seconds": {name: _bench.summary(u["seconds"]) for name, u in samples.items()},
            "extra_bytes": {name: _bench.summary(u["bytes"]) for name, u in samples.items()},
            "ours_to_fsdp2": ratios,
        },
    )


def main() -> None:
    args = parse()
    if _bench.is_rank():
        return run_rank(args)
    with tempfile.TemporaryDirectory(prefix="fsdp_overlap_ckpt_", dir=args.folder) as folder:
        measured = _bench.launch_ranks(
            args.ranks,
            [*sys.argv[1:], f"--folder={folder}"],
            args.timeout,
            {"MALLOC_MMAP_THRESHOLD_": "65536"},
        )
    show(args, measured)


if __name__ == "__main__":
    main()
