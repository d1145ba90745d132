"""A process group on real ranks that behaves to its caller as NCCL's does, on a CPU.

    dist.init_process_group(nccl_like.BACKEND)

Its bytes travel by gloo. What the caller sees is NCCL's:

- It takes lists of unequal ranges, means, and all-gathers and reduce-scatters in place.
- It refuses what NCCL refuses: dtypes that NCCL has not, tensors that are not contiguous,
  ranges whose sizes do not fit. NCCL finds no difference between ranks; here it is an error too.
- A synchronous call runs in the order of the current stream: on a CPU it is done when it returns.
- The result of an asynchronous one is visible after `wait()` alone. Until then all bits of what it
  writes are set, which is NaN. What it reads must stay as it is until then, which `wait()` checks.
- A maximum or minimum passes over NaN.
- The first collective makes the communicator, by a split if the options name a group to split from,
  on which nothing may be outstanding then.

Like a communicator a group runs its collectives one after the other, in the order in which they
were issued, whatever the caller does meanwhile: on a thread of its own.

On the emulated device a synchronous call is an operation of the current stream. An asynchronous one
runs on the stream of the group, and `wait()` lets the current stream wait for it, and not the host.
Lists of unequal ranges are groups of broadcasts, or of reductions. Of calls that the program
coalesces, the work of the whole alone can be waited for, if they are asynchronous.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import partial, reduce, wraps
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from fsdp_overlap.tools.emulator import graphs
from fsdp_overlap.tools.emulator import torch_module as streams
from fsdp_overlap.tools.emulator.dispatch import unseen
from fsdp_overlap.tools.emulator.works import EmulatedWork, FinishedWork
from fsdp_overlap.tools.torch_internals import names_of_groups

# As NCCL's name is spoken. Written, it would stand for a GPU.
BACKEND = "nickel"

DEVICES = ["cpu", "emulated", "cuda"]

# Those of torch's ProcessGroupNCCL.
FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz)
NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
DTYPES = frozenset((*FLOAT8, *NUMBERS, *INTEGERS))

Receive = Callable[[list[torch.Tensor]], None]


class Arrival(NamedTuple):
    """What is on its way here: `wait(seconds)` gives it, at the latest after so many."""

    wait: Callable[..., list[torch.Tensor]]
    is_done: Callable[[], bool]


class Part(NamedTuple):
    """A call of NCCL."""

    kind: str
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]


def replayable(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Return a graph of the emulated device that captures a call of `method` repeats it in each
    replay."""

    @wraps(method)
    def call(group: NcclLikeGroup, *args: Any, **kwargs: Any) -> dist.Work:
        if not streams.is_available():
            return method(group, *args, **kwargs)
        with graphs.collective(partial(method, group), args, kwargs):
            return method(group, *args, **kwargs)

    return call


class CollectiveCall(NamedTuple):
    """What a group is to do. `receive` gets what arrives from all ranks, and writes `writes`."""

    kind: str
    writes: Sequence[torch.Tensor]
    reads: Sequence[torch.Tensor]
    receive: Receive
    opts: Any = None
    parts: Sequence[Part] = ()
    """The calls, if NCCL makes several of it."""

    @property
    def is_async(self) -> bool:
        return getattr(self.opts, "asyncOp", True)


class Delivery(EmulatedWork):
    """A collective under way: `receive` puts in place what arrives."""

    def __init__(self, arrival: Arrival, receive: Receive) -> None:
        super().__init__()
        self._arrival = arrival
        self._receive: Receive | None = receive

    def wait(self, timeout: timedelta | None = None) -> bool:
        # C++ asks with a timeout of 0 or less where there is none.
        seconds = None if timeout is None else timeout.total_seconds()
        if self._receive is not None:
            try:
                arrived = self._arrival.wait(seconds if seconds is None or seconds > 0 else None)
            except TimeoutError as error:
                raise RuntimeError(f"not done after {seconds} s") from error
            receive, self._receive = self._receive, None
            with unseen():
                receive(arrived)
        return super().wait()

    def is_completed(self) -> bool:
        return self._receive is None or self._arrival.is_done()

    def is_success(self) -> bool:
        return self._receive is None


class Options:
    """What a group is made with, in the names of NCCL's."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=30)
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(max_ctas=32, split_share=0)
        self.split_from: Any = None
        self.split_color = -2  # not set, which NCCL refuses

    def __deepcopy__(self, memo: object) -> Options:
        made = copy(self)
        made.config = copy(self.config)
        return made


# torch's stubs list more forms of each method than torch calls.
_ProcessGroup: Any = dist.ProcessGroup


class NcclLikeGroup(_ProcessGroup):
    """One communicator. See the top of the file."""

    checks_nan: ClassVar[bool] = False
    """Whether a NaN that is sent is an error, as with TORCH_NCCL_NAN_CHECK=1."""

    unwatched: ClassVar[int] = 0
    """How many collectives of this rank a watchdog would not see hang: torch takes a synchronous
    group of calls as done at once, as it records the end on a stream that they do not run on."""

    def __init__(self, made: Any, options: Options | None) -> None:
        rank, world_size = made.group_rank, made.group_size
        super().__init__(rank, world_size)
        carried = dist.PrefixStore("carrier", made.store)
        self._carrier: Any = dist.ProcessGroupGloo(carried, rank, world_size, made.timeout)
        self._name = ""
        self._issued = 0
        self._options = options or Options()
        self._options._timeout = made.timeout
        self.connected_by = ""
        """The collective that made the communicator: the first one."""
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        self._coalesced: list[dist.Work] | None = None
        self._is_coalesced_async = True
        self.pools: list[Any] = []
        self._thread = ThreadPoolExecutor(1, f"{BACKEND}-{rank}")

    # ---- what torch asks a group ----

    backend: ClassVar[str] = BACKEND

    def name(self) -> str:
        return self.backend

    def getBackendName(self) -> str:
        return self.backend

    @property
    def group_name(self) -> str:
        # torch gives the name to the C++ part, which has no backend to ask for it; and it forgets
        # the group before it asks for the last time.
        self._name = names_of_groups.get(self, self._name)
        return self._name

    @property
    def options(self) -> Options:
        return self._options

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return True

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        works, self._coalesced = self._coalesced or [], None
        if works and not self._is_coalesced_async:
            NcclLikeGroup.unwatched += 1
            return None
        return _together(works)

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in DEVICES:
            raise RuntimeError(f"no backend for {device.type}")
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._carrier.shutdown()

    abort = shutdown

    # ---- memory of its own, on a device that has pools ----

    mem_allocator: ClassVar[object] = object()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type in DEVICES[1:]

    def _connect(self, kind: str) -> None:
        """Make the communicator, as the first collective does."""
        if self.connected_by:
            return
        parent = self._options.split_from
        if parent is not None:
            assert parent.connected_by, "split from a group without a communicator: connected alone"
            assert parent._last.done(), "split from a communicator on which work is outstanding"
            color = self._options.split_color
            assert color >= 0
            # Collective over the parent: it hangs until all its ranks have come.
            mine = [torch.tensor([color])] * parent.size()
            colors = parent._thread.submit(parent._exchange, "split", [_bytes(m) for m in mine])
            found = [each.view(torch.int64).item() for each in colors.result()]
            assert found.count(color) == self.size(), f"colors {found} for {self.size()} ranks"
        self.connected_by = kind

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        if not self.connected_by:
            raise RuntimeError(
                "NCCL communicator has not been initialized before mem pool creation. You can pass "
                "`device_id` to init_process_group"
            )
        assert pool.allocator is self.mem_allocator
        self.pools.append(pool)

    def has_registered(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of `tensor` is registered with this group."""
        address = streams.active().address_of(tensor)
        return any(address in segment for pool in self.pools for segment in pool.segments)

    # ---- the one way that every collective goes ----

    def _run(self, collective: CollectiveCall, start: Callable[[], Arrival]) -> dist.Work:
        """Return the work of a collective. `start` sends copies of what it reads."""
        kind, writes, reads, *_ = collective
        self._connect(kind)
        if collective.parts and not collective.is_async:
            NcclLikeGroup.unwatched += 1
        enqueued = None
        if streams.is_available():
            for part in collective.parts or [Part(kind, reads, writes)]:
                enqueued = streams.active().issue(self, *part, collective.is_async)
        with unseen():
            work = self._carry(collective, start)
        work.enqueued, work.outputs = enqueued, list(writes)
        if self._coalesced is not None:
            self._coalesced.append(work)
            self._is_coalesced_async = collective.is_async
            return FinishedWork()  # the event of this one is recorded nowhere
        return work

    def _carry(self, collective: CollectiveCall, start: Callable[[], Arrival]) -> Delivery:
        kind, writes, reads, receive, *_ = collective
        for tensor in (*writes, *reads):
            self._check(kind, tensor)
        if self.checks_nan:
            _check_nan(kind, reads)
        kept = [(tensor, _bytes(tensor).clone()) for tensor in reads if not _shares(tensor, writes)]

        def arrived(received: list[torch.Tensor]) -> None:
            for tensor, before in kept:
                if not torch.equal(_bytes(tensor), before):
                    raise RuntimeError(f"{kind}: what it reads was edited before it was waited for")
            receive(received)

        work = Delivery(start(), arrived)
        if not collective.is_async:
            work.wait()
        else:
            for tensor in writes:
                ctypes.memset(tensor.data_ptr(), 0xFF, tensor.nbytes)
        return work

    def _check(self, kind: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{kind}: NCCL has no {tensor.dtype}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError(f"{kind}: tensors must be contiguous, got strides {tensor.stride()}")
        if tensor.device.type != "cpu":
            raise ValueError(f"{kind}: this is a group of CPUs, got {tensor.device}")

    def _all(self, collective: CollectiveCall, sends: Sequence[torch.Tensor]) -> dist.Work:
        """Return the work of a collective: `sends[r]` goes to each rank `r`, and flat bytes of each
        rank arrive."""

        def start() -> Arrival:
            messages = [_bytes(tensor).clone() for tensor in sends]
            future = self._last = self._thread.submit(self._exchange, collective.kind, messages)
            return Arrival(future.result, future.done)

        work = self._run(collective, start)
        self._issued += 1
        return work

    def _exchange(self, kind: str, messages: list[torch.Tensor]) -> list[torch.Tensor]:
        code = zlib.crc32(kind.encode())
        mine = torch.tensor([[code, message.numel()] for message in messages])
        theirs = torch.empty_like(mine)
        self._carrier.alltoall_base(theirs, mine, [], []).wait()
        different = [rank for rank, (other, _) in enumerate(theirs.tolist()) if other != code]
        if different:
            raise RuntimeError(f"ranks {different} do something else than {kind}")
        sizes = theirs[:, 1].tolist()
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        sent = [message.numel() for message in messages]
        self._carrier.alltoall_base(received, torch.cat(messages), sizes, sent).wait()
        return list(received.split(sizes))

    # ---- collectives ----

    @replayable
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        [targets], [source] = outputs, inputs
        _check_sizes("all_gather", targets[self.rank()], source)
        _check_dtypes("all_gather", [*targets, source])
        kind, parts = "all_gather", []
        if not _are_equal(targets):
            kind = "broadcasts"
            parts = [
                Part(f"broadcast from {rank}", [source] if rank == self.rank() else [], [target])
                for rank, target in enumerate(targets)
            ]
        gathered = CollectiveCall(kind, targets, [source], _fill(targets), opts, parts)
        return self._all(gathered, [source] * self.size())

    @replayable
    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        self._check_ranges("all_gather", output, input)
        ranges = output.detach().view(-1).split([input.numel()] * self.size())
        gathered = CollectiveCall("all_gather", [output], [input], _fill(ranges), opts)
        return self._all(gathered, [input] * self.size())

    @replayable
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        [target], [sources] = outputs, inputs
        _check_sizes("reduce_scatter", target, sources[self.rank()])
        _check_dtypes("reduce_scatter", [*sources, target])
        kind, parts = "reduce_scatter", []
        if not _are_equal(sources):
            kind = "reductions"
            parts = [
                Part(f"reduce to {rank}", [source], [target] if rank == self.rank() else [])
                for rank, source in enumerate(sources)
            ]
        return self._all(_reduction(kind, [target], sources, opts, parts), sources)

    @replayable
    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        self._check_ranges("reduce_scatter", input, output)
        ranges = input.detach().view(-1).split([output.numel()] * self.size())
        return self._all(_reduction("reduce_scatter", [output], [input], opts), ranges)

    @replayable
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return _together(
            [
                self._all(_reduction("all_reduce", [t], [t], opts), [t] * self.size())
                for t in tensors
            ]
        )

    allreduce_coalesced = allreduce

    @replayable
    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        [tensor] = tensors
        is_root = self.rank() == opts.rootRank
        sends = [tensor if rank == opts.rootRank else tensor[:0] for rank in range(self.size())]
        kind = f"reduce to {opts.rootRank}"
        return self._all(_reduction(kind, [tensor] if is_root else [], [tensor], opts), sends)

    @replayable
    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        [tensor] = tensors
        is_root = self.rank() == opts.rootRank
        writes, reads = ([], [tensor]) if is_root else ([tensor], [])
        sends = [tensor if is_root else tensor.detach().view(-1)[:0]] * self.size()
        kind = f"broadcast from {opts.rootRank}"
        receive = _fill_from(opts.rootRank, tensor)
        return self._all(CollectiveCall(kind, writes, reads, receive, opts), sends)

    @replayable
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        targets = self._split("all_to_all", output, output_sizes)
        sources = self._split("all_to_all", input, input_sizes)
        _check_dtypes("all_to_all", [output, input])
        return self._all(
            CollectiveCall("all_to_all", [output], [input], _fill(targets), opts), sources
        )

    @replayable
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._all(
            CollectiveCall("all_to_all", outputs, inputs, _fill(outputs), opts), inputs
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        [source], none = inputs, torch.empty(0)
        targets = outputs[0] if outputs else [none] * self.size()
        sends = [source if rank == opts.rootRank else none for rank in range(self.size())]
        return self._all(CollectiveCall("gather", targets, [source], _fill(targets), opts), sends)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        [target] = outputs
        reads = inputs[0] if inputs else []
        receive = _fill_from(opts.rootRank, target)
        scattered = CollectiveCall("scatter", [target], reads, receive, opts)
        return self._all(scattered, reads or [target[:0]] * self.size())

    def barrier(self, opts: Any = None) -> dist.Work:
        if streams.is_available():
            streams.active().wait_for_current("barrier")
        nothing = [torch.empty(0)] * self.size()
        return self._all(CollectiveCall("barrier", [], [], _fill(nothing), opts), nothing)

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        def start() -> Arrival:
            sent = _bytes(tensors[0]).clone()
            return _of(self._carrier.send([sent], rank, tag), sent)

        return self._run(CollectiveCall("send", [], tensors, lambda _: None), start)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        def start() -> Arrival:
            received = torch.empty_like(_bytes(tensors[0]))
            return _of(self._carrier.recv([received], rank, tag), received)

        return self._run(CollectiveCall("recv", tensors, [], _fill(tensors)), start)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _together([self._allgather_base(*pair, opts) for pair in pairs])

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _together([self._reduce_scatter_base(*pair, opts) for pair in pairs])

    # The same by the names of other releases of torch.
    all_gather_single = _allgather_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _split(
        self, kind: str, tensor: torch.Tensor, sizes: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        """Return along the first dimension, evenly without `sizes`."""
        rows = tensor.size(0)
        sizes = sizes or [rows // self.size()] * self.size()
        if sum(sizes) != rows:
            raise ValueError(f"{kind}: {sizes} do not split {rows} rows")
        return tensor.detach().split(list(sizes))

    def _check_ranges(self, kind: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Check what is in one tensor. In place, a part is this rank's own."""
        _check_dtypes(kind, [whole, part])
        if whole.numel() != self.size() * part.numel():
            raise ValueError(
                f"{kind}: {self.size()} times {part.numel()} elements are not {whole.numel()}"
            )
        place = part.data_ptr() - whole.data_ptr()
        if -part.nbytes < place < whole.nbytes and place != self.rank() * part.nbytes:
            raise ValueError(f"{kind}: in place at byte {place}, which is not this rank's range")


def _largest(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.fmax(one, other) if one.is_floating_point() else torch.maximum(one, other)


def _smallest(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.fmin(one, other) if one.is_floating_point() else torch.minimum(one, other)


_REDUCE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PREMUL_SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: _largest,
    dist.ReduceOp.MIN: _smallest,
}


def _reduction(
    kind: str,
    writes: Sequence[torch.Tensor],
    reads: Sequence[torch.Tensor],
    opts: Any,
    parts: Sequence[Part] = (),
) -> CollectiveCall:
    wanted: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    operation = next((known for known in _REDUCE if wanted == known), None)
    if operation is None:
        raise ValueError(f"{kind}: NCCL has only {[known.name for known in _REDUCE]}")
    is_mean = operation is dist.ReduceOp.AVG
    factor = wanted.__getstate__()[1] if operation is dist.ReduceOp.PREMUL_SUM else None
    dtype = reads[0].dtype
    if dtype in FLOAT8 or (dtype is torch.bool and is_mean):
        raise TypeError(f"{kind}: NCCL reduces no {dtype} by {operation.name}")

    def receive(received: list[torch.Tensor]) -> None:
        for target in writes:
            values = [each.view(dtype) for each in received]
            if {each.numel() for each in values} != {target.numel()}:
                raise ValueError(f"{kind}: ranks sent {[v.numel() for v in values]} elements")
            if is_mean and dtype.is_floating_point:  # as NCCL: before
                values = [each / len(values) for each in values]
            if factor is not None:  # other ranks have the same
                values = [each * factor for each in values]
            total = reduce(_REDUCE[operation], values)
            if is_mean and not dtype.is_floating_point:
                total = total // len(values)
            _write(target, total)

    return CollectiveCall(f"{kind} {operation.name}", writes, reads, receive, opts, parts)


def _are_equal(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1


def _check_sizes(kind: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if one.numel() != other.numel():
        raise ValueError(f"{kind}: own ranges of {one.numel()} and {other.numel()} elements")


def _check_dtypes(kind: str, tensors: Sequence[torch.Tensor]) -> None:
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise TypeError(f"{kind}: of {[tensor.dtype for tensor in tensors]}")


def _check_nan(kind: str, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype in NUMBERS and tensor.isnan().any():
            places = tensor.flatten().isnan().nonzero().flatten().tolist()
            raise RuntimeError(f"{kind}: NaN is sent, at {places} of {tensor.numel()}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _fill(targets: Sequence[torch.Tensor]) -> Receive:
    def receive(received: list[torch.Tensor]) -> None:
        for target, arrived in zip(targets, received, strict=True):
            _write(target, arrived)

    return receive


def _fill_from(rank: int, target: torch.Tensor) -> Receive:
    return lambda received: _write(target, received[rank])


def _write(target: torch.Tensor, values: torch.Tensor) -> None:
    """As a backend does: past autograd, version counters and inference mode."""
    if target.nbytes != values.nbytes:
        raise ValueError(f"{values.nbytes} bytes arrived for a tensor of {target.nbytes}")
    if target.untyped_storage().nbytes() < target.nbytes:
        raise RuntimeError("what a collective writes was freed before it was waited for")
    ctypes.memmove(target.data_ptr(), values.contiguous().data_ptr(), target.nbytes)


def _shares(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in others)


def _of(work: dist.Work, message: torch.Tensor) -> Arrival:
    def wait(seconds: float | None = None) -> list[torch.Tensor]:
        if seconds is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=seconds))
        return [message]

    return Arrival(wait, work.is_completed)


def _together(works: Sequence[Any]) -> dist.Work:
    if len(works) == 1:
        return works[0]

    def wait(_: float | None = None) -> list[torch.Tensor]:
        for work in works:
            work.wait()
        return []

    all_done = Arrival(wait, lambda: all(work.is_completed() for work in works))
    together = Delivery(all_done, lambda _: None)
    if works:
        together.enqueued = works[-1].enqueued
    return together


@contextmanager
def checking_nan() -> Iterator[None]:
    """Make it an error to send NaN."""
    NcclLikeGroup.checks_nan = True
    try:
        yield
    finally:
        NcclLikeGroup.checks_nan = False


dist.Backend.register_backend(BACKEND, NcclLikeGroup, extended_api=True, devices=DEVICES)
