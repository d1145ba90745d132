"""A trial of this machine: two ranks gather and reduce one sharded layer."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap._fully_shard import fully_shard
from fsdp_overlap.context import FsdpContext

RANKS = 2
IMPORTING, MEETING, GATHERING, REDUCING = (
    "importing torch",
    "forming a gloo group",
    "gathering the layer",
    "reducing its gradients",
)
START_METHOD = "spawn"  # a forked process may wait for ever for threads of torch that it lacks
_WIDTH = 64
_DONE = "done"


class TrialError(Exception):
    """The trial failed. ``stage``: what the rank was doing."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


def try_two_ranks(seconds: float, progress: Callable[[str], None]) -> float:
    """Start two ranks, which train one step of one layer by gloo, on the CPU. Return the seconds
    that took. ``progress`` is called with what they do.

    Raises:
        TrialError: a rank raised, died, or was not done within ``seconds``. No process is left.
    """
    start = time.monotonic()
    try:
        # Any port that is free, at the address that launchers use on one machine.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    except dist.DistError as error:
        raise TrialError(MEETING, f"no port of 127.0.0.1 can be had: {error}") from None
    context: Any = multiprocessing.get_context(START_METHOD)
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [
        context.Process(target=_rank, args=(rank, store.port, seconds, pipes[rank][1]), daemon=True)
        for rank in range(RANKS)
    ]
    try:
        for rank, (_, sender) in zip(ranks, pipes, strict=True):
            rank.start()
            sender.close()  # so that the end of the rank closes the pipe
        _follow([receiver for receiver, _ in pipes], start + seconds, seconds, progress)
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()
    return time.monotonic() - start


def _follow(
    pipes: list[Connection], end: float, seconds: float, progress: Callable[[str], None]
) -> None:
    """Read what ranks say until all are done."""
    stages = [IMPORTING] * RANKS
    progress(IMPORTING)
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        ready = wait(list(open_pipes.values()), max(0.0, end - time.monotonic()))
        if not ready:
            late = ", ".join(f"rank {rank} was {stages[rank]}" for rank in open_pipes)
            raise TrialError(stages[min(open_pipes)], f"not done after {seconds:g} seconds: {late}")
        for rank, pipe in list(open_pipes.items()):
            if pipe not in ready:
                continue
            try:
                said, failure = pipe.recv()
            except EOFError:
                raise TrialError(stages[rank], f"rank {rank} died while {stages[rank]}") from None
            if failure:
                raise TrialError(stages[rank], f"rank {rank}, {stages[rank]}: {failure}")
            stages[rank] = said
            if said == _DONE:
                del open_pipes[rank]
            progress(said)


def _rank(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    try:
        _train(rank, port, seconds, lambda stage: pipe.send((stage, "")))
        pipe.send((_DONE, ""))
    except BaseException as error:
        message = str(error).partition("Exception raised from ")[0]  # then a stack of C++
        pipe.send(("", f"{type(error).__name__}: {message}"))


def _train(rank: int, port: int, seconds: float, at: Callable[[str], None]) -> None:
    """Train one step of one layer. Raises if a number is wrong."""
    at(MEETING)
    timeout = timedelta(seconds=seconds)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    try:
        at(GATHERING)
        torch.manual_seed(0)
        layer = nn.Linear(_WIDTH, _WIDTH, bias=False)
        whole = layer.weight.detach().clone()  # sharding takes over the layer's own memory
        fully_shard(layer, FsdpContext(init_device_mesh("cpu", (RANKS,))))
        inputs = torch.full((1, _WIDTH), rank + 1.0)
        outputs = layer(inputs)
        torch.testing.assert_close(outputs.detach(), inputs @ whole.T)
        at(REDUCING)
        outputs.sum().backward()
        gradient: Any = layer.weight.grad
        mean = sum(range(1, RANKS + 1)) / RANKS
        torch.testing.assert_close(gradient.full_tensor(), torch.full_like(whole, mean))
    finally:
        dist.destroy_process_group()
