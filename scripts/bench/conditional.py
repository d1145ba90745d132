"""What it costs that ranks may run different units: a step of a model with a conditional tower.

The tower is the first half of the blocks, and is a unit too. Systems are ours: the tower is not
conditional; it is, and all ranks run it; it is, and every second rank runs it, while the others
shadow it. Of the last, a sample is of the ranks that run the tower. With no conditional unit, ranks
must exchange no message at all.

What they cost the host is the sum of two measurements, since gloo's threads on shared cores make
single steps vary by more than it is. In one process with a fake process group, which answers with
its own messages, a step with a conditional tower is timed against one without, of blocks so small
that next to nothing but the host's work is left. And two ranks exchange messages of the same size,
in a loop. Both are processor time of the thread that runs forward and backward.

With `--ranks-in-simulation` the first is also measured at such numbers of ranks: what two ranks
said in the same step is answered for all of them, in place of what gloo would bring.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.comm import objects
from fsdp_overlap.comm.comm_streams import PendingCollective
from fsdp_overlap.comm.process_groups import GroupCache
from fsdp_overlap.engine.comm_context import CommContext
from fsdp_overlap.features.uneven import contexts, hosts
from harness import link_training, options, processes, runner, sharding, turns
from harness.measurement import Claim
from harness.runner import Results

PLAIN, ALL, HALF = "not conditional", "conditional, all run it", "conditional, half run it"
STEP, MESSAGES = "step", "messages in a step"
SCHEDULE, MESSAGE = "host, schedule", "host, a message"
HOST = "host, a step"
ALL_OF, HALF_OF = "{} ranks, all run it", "{} ranks, half run it"
SIMULATED, SAID = "host, schedule in simulation", "what two ranks said"
ALL_TARGET, HALF_TARGET, HOST_TARGET, SIMULATED_TARGET = 1.01, 1.05, 150.0, 200.0
HOST_WIDTH, HOST_STEPS, WARM_UP = 32, 5, 3


class Model(nn.Module):
    """Blocks, among them a tower that this rank runs or not."""

    def __init__(self, blocks: int, sleep_ms: float, width: int) -> None:
        super().__init__()
        all_blocks = link_training.build(blocks, sleep_ms, width)
        self.tower, self.rest = all_blocks[: blocks // 2], all_blocks[blocks // 2 :]
        self.runs_tower = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.tower(x) if self.runs_tower else x)


def prepare(args: argparse.Namespace, name: str, width: int) -> Callable[[], float]:
    """Return a step of the system ``name``."""
    model = Model(args.blocks, args.sleep, width)
    ctx = FsdpContext(sharding.cpu_mesh())
    for block in (*model.tower, *model.rest):
        fully_shard(block, ctx)
    fully_shard(model.tower, ctx, conditional=name != PLAIN)
    fully_shard(model, ctx)
    model.runs_tower = name != HALF or dist.get_rank() % 2 == 0
    return link_training.make_step(model, link_training.make_batch(args.rows, width))


def messages_in(step: Callable[[], float]) -> list[float]:
    """Return how many messages this rank sends in a step."""
    exchange = CommContext.exchange
    with patch.object(CommContext, "exchange", autospec=True, side_effect=exchange) as called:
        step()
    return [float(called.call_count)]


def warmed_up(args: argparse.Namespace, width: int) -> dict[str, Callable[[], float]]:
    """Return the steps of all systems, after ranks have learned what follows what."""
    steps = {name: prepare(args, name, width) for name in (PLAIN, ALL, HALF)}
    for _ in range(3):
        losses = {name: step() for name, step in steps.items()}
        if dist.get_rank() % 2:
            del losses[HALF]
        turns.same_losses(losses)
    return steps


def said_in_steps(args: argparse.Namespace) -> list[list[list[str]]]:
    """Return what both ranks say in each message of a step of which every second runs the tower:
    of the first steps, and of one like all that follow."""
    step = prepare(args, HALF, HOST_WIDTH)
    exchange, said = CommContext.exchange, list[list[list[str]]]()

    def recorded(self: CommContext, message: bytes) -> Any:
        replies = exchange(self, message)
        said[-1].append(
            [next(each.hex() for each in replies if replies[each] >> r & 1) for r in (0, 1)]
        )
        return replies

    with patch.object(CommContext, "exchange", recorded):
        for _ in range(WARM_UP + 2):
            said.append([])
            step()
    assert said[-1] == said[-2]
    return said[:-1]


def measure_host(args: argparse.Namespace) -> dict[str, Any]:
    """Return how many messages a step takes, and microseconds of one on this rank."""
    args.sleep, args.rows = 0.0, link_training.SEQUENCE
    steps = warmed_up(args, HOST_WIDTH)
    sent = {name: messages_in(step) for name, step in steps.items()}
    ctx = FsdpContext()
    fully_shard(nn.Linear(2, 2), ctx, conditional=True)(torch.zeros(1, 2))
    message, samples = bytes(64), []
    for _ in range(args.host_rounds):
        start = time.thread_time()
        for _ in range(HOST_STEPS):
            ctx.comm_context.exchange(message)
        samples.append((time.thread_time() - start) / HOST_STEPS * 1e6)
    return {MESSAGES: sent, MESSAGE: samples, SAID: said_in_steps(args)}


class Group:
    """Stands in for a group of hosts."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@contextmanager
def answered(ranks: int, said: Sequence[Sequence[Sequence[str]]] | None) -> Iterator[None]:
    """Answer messages at once, as `ranks` of them would: with the same, or every second with what
    the other of two ranks `said`."""
    mesh: Any = SimpleNamespace(mesh=torch.arange(ranks))
    groups: list[Group] = []
    steps = iter(said or ())
    to_come: list[int] = []

    def group_of(cache: GroupCache, _: Any, members: Sequence[int]) -> Any:
        groups.append(Group(len(members)))
        return groups[-1]

    def answer(received: torch.Tensor, sent: torch.Tensor, *rest: Any) -> PendingCollective:
        nonlocal step, to_come
        received.copy_(sent)
        if said is not None and rest[-1] is groups[0]:  # where rows differ, columns do not
            if not to_come:
                step = next(steps, step)
                to_come = [*range(len(step))]
            at = to_come.pop(0)
            if (id(step), at) not in replies:  # made once: a network would take none of the host
                mine, other = map(bytes.fromhex, step[at])
                view = received.view(-1, len(mine))
                assert bytes(view[0].tolist()) == mine
                view[1::2] = torch.frombuffer(bytearray(other), dtype=torch.uint8)
                replies[id(step), at] = received.clone()
            received.copy_(replies[id(step), at])
        return PendingCollective((), lambda: received)

    replies: dict[tuple[int, int], torch.Tensor] = {}
    step: Sequence[Sequence[str]] = ()
    with ExitStack() as stack:
        patched = (
            (contexts, "host_ranks", lambda _: hosts.host_ranks(mesh)),
            (contexts, "group_of_hosts", group_of),
            (objects, "all_to_all", answer),
        )
        for owner, name, instead in patched:
            stack.enter_context(patch.object(owner, name, instead))
        yield


def measure_schedule(
    args: argparse.Namespace, ranks: int = 2, said: Sequence[Sequence[Sequence[str]]] | None = None
) -> list[float]:
    """Return microseconds of a step with a conditional tower, beyond those of one without, as one
    of `ranks`. Messages are answered at once."""
    args = argparse.Namespace(**vars(args) | {"sleep": 0.0, "rows": link_training.SEQUENCE})
    processes.join_fake_ranks(2)
    samples = []
    with answered(ranks, said), turns.quiet_gc():
        steps = [prepare(args, name, HOST_WIDTH) for name in (PLAIN, HALF if said else ALL)]
        for step in steps:
            for _ in range(WARM_UP):
                step()
        for _ in range(args.host_rounds):
            times = []
            for step in steps:
                start = time.thread_time()
                for _ in range(HOST_STEPS):
                    step()
                times.append((time.thread_time() - start) / HOST_STEPS * 1e6)
            samples.append(times[1] - times[0])
    dist.destroy_process_group()
    return samples


def measure_link(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return milliseconds of steps over the link."""
    steps = warmed_up(args, link_training.WIDTH)
    samplers = {name: turns.timed(step, args.steps) for name, step in steps.items()}
    if dist.get_rank() % 2:  # the slowest is one of those that run the tower
        serve = samplers[HALF]
        samplers[HALF] = lambda: 0.0 * serve()
    return turns.slowest(samplers, args.rounds)


OPTIONS = options.parser(
    __doc__, rate="2gbit", ranks=2, blocks=8, rows=64, sleep=43.0, rounds=25, steps=1
)
OPTIONS.add_argument("--host-rounds", type=int, default=300, help="of what the host is measured")
OPTIONS.add_argument(
    "--ranks-in-simulation", type=int, nargs="*", default=[8, 64, 1024], help="of the host's work"
)
OPTIONS.add_argument("--measure", choices=["host", "link"], help=argparse.SUPPRESS)


def sample(args: argparse.Namespace) -> dict[str, Any]:
    return (measure_host if args.measure == "host" else measure_link)(args)


def launch(args: argparse.Namespace) -> dict[str, Any]:
    host = runner.launch_ranks(args, ["--measure=host"], no_limit=True)
    link = runner.launch_ranks(args, ["--measure=link"])
    simulated = {}
    for ranks in args.ranks_in_simulation:
        few = argparse.Namespace(**vars(args) | {"host_rounds": max(1, args.host_rounds // 3)})
        simulated[ALL_OF.format(ranks)] = measure_schedule(few, ranks)
        simulated[HALF_OF.format(ranks)] = measure_schedule(few, ranks, host[SAID])
    return {**host, STEP: link, SCHEDULE: measure_schedule(args), SIMULATED: simulated}


def report(args: argparse.Namespace, found: dict[str, Any]) -> Results:
    results = Results(
        f"blocks of 12*{link_training.WIDTH}^2, a tower of "
        f"{args.blocks // 2}; the host: blocks of 12*{HOST_WIDTH}^2, {args.host_rounds} rounds of "
        f"{HOST_STEPS} steps"
    )
    results.add(STEP, "ms", found[STEP], (ALL, PLAIN, ALL_TARGET), (HALF, ALL, HALF_TARGET))
    results.add(MESSAGES, "", found[MESSAGES])
    in_messages = found[MESSAGES][ALL][0] * statistics.median(found[MESSAGE])
    results.add(SCHEDULE, "us", {ALL: found[SCHEDULE]})
    results.add(MESSAGE, "us", {ALL: found[MESSAGE]})
    total = {ALL: [us + in_messages for us in found[SCHEDULE]]}
    results.add(HOST, "us", total, at_most={ALL: HOST_TARGET})
    if found[SIMULATED]:
        at_most = dict.fromkeys(found[SIMULATED], SIMULATED_TARGET)
        results.add(SIMULATED, "us", found[SIMULATED], at_most=at_most)
    [sent] = found[MESSAGES][PLAIN]
    text = "without conditional units ranks exchange no messages"
    results.claims.append(Claim(text, sent == 0, f"{sent:g}"))
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, launch)
