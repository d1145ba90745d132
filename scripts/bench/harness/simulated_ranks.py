"""Many ranks on one device: a process group whose other ranks are made up.

    link = simulated_ranks.start("cuda", world_size=8)
    link.gigabytes_per_s = 100.0

makes this process rank 0 of 8 for all of `torch.distributed`, device meshes and new groups
included, so that any system shards over 8 ranks as it would. Collectives run on the caller's
current stream, as NCCL's do (large all-reduces, which are DDP's, on one of their own), and never
make the host wait for a GPU.

**Values.** Every rank is taken to hold what this one holds. So an all-gather fills each range of
its output with a copy of this rank's shard, the mean of gradients is this rank's own range of them,
the sum `world_size` times it. Where all ranks have one batch, that is the training of a real model:
the one whose weights repeat from shard to shard. Losses and gradients can be compared with it
unsharded. After an optimizer's step they no longer can: the other ranks' gradients differ.

Where ranges of a list differ in size, a rank holds what this one holds, cut to its own size or
repeated until that is full, and zeros where this one holds nothing. So what is gathered in two
steps (kept parts, divided copies) differs from what is gathered in one. A broadcast leaves what is
there, so `full_tensor()` has this rank's range alone.

**Time.** A collective lasts as long as `link.gigabytes_per_s` needs for the bytes that a rank
receives, `(world_size - 1) / world_size` of the whole where ranges are equal (twice that for an
all-reduce), and longer only where this device's memory is slower than that. Two rules keep that
honest:

- All groups share one link. Transfers that are ready at the same time take turns on it, first come
  first served, whatever group or stream they belong to: a second group gains no bandwidth.
- A group runs one collective at a time, in the order in which they were issued, as a communicator
  does.

What is not simulated: a slower rank, and the latency of a message. On a GPU a collective is one
kernel, also that of ranges of different sizes. `simulated_link.BLOCKS` blocks copy; then
`link.waiting_blocks` of them watch the GPU's own nanosecond clock until the transfer ends (clocks
of multiprocessors slow down under load). Its name begins with `nccl`, by which traces know a
collective. On a CPU it sleeps in the caller's time, which says nothing about overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.futures import Future

from harness.simulated_link import CudaLink, HostLink, Link

BACKEND = "simulated"

FEW_BYTES = 1024
"""An all-reduce of so many takes no time: order checks and norms."""

# Of equal tensors these are the tensor.
SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)


class SimulatedGroup(dist.ProcessGroup):
    """Rank 0 of `world_size` ranks, most of which are made up."""

    def __init__(self, rank: int, world_size: int, link: Link) -> None:
        super().__init__(rank, world_size)
        self._link = link
        self._last: torch.cuda.Event | None = None
        self._last_is_captured = False
        self._side: torch.cuda.Stream | None = None
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
        if tensors[0].nbytes <= FEW_BYTES:
            for tensor in tensors:
                with self._turn(tensor):
                    self._reduce(tensor, opts)
            return _finished()
        # DDP's, which computes meanwhile.
        with self._side_stream(tensors) as future:
            for tensor in tensors:
                with self._turn(tensor):
                    self._link.all_reduce(tensor.detach(), self.size())
                    self._reduce(tensor, opts)
            future.set_result(tensors)
        return _work_of(future)

    def barrier(self, opts: object = None) -> dist.Work:
        return _finished()

    # Those of several tensors, which DTensors use for one.

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: object = None
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self._allgather_base(output, input, opts)
        return _finished()

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, input, opts)
        return _finished()

    # The same by the names of other releases of torch.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    alltoall_base = all_to_all_single
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _refuse(self, *args: object, **options: object) -> NoReturn:
        raise NotImplementedError(
            "simulated ranks know all-gathers, reduce-scatters, all-to-alls of one tensor, "
            "broadcasts, all-reduces and barriers alone"
        )

    alltoall = reduce = gather = scatter = send = recv = _refuse

    @contextmanager
    def _turn(self, tensor: torch.Tensor) -> Iterator[None]:
        """What runs inside comes after what this group ran before, on whatever stream."""
        if not tensor.is_cuda:
            yield
            return
        stream = torch.cuda.current_stream()
        is_captured = torch.cuda.is_current_stream_capturing()
        # A graph knows no event from outside, and outside there is none of a graph.
        if self._last is not None and self._last_is_captured == is_captured:
            stream.wait_event(self._last)
        yield
        self._last, self._last_is_captured = stream.record_event(), is_captured

    @contextmanager
    def _side_stream(self, tensors: list[torch.Tensor]) -> Iterator[Future[list[torch.Tensor]]]:
        """What runs inside comes after what the current stream has, on another. Who waits for the
        future makes its stream wait."""
        if not tensors[0].is_cuda:
            yield Future()
            return
        if self._side is None:
            self._side = torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        for tensor in tensors:
            tensor.record_stream(self._side)
        with torch.cuda.stream(self._side):
            yield Future(devices=[tensors[0].device])

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
    return _work_of(future)


def _work_of(future: Future[list[torch.Tensor]]) -> dist.Work:
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
