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
WORDS = 1024
GATHER, REDUCE = "ncclSimulatedAllGather", "ncclSimulatedReduceScatter"

KERNELS = Path(__file__).with_suffix(".cu").read_text()


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
        # Two words for each of the kernels that may run at once, which are far fewer.
        self._over = torch.zeros(2 * WORDS, dtype=torch.int32, device="cuda")
        self._kernels = {
            (name, size): compile_kernel(name, word)
            for name in (GATHER, REDUCE)
            for size, word in ((8, "unsigned long long"), (1, "unsigned char"))
        }
        torch.cuda.synchronize()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, world_size: int) -> None:
        self.sent.append(Transfer("all_gather", full.nbytes - shard.nbytes))
        self._launch(GATHER, full, shard, shard.nbytes, world_size, self.sent[-1].nbytes)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, world_size: int) -> None:
        self.sent.append(Transfer("reduce_scatter", whole.nbytes - own.nbytes))
        self._launch(REDUCE, own, whole, own.nbytes, world_size, self.sent[-1].nbytes)

    def all_reduce(self, tensor: torch.Tensor, world_size: int) -> None:
        self.sent.append(_all_reduce(tensor, world_size))
        self._launch(REDUCE, tensor, tensor, tensor.nbytes, carried=self.sent[-1].nbytes)

    def fill(self, kind: str, ranges: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        self.sent.append(_of_others(kind, ranges))
        for index, target in enumerate(ranges):
            carried = target.nbytes if index else 0
            if not source.nbytes:
                self._launch(GATHER, target.zero_(), target, target.nbytes, 1, carried)
                continue
            copies, rest = divmod(target.nbytes, source.nbytes)
            self._launch(GATHER, target, source, source.nbytes, copies, carried)
            self._launch(
                GATHER, target.view(-1)[target.numel() - rest // target.itemsize :], source, rest
            )

    def read(self, kind: str, own: torch.Tensor, ranges: Sequence[torch.Tensor]) -> None:
        self.sent.append(_of_others(kind, ranges))
        self._launch(REDUCE, own, ranges[0], own.nbytes)
        for others in ranges[1:]:  # read, and written back as they are
            self._launch(REDUCE, others, others, others.nbytes, carried=others.nbytes)

    def _launch(
        self,
        name: str,
        target: torch.Tensor,
        source: torch.Tensor,
        nbytes: int,
        ranges: int = 1,
        carried: int = 0,
    ) -> None:
        """Works on `ranges` of `nbytes`, and lasts as long as `carried` bytes need."""
        addresses = target.data_ptr() | source.data_ptr() | nbytes
        size = 1 if addresses % 8 else 8
        nanoseconds = round(_seconds(carried, self.gigabytes_per_s) * 1e9)
        if max(nbytes // size, nanoseconds) >= 2**31:  # the kernels' arguments are C's int
            raise ValueError(
                f"a transfer of {carried} bytes at {self.gigabytes_per_s} GB/s is too long "
                "to simulate: use smaller units, or more gigabytes_per_s"
            )
        if not (nbytes or nanoseconds):
            return
        self._launches += 1
        words, over = nbytes // size, self._over[2 * (self._launches % WORDS) :]
        self._kernels[name, size](
            grid=(BLOCKS, 1, 1),
            block=(THREADS, 1, 1),
            args=[
                *(target, source, self._free_at, over, words, ranges, nanoseconds),
                *(self._launches, self.waiting_blocks),
            ],
        )


@cache
def compile_kernel(name: str, word: str) -> Callable[..., None]:
    """A kernel of `KERNELS` for this GPU; compiling takes no CUDA toolkit, only torch's NVRTC."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        # torch wants to know where a toolkit's headers are, none of which is included.
        cpp_extension.CUDA_HOME = "/usr"
    return torch.cuda._compile_kernel(KERNELS.replace("WORD", word), name)


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
