"""Many ranks on one device: a process group whose other ranks are made up.

    link = simulated_ranks.start("cuda", world_size=8)
    link.gigabytes_per_s = 100.0

makes this process rank 0 of 8 for all of `torch.distributed`, device meshes and new groups
included, so that any system shards over 8 ranks as it would. Collectives run on the caller's
current stream, as NCCL's do, and never make the host wait for a GPU.

**Values.** Every rank is taken to hold what this one holds. So an all-gather fills each range of
its output with a copy of this rank's shard, the mean of gradients is this rank's own range of them,
the sum `world_size` times it. Where all ranks have one batch, that is the training of a real model:
the one whose weights repeat from shard to shard. Losses and gradients can be compared with it
unsharded. After an optimizer's step they no longer can: the other ranks' gradients differ.

Ranges of a list may have different sizes. Then a rank holds what this one holds, cut to its own
size, or again and again until that is full: `repeated(range, numel)`; zeros where this one holds
nothing. All-gathers of lists fill their ranges so, and all-to-alls, in which every rank sends here
what this one sends to itself. A reduce-scatter gives this rank's own range of a list too. What is
gathered in two steps (kept parts, divided copies) differs from what is gathered in one unless all
ranges are equal. A broadcast leaves what is there, so `full_tensor()` has this rank's range alone.

**Time.** A collective lasts as long as `link.gigabytes_per_s` needs for the bytes that a rank
receives, `(world_size - 1) / world_size` of the whole where ranges are equal, and longer only where
this device's memory is slower than that. Two rules keep that honest:

- All groups share one link. Transfers that are ready at the same time take turns on it, first come
  first served, whatever group or stream they belong to: a second group gains no bandwidth.
- A group runs one collective at a time, in the order in which they were issued, as a communicator
  does.

What is not simulated: a slower rank, the latency of a message, and the multiprocessors that NCCL
keeps busy for as long as it waits (`BLOCKS` copy; then one waits).

On a GPU a collective is one kernel, and one or two for each range of a list, one after the other. A
kernel copies and then watches the GPU's own nanosecond clock.
Clocks of multiprocessors, which `torch.cuda._sleep` counts, slow down under load. Its name begins
with `nccl`, by which traces know a collective. On a CPU it takes the caller's time, by sleeping:
good for trying out what uses it, not for saying anything about overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

BACKEND = "simulated"

# Of equal tensors these are the tensor.
SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)

BLOCKS = 32
THREADS = 512

# WORD is what a thread copies at once, in gather and reduce. Rank 0 is us: the own range is first.
KERNELS = r"""
__device__ __forceinline__ unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// Takes the link for `length` from when it is free; returns when that ends.
__device__ __forceinline__ unsigned long long take(unsigned long long* link, int length) {
    unsigned long long seen = *(volatile unsigned long long*)link, start, found;
    while (true) {
        const unsigned long long moment = now();
        start = seen > moment ? seen : moment;
        found = atomicCAS(link, seen, start + length);
        if (found == seen) return start + length;
        seen = found;
    }
}

extern "C" __global__ void ncclSimulatedAllGather(
    WORD* full, const WORD* shard, unsigned long long* link, int words, int world, int nanoseconds
) {
    const bool watches = blockIdx.x == 0 && threadIdx.x == 0;
    const unsigned long long end = watches && nanoseconds ? take(link, nanoseconds) : 0;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
        const WORD word = shard[i];
        for (int rank = 0; rank < world; ++rank) full[(long long)rank * words + i] = word;
    }
    if (watches) while (now() < end) {}
}

extern "C" __global__ void ncclSimulatedReduceScatter(
    WORD* own, const WORD* whole, unsigned long long* link, int words, int world, int nanoseconds
) {
    const bool watches = blockIdx.x == 0 && threadIdx.x == 0;
    const unsigned long long end = watches && nanoseconds ? take(link, nanoseconds) : 0;
    const long long step = (long long)gridDim.x * blockDim.x;
    WORD others = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
        for (int rank = 1; rank < world; ++rank) others ^= whole[(long long)rank * words + i];
        own[i] = whole[i];
    }
    // Never so, which the compiler cannot know: what is read of the others must not be left out.
    if (nanoseconds < 0) own[0] = others;
    if (watches) while (now() < end) {}
}
"""


class Transfer(NamedTuple):
    """One collective. nbytes: that a rank receives or sends."""

    kind: str
    nbytes: int


class Link(Protocol):
    """What carries the bytes of all simulated groups of this process.

    gigabytes_per_s: 1e9 bytes received by a rank in a second; None for no limit but memory.
    sent: what it carried; empty it at will.
    """

    gigabytes_per_s: float | None
    sent: list[Transfer]

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, world_size: int) -> None:
        """Fills each of the `world_size` ranges of `full` with `shard`, which may be the first."""
        ...

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, world_size: int) -> None:
        """Reads all of `whole` and fills `own` with its first range."""
        ...

    def fill(self, kind: str, ranges: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Fills each of `ranges`, of any sizes, with `source`, which may be the first."""
        ...

    def read(self, kind: str, own: torch.Tensor, ranges: Sequence[torch.Tensor]) -> None:
        """Reads all `ranges`, of any sizes, and fills `own` with the first."""
        ...


class HostLink:
    """A CPU's: the caller waits for the whole transfer."""

    def __init__(self) -> None:
        self.gigabytes_per_s: float | None = None
        self.sent: list[Transfer] = []

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, world_size: int) -> None:
        self.fill("all_gather", full.view(world_size, -1).unbind(), shard)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, world_size: int) -> None:
        self.read("reduce_scatter", own.view(-1), whole.view(world_size, -1).unbind())

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


class CudaLink:
    """A GPU's: kernels that share one word of its memory, the moment when the link is free."""

    def __init__(self) -> None:
        self.gigabytes_per_s: float | None = None
        self.sent: list[Transfer] = []
        self._free_at = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._kernels = {
            (name, size): compile_kernel(name, word)
            for name in ("ncclSimulatedAllGather", "ncclSimulatedReduceScatter")
            for size, word in ((8, "unsigned long long"), (1, "unsigned char"))
        }
        torch.cuda.synchronize()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, world_size: int) -> None:
        self.sent.append(Transfer("all_gather", full.nbytes - shard.nbytes))
        self._gather(full, shard, shard.nbytes, world_size, self.sent[-1].nbytes)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, world_size: int) -> None:
        self.sent.append(Transfer("reduce_scatter", whole.nbytes - own.nbytes))
        self._reduce(own, whole, own.nbytes, world_size, self.sent[-1].nbytes)

    def fill(self, kind: str, ranges: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        self.sent.append(_of_others(kind, ranges))
        for index, target in enumerate(ranges):
            carried = target.nbytes if index else 0
            if not source.nbytes:
                self._gather(target.zero_(), target, target.nbytes, 1, carried)
                continue
            copies, rest = divmod(target.nbytes, source.nbytes)
            self._gather(target, source, source.nbytes, copies, carried)
            self._gather(target.view(-1)[target.numel() - rest // target.itemsize :], source, rest)

    def read(self, kind: str, own: torch.Tensor, ranges: Sequence[torch.Tensor]) -> None:
        self.sent.append(_of_others(kind, ranges))
        self._reduce(own, ranges[0], own.nbytes)
        for others in ranges[1:]:  # read, and written back as they are
            self._reduce(others, others, others.nbytes, carried=others.nbytes)

    def _gather(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        nbytes: int,
        copies: int = 1,
        carried: int = 0,
    ) -> None:
        self._launch("ncclSimulatedAllGather", target, source, nbytes, copies, carried)

    def _reduce(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        nbytes: int,
        ranks: int = 1,
        carried: int = 0,
    ) -> None:
        self._launch("ncclSimulatedReduceScatter", target, source, nbytes, ranks, carried)

    def _launch(
        self,
        name: str,
        target: torch.Tensor,
        source: torch.Tensor,
        nbytes: int,
        world_size: int,
        carried: int,
    ) -> None:
        """Works on `world_size` ranges of `nbytes`, and lasts as long as `carried` bytes need."""
        addresses = target.data_ptr() | source.data_ptr() | nbytes
        size = 1 if addresses % 8 else 8
        nanoseconds = round(_seconds(carried, self.gigabytes_per_s) * 1e9)
        if max(nbytes // size, nanoseconds) >= 2**31:  # the kernels' arguments are C's int
            raise ValueError(
                f"a transfer of {carried} bytes at {self.gigabytes_per_s} GB/s is too long "
                "to simulate: use smaller units, or more gigabytes_per_s"
            )
        if nbytes or nanoseconds:
            self._kernels[name, size](
                grid=(BLOCKS, 1, 1),
                block=(THREADS, 1, 1),
                args=[target, source, self._free_at, nbytes // size, world_size, nanoseconds],
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


def _seconds(nbytes: int, gigabytes_per_s: float | None) -> float:
    return nbytes / (gigabytes_per_s * 1e9) if gigabytes_per_s else 0.0


class SimulatedGroup(dist.ProcessGroup):
    """Rank 0 of `world_size` ranks, most of which are made up."""

    def __init__(self, rank: int, world_size: int, link: Link) -> None:
        super().__init__(rank, world_size)
        self._link = link
        self._last: torch.cuda.Event | None = None
        self._name = ""

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        # torch gives the name to the C++ part, which has no backend to ask for it; and it forgets
        # the group before it asks for the last time.
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self  # it has none but itself, on any device

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: object = None
    ) -> dist.Work:
        _check_equal_ranges(output, input, self.size())
        with self._turn(output):
            self._link.all_gather(output.detach(), input.detach(), self.size())
        return _finished()

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        _check_equal_ranges(input, output, self.size())
        with self._turn(output):
            self._link.reduce_scatter(output.detach(), input.detach(), self.size())
            self._reduce(output, opts)
        return _finished()

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: object = None
    ) -> dist.Work:
        [ranges], [shard] = outputs, inputs
        _check_ranges(ranges, shard)
        with self._turn(shard):
            self._link.fill("all_gather", _detached(ranges), shard.detach())
        return _finished()

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        [own], [ranges] = outputs, inputs
        _check_ranges(ranges, own)
        with self._turn(own):
            self._link.read("reduce_scatter", own.detach(), _detached(ranges))
            self._reduce(own, opts)
        return _finished()

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: object = None,
    ) -> dist.Work:
        targets, sources = (
            tensor.detach().split(sizes or [len(tensor) // self.size()] * self.size())
            for tensor, sizes in ((output, output_sizes), (input, input_sizes))
        )
        _check_ranges(targets, sources[0])
        with self._turn(output):
            self._link.fill("all_to_all", targets, sources[0])
        return _finished()

    def broadcast(self, tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        for tensor in tensors:
            none = tensor.detach().view(-1)[:0]
            with self._turn(tensor):
                self._link.read("broadcast", none, [none, tensor.detach()])
        return _finished()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        # Order checks and norms: a few bytes, which take no time.
        for tensor in tensors:
            with self._turn(tensor):
                self._reduce(tensor, opts)
        return _finished()

    def barrier(self, opts: object = None) -> dist.Work:
        return _finished()

    # The same by the names of other releases of torch.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    alltoall_base = all_to_all_single

    def _refuse(self, *args: object, **options: object) -> NoReturn:
        raise NotImplementedError(
            "simulated ranks know all-gathers, reduce-scatters, all-to-alls of one tensor, "
            "broadcasts, all-reduces and barriers alone"
        )

    alltoall = reduce = gather = scatter = send = recv = _refuse
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _refuse
    all_gather_single_coalesced = reduce_scatter_single_coalesced = _refuse

    @contextmanager
    def _turn(self, tensor: torch.Tensor) -> Iterator[None]:
        """What runs inside comes after what this group ran before, on whatever stream."""
        if not tensor.is_cuda:
            yield
            return
        stream = torch.cuda.current_stream()
        if self._last is not None:
            stream.wait_event(self._last)
        yield
        self._last = stream.record_event()

    def _reduce(self, own: torch.Tensor, opts: Any) -> None:
        """Of equal tensors on all ranks. Without options torch sums."""
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if operation == dist.ReduceOp.SUM:
            own.detach().mul_(self.size())
        elif not any(operation == same for same in SAME):
            raise NotImplementedError(
                f"simulated ranks reduce by SUM, AVG, MAX and MIN, got {operation}"
            )


def _check_equal_ranges(whole: torch.Tensor, part: torch.Tensor, world_size: int) -> None:
    if whole.numel() != world_size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{world_size} ranks with {part.numel()} elements of {part.dtype} each make no tensor "
            f"of {whole.numel()} of {whole.dtype}"
        )
    if not (whole.is_contiguous() and part.is_contiguous()):
        raise ValueError("collectives take contiguous tensors")


def _check_ranges(ranges: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    if ranges[0].numel() != own.numel() or {held.dtype for held in ranges} != {own.dtype}:
        raise ValueError(
            f"rank 0's range has {ranges[0].numel()} elements of {ranges[0].dtype}, and "
            f"{own.numel()} of {own.dtype} are given for it"
        )
    if not all(held.is_contiguous() for held in (*ranges, own)):
        raise ValueError("collectives take contiguous tensors")


def _detached(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in tensors]


def _finished() -> dist.Work:
    future: Future[list[torch.Tensor]] = Future()
    future.set_result([])
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)
    return work


_link: Link | None = None


def _create_group(store: object, rank: int, world_size: int, timeout: timedelta) -> SimulatedGroup:
    if _link is None:
        raise RuntimeError("call simulated_ranks.start() in place of init_process_group()")
    return SimulatedGroup(rank, world_size, _link)


dist.Backend.register_backend(BACKEND, _create_group, devices=["cpu", "cuda"])


def start(device_type: str, world_size: int) -> Link:
    """Makes this process rank 0 of `world_size` ranks; their collectives go over the link returned.

    End it with `dist.destroy_process_group()`.

    Raises:
        ValueError: fewer than 2 ranks, which send nothing.
    """
    if world_size < 2:
        raise ValueError(f"world_size={world_size}: simulate 2 ranks or more")
    global _link
    _link = CudaLink() if device_type == "cuda" else HostLink()
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=world_size)
    return _link
