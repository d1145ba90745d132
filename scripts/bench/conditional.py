"""What it costs that ranks may run different units: a step of a model with a conditional tower.

The tower is the first half of the blocks, or with `--before` it follows some of the others. Each
block is a unit, and so is the tower. Systems are ours and take turns round by round in the same
processes: the tower is not conditional; it is, and all ranks run it; it is, and every second rank
runs it, while the others serve it. With no conditional unit, ranks must exchange no message at all.

What messages cost the host is measured on plain loopback, with blocks so small that next to nothing
but the host's work is left: microseconds of a step beyond the same step of the model whose tower is
not conditional. Its processor time
is that of the thread that runs forward and backward. What passes by the clock also has the wait for
messages, which a busy machine prolongs.

What they cost a step is measured over a slow link, limited to `--rate` in a network namespace made
for the run (needs root and `tc`). A block sleeps `--sleep` milliseconds in forward and twice as
long in backward, which takes time and no core, as a GPU's compute does. There a sample is the mean
of `--steps` steps, in milliseconds, from a barrier to the end of the slowest of the ranks that run
the tower.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.engine.comm_context import CommContext
from harness import link_training, options, output, processes, slow_link, turns
from harness.measurement import Claim, Measurement, Ratio
from link import check

PLAIN, ALL, HALF = "not conditional", "conditional, all run it", "conditional, half run it"
STEP, MESSAGES = "step", "messages in a step"
BEYOND = "host, beyond not conditional: "
PROCESSOR, CLOCK = f"{BEYOND}processor", f"{BEYOND}clock"
ALL_TARGET, HALF_TARGET, HOST_TARGET = 1.01, 1.05, 150.0
HOST_WIDTH, HOST_STEPS = 32, 2


class Model(nn.Module):
    """Blocks, among them a tower that this rank runs or not."""

    def __init__(self, blocks: int, before: int, sleep_ms: float, width: int) -> None:
        super().__init__()
        all_blocks = link_training.build(blocks, sleep_ms, width)
        end = before + blocks // 2
        self.first, self.tower = all_blocks[:before], all_blocks[before:end]
        self.last = all_blocks[end:]
        self.runs_tower = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.tower(x) if self.runs_tower else x)


def prepare(args: argparse.Namespace, name: str, width: int) -> Callable[[], float]:
    """Return a step of the system ``name``."""
    model = Model(args.blocks, args.before, args.sleep, width)
    rank = dist.get_rank()
    ctx = FsdpContext(init_device_mesh("cpu", (dist.get_world_size(),)))
    for block in (*model.first, *model.tower, *model.last):
        fully_shard(block, ctx)
    fully_shard(model.tower, ctx, conditional=name != PLAIN)
    fully_shard(model, ctx)
    model.runs_tower = name != HALF or rank % 2 == 0
    batch = link_training.make_batch(rank, args.rows, width)

    def step() -> float:
        loss = model(batch).square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.item()

    return step


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
        check(losses)
    return steps


def measure_host(args: argparse.Namespace) -> dict[str, Any]:
    """Return microseconds of steps of tiny blocks, and how many messages a step takes."""
    args.sleep, args.rows = 0.0, link_training.SEQUENCE
    steps = warmed_up(args, HOST_WIDTH)
    processor: dict[str, list[float]] = {name: [] for name in steps}

    def timed(name: str, step: Callable[[], float]) -> Callable[[], float]:
        def sample() -> float:
            dist.barrier()
            start, start_of_processor = time.perf_counter(), time.thread_time()
            for _ in range(HOST_STEPS):
                step()
            elapsed = time.perf_counter() - start
            processor[name].append((time.thread_time() - start_of_processor) / HOST_STEPS * 1e6)
            return elapsed / HOST_STEPS * 1e6

        return sample

    with turns.quiet_gc():
        samplers = {name: timed(name, step) for name, step in steps.items()}
        clock = turns.alternate(samplers, args.host_rounds, 1)
    warm = {name: values[-args.host_rounds :] for name, values in processor.items()}
    return {
        PROCESSOR: warm,
        CLOCK: clock,
        MESSAGES: {name: messages_in(step) for name, step in steps.items()},
    }


def measure_link(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return milliseconds of steps over the link."""
    steps = warmed_up(args, link_training.WIDTH)
    with turns.quiet_gc():
        samplers = {name: turns.timed(step, args.steps) for name, step in steps.items()}
        mine = turns.alternate(samplers, args.rounds, 1)
    if dist.get_rank() % 2:  # the slowest is one of those that run the tower
        mine[HALF] = [0.0] * args.rounds
    return processes.of_slowest_rank(mine)


def parse() -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        rate="2gbit",
        no_limit=False,
        rows=64,
        sleep=43.0,
        ranks=2,
        blocks=8,
        rounds=7,
        steps=2,
        timeout=600.0,
    )
    parser.add_argument("--before", type=int, default=0, help="blocks that run before the tower")
    parser.add_argument("--host-rounds", type=int, default=300, help="of what the host is measured")
    parser.add_argument("--measure", choices=["host", "link"], help=argparse.SUPPRESS)
    return parser.parse_args()


def measurement_of(
    args: argparse.Namespace, host: dict[str, Any], samples: dict[str, list[float]]
) -> Measurement:
    about = (
        f"{args.ranks} ranks, {slow_link.in_words(args)}, {args.blocks} blocks of "
        f"12*{link_training.WIDTH}^2, {args.before} of them before a tower of {args.blocks // 2}, "
        f"{args.rows} rows a rank, a block sleeps {args.sleep:g} ms in forward, {2 * args.sleep:g} "
        f"in backward; {args.rounds} rounds of {args.steps} steps; the host: loopback, blocks of "
        f"12*{HOST_WIDTH}^2, {args.host_rounds} rounds of {HOST_STEPS} steps"
    )
    figures = output.figures_of(STEP, "ms", samples)
    figures += output.figures_of(MESSAGES, "", host[MESSAGES])
    for quantity, at_most in ((PROCESSOR, {ALL: HOST_TARGET}), (CLOCK, None)):
        plain = host[quantity].pop(PLAIN)
        beyond = {
            name: [of - to for of, to in zip(samples_of, plain, strict=True)]
            for name, samples_of in host[quantity].items()
        }
        figures += output.figures_of(quantity, "us", beyond, at_most=at_most)
    [sent] = host[MESSAGES][PLAIN]
    return options.measurement(
        args,
        about,
        figures,
        [
            Ratio.between(STEP, ALL, PLAIN, samples, at_most=ALL_TARGET),
            Ratio.between(STEP, HALF, ALL, samples, at_most=HALF_TARGET),
        ],
        [Claim("without conditional units ranks exchange no messages", sent == 0, f"{sent:g}")],
    )


def main() -> None:
    args = parse()
    if processes.is_rank():
        processes.join_ranks(timeout_s=args.timeout)
        processes.finish((measure_host if args.measure == "host" else measure_link)(args))
        return
    argv = sys.argv[1:]
    host = processes.launch_ranks(args.ranks, [*argv, "--measure=host"], args.timeout)
    samples = slow_link.launch_on_link(args, [*argv, "--measure=link"])
    output.publish(measurement_of(args, host, samples), args.json, args.plot)


if __name__ == "__main__":
    main()
