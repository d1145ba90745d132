"""The link between simulated ranks (`simulated_ranks` says what these are): it fills and reads the
tensors of collectives, and takes the time that their bytes would need."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

BLOCKS = 32
THREADS = 512
RUNNING = 1024
"""More kernels than may run at once."""
WORDS = {
    8: "unsigned long long",
    4: "unsigned int",
    2: "unsigned short",
    1: "unsigned char",
}
"""What a thread copies at once, by bytes."""
GATHER, REDUCE = "ncclSimulatedAllGather", "ncclSimulatedReduceScatter"

KERNELS = Path(__file__).with_suffix(".cu").read_text()


Ranges = tuple[tuple[int, int], ...]
"""Of each rank, where its range begins and what it takes, in bytes."""


class Transfer(NamedTuple):
    """One collective. nbytes: that a rank receives or sends."""

    kind: str
    nbytes: int


class Link(ABC):
    """What carries the bytes of all simulated groups of this process.

    gigabytes_per_s: 1e9 bytes received by a rank in a second; None for no limit but memory.
    waiting_blocks: of a kernel's blocks, those that stay until its transfer ends, as NCCL's do.
    sent: what it carried; empty it at will.
    """

    def __init__(self) -> None:
        self.gigabytes_per_s: float | None = None
        self.waiting_blocks = 1
        self.sent: list[Transfer] = []

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, world_size: int) -> None:
        """Fills each of the `world_size` ranges of `full` with `shard`, which may be the first."""
        self.fill("all_gather", full.view(world_size, -1).unbind(), shard)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, world_size: int) -> None:
        """Reads all of `whole` and fills `own` with its first range."""
        self.read("reduce_scatter", own.view(-1), whole.view(world_size, -1).unbind())

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, world_size: int) -> None:
        """Takes the time of a ring all-reduce, and leaves `tensor` as it is."""

    @abstractmethod
    def fill(self, kind: str, ranges: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Fills each of `ranges`, of any sizes, with `source`, which may be the first."""

    @abstractmethod
    def read(self, kind: str, own: torch.Tensor, ranges: Sequence[torch.Tensor]) -> None:
        """Reads all `ranges`, of any sizes, and fills `own` with the first."""


class HostLink(Link):
    """A CPU's: the caller waits for the whole transfer."""

    def all_reduce(self, tensor: torch.Tensor, world_size: int) -> None:
        self._carry(_all_reduce(tensor, world_size), lambda: None)

    def fill(self, kind: str, ranges: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        def move() -> None:
            for target in ranges:
                target.view(-1).copy_(repeated(source, target.numel()))

        self._carry(_of_others(kind, ranges), move)

    def read(self, kind: str, own: torch.Tensor, ranges: Sequence[torch.Tensor]) -> None:
        self._carry(_of_others(kind, ranges), lambda: own.copy_(ranges[0]))

    def _carry(self, transfer: Transfer, move: Callable[[], object]) -> None:
        start = time.perf_counter()
        move()
        self.sent.append(transfer)
        rest = start + _seconds(transfer.nbytes, self.gigabytes_per_s) - time.perf_counter()
        if rest > 0:
            time.sleep(rest)


class CudaLink(Link):
    """A GPU's: kernels that share one word of its memory, the moment when the link is free."""

    def __init__(self) -> None:
        super().__init__()
        self._free_at = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._launches = 0
        self._over = torch.zeros(2 * RUNNING, dtype=torch.int32, device="cuda")
        self._tables: dict[tuple[Ranges, int], torch.Tensor] = {}
        self._kernels = {
            (name, size): compile_kernel(name, word)
            for name in (GATHER, REDUCE)
            for size, word in WORDS.items()
        }
        torch.cuda.synchronize()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, world_size: int) -> None:
        carried = full.nbytes - shard.nbytes
        self._launch(GATHER, full, shard, equal_ranges(shard.nbytes, world_size), carried)
        self.sent.append(Transfer("all_gather", carried))

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, world_size: int) -> None:
        carried = whole.nbytes - own.nbytes
        self._launch(REDUCE, whole, own, equal_ranges(own.nbytes, world_size), carried)
        self.sent.append(Transfer("reduce_scatter", carried))

    def all_reduce(self, tensor: torch.Tensor, world_size: int) -> None:
        transfer = _all_reduce(tensor, world_size)
        self._launch(REDUCE, tensor, tensor, equal_ranges(tensor.nbytes, 1), transfer.nbytes)
        self.sent.append(transfer)

    def fill(self, kind: str, ranges: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        self._carry(GATHER, _of_others(kind, ranges), ranges, source)

    def read(self, kind: str, own: torch.Tensor, ranges: Sequence[torch.Tensor]) -> None:
        self._carry(REDUCE, _of_others(kind, ranges), ranges, own)

    def _carry(
        self, name: str, transfer: Transfer, ranges: Sequence[torch.Tensor], own: torch.Tensor
    ) -> None:
        first = next((held for held in ranges if held.numel()), own)
        places = tuple(
            (held.data_ptr() - first.data_ptr(), held.nbytes) if held.numel() else (0, 0)
            for held in ranges
        )
        self._launch(name, first, own, places, transfer.nbytes)
        self.sent.append(transfer)

    def _launch(
        self, name: str, whole: torch.Tensor, own: torch.Tensor, ranges: Ranges, carried: int
    ) -> None:
        """Works on `ranges`, whose places are counted from `whole`, in one launch that lasts as
        long as `carried` bytes need."""
        longest = max(nbytes for _, nbytes in ranges)
        bits = whole.data_ptr() | own.data_ptr() | own.nbytes
        for offset, nbytes in ranges:
            bits |= offset | nbytes
        size = min(8, bits & -bits or 8)  # which divides all of them
        held, period = own.nbytes // size, longest // size
        if name == GATHER and held:
            period = held * -(-BLOCKS * THREADS // held)
        nanoseconds = round(_seconds(carried, self.gigabytes_per_s) * 1e9)
        if max(period, nanoseconds) >= 2**31:  # the kernels' arguments are C's int
            raise ValueError(
                f"a transfer of {carried} bytes at {self.gigabytes_per_s} GB/s is too long "
                "to simulate: use smaller units, or more gigabytes_per_s"
            )
        if not (longest or nanoseconds):
            return
        self._launches += 1
        over = self._over[2 * (self._launches % RUNNING) :]
        self._kernels[name, size](
            grid=(BLOCKS, 1, 1),
            block=(THREADS, 1, 1),
            args=[
                *(whole, own, self._free_at, over, self._table(ranges, size), len(ranges)),
                *(held, period, nanoseconds, self._launches, self.waiting_blocks),
            ],
        )

    def _table(self, ranges: Ranges, size: int) -> torch.Tensor:
        """The ranges in words, on the GPU, where they are copied once."""
        found = self._tables.get((ranges, size))
        if found is None:
            words = [(offset // size, nbytes // size) for offset, nbytes in ranges]
            found = torch.tensor(words, dtype=torch.int64, device=self._free_at.device)
            self._tables[ranges, size] = found
        return found


@cache
def compile_kernel(name: str, word: str) -> Callable[..., None]:
    """A kernel of `KERNELS` for this GPU; compiling takes no CUDA toolkit, only torch's NVRTC."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        # torch wants to know where a toolkit's headers are, none of which is included.
        cpp_extension.CUDA_HOME = "/usr"
    return torch.cuda._compile_kernel(KERNELS.replace("WORD", word), name)


@cache
def equal_ranges(nbytes: int, world_size: int) -> Ranges:
    return tuple((rank * nbytes, nbytes) for rank in range(world_size))


def repeated(held: torch.Tensor, numel: int) -> torch.Tensor:
    """What a rank holds in a range of `numel` elements, where this one holds `held`: flat."""
    held = held.reshape(-1)
    if not held.numel():
        return held.new_zeros(numel)
    return held.repeat(-(-numel // held.numel()))[:numel]


def _of_others(kind: str, ranges: Sequence[torch.Tensor]) -> Transfer:
    return Transfer(kind, sum(held.nbytes for held in ranges[1:]))


def _all_reduce(tensor: torch.Tensor, world_size: int) -> Transfer:
    """Sent twice as in a reduce-scatter: then the parts are gathered."""
    return Transfer("all_reduce", 2 * tensor.nbytes * (world_size - 1) // world_size)


def _seconds(nbytes: int, gigabytes_per_s: float | None) -> float:
    return nbytes / (gigabytes_per_s * 1e9) if gigabytes_per_s else 0.0
