"""What the optimizer step and clipping by norm cost the host: ours against FSDP2's.

Every system has a copy of the model of `host_overhead.py`, sharded over a fake process group, of
which this process is rank 0. Forward and backward run once per system; then the operation alone is
timed, once per round. Before each sample and outside of its time the gradients are set to what an
unsharded backward gives, because a fake reduce-scatter promises no values and because clipping
changes them. The results are compared with an unsharded model's on this rank's shard.

*Optimizer step*: `step()` of AdamW with the same settings everywhere, its states warmed up. The
reference, 1.0, is torch's foreach AdamW on what FSDP2 shards. Our AdamW is a fused one, so it is
compared with torch's fused one too.

*Clipping*: from `model.parameters()` to the norm as a plain tensor on every rank, which FSDP2's
DTensor takes `full_tensor()` for. The limit is half the norm, so every gradient is scaled in every
sample. The reference is the faster of FSDP2's two.

FSDP2 cuts every parameter, so each rank holds a piece of each; ours cuts the flat row of a unit's
parameters, so rank 0 holds parts of 5 of a block's 14 here and nothing of the others. The number of
elements is the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from fsdp_overlap import RaggedDTensor, optim
from harness import options, processes, runner, turns
from harness.runner import Results
from harness.sharding import cpu_mesh, shard_fsdp2
from host_overhead import build, make_batch, shard_ours, timed

LEARNING_RATE = 1e-3
CLIP_TO = 0.5  # of the norm
CHECKED_STEPS = 3

Operation = Callable[[], Any]


@dataclass(frozen=True)
class System:
    """A way to do one of the two operations; `prepare` makes it for a model with gradients."""

    shard: Callable[[nn.Sequential], object]
    prepare: Callable[[nn.Module], Operation]
    target: float | None = None


def ours(model: nn.Sequential) -> None:
    shard_ours(model, cpu_mesh(), prefetch=1)


def stepping(adamw: Callable[..., torch.optim.Optimizer], **settings: Any) -> Any:
    """The step of `adamw`, the same everywhere but for `settings`."""
    return lambda model: adamw(model.parameters(), lr=LEARNING_RATE, **settings).step


def clipping(clip: Callable[[Iterator[nn.Parameter], float], torch.Tensor]) -> Any:
    """`clip` called as users call it, with a limit that always takes effect; returns the norm."""

    def prepare(model: nn.Module) -> Operation:
        limit = CLIP_TO * local_norm(model).item()
        return lambda: clip(model.parameters(), limit)

    return prepare


FOREACH = stepping(torch.optim.AdamW, foreach=True)
FUSED = stepping(torch.optim.AdamW, fused=True)
FSDP2_FOREACH, FSDP2_FUSED = "FSDP2, torch AdamW(foreach)", "FSDP2, torch AdamW(fused)"
OURS_STEP = "ours, fsdp_overlap.optim.AdamW"
STEPS = {
    FSDP2_FOREACH: System(shard_fsdp2, FOREACH),
    FSDP2_FUSED: System(shard_fsdp2, FUSED),
    "ours, torch AdamW(foreach)": System(ours, FOREACH),
    "ours, torch AdamW(fused)": System(ours, FUSED, target=0.35),
    OURS_STEP: System(ours, stepping(optim.AdamW), target=0.10),
}

clip_foreach = partial(clip_grad_norm_, foreach=True)
FSDP2_CLIPS = ("FSDP2, torch clip_grad_norm_", "FSDP2, torch clip_grad_norm_(foreach=True)")
CLIPS = {
    name: System(
        shard_fsdp2,
        clipping(lambda parameters, limit, clip=clip: clip(parameters, limit).full_tensor()),
    )
    for name, clip in zip(FSDP2_CLIPS, (clip_grad_norm_, clip_foreach), strict=True)
}
CLIPS["ours, torch clip_grad_norm_(foreach=True)"] = System(ours, clipping(clip_foreach))
CLIPS["ours, fsdp_overlap.optim.clip_grad_norm_"] = System(
    ours, clipping(optim.clip_grad_norm_), target=0.15
)


def local_part(parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `full`, which is whole and lies as `parameter` does."""
    if isinstance(parameter, RaggedDTensor):
        start, stop = parameter.local_range
        return full.flatten()[start:stop]
    mesh = parameter.device_mesh
    return full.chunk(mesh.size())[mesh.get_local_rank()]


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's gradients, sharing memory."""
    return [parameter.grad.to_local() for parameter in model.parameters()]


def local_norm(model: nn.Module) -> torch.Tensor:
    """Of this rank's gradients, which is what a fake all-reduce makes the norm of them all."""
    flat = torch.cat([local.flatten() for local in local_gradients(model)])
    return flat.double().norm().float()


class Candidate:
    """A system with a model of its own, gradients on it, and the operation to be timed."""

    def __init__(self, system: System, reference: nn.Module, blocks: int, width: int) -> None:
        self.model = build(blocks, width)
        system.shard(self.model)
        self.model(make_batch(width)).square().mean().backward()
        pairs = zip(self.model.parameters(), reference.parameters(), strict=True)
        self._gradients = [local_part(parameter, full.grad) for parameter, full in pairs]
        self.renew_gradients()
        self.operation = system.prepare(self.model)

    def renew_gradients(self) -> None:
        """Sets the gradients to those of an unsharded backward."""
        torch._foreach_copy_(local_gradients(self.model), self._gradients)

    def sample(self) -> float:
        """Microseconds of the operation."""
        self.renew_gradients()
        return timed(self.operation)()

    def check_step(self, reference: nn.Module) -> None:
        """Raise AssertionError unless stepping makes of this rank's shard what `reference` has."""
        for _ in range(CHECKED_STEPS):
            self.operation()
        for parameter, full in zip(self.model.parameters(), reference.parameters(), strict=True):
            mine = parameter.detach().to_local()
            # Some units in the last place; the weight decay of all steps, 6e-7, would show.
            torch.testing.assert_close(mine, local_part(parameter, full), rtol=1e-6, atol=1e-9)

    def check_clip(self) -> None:
        """Raise AssertionError unless clipping returns the norm and scales every gradient."""
        expected, norm = local_norm(self.model), self.operation()
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-9)
        for clipped, whole in zip(local_gradients(self.model), self._gradients, strict=True):
            torch.testing.assert_close(clipped, whole * CLIP_TO, rtol=1e-4, atol=1e-9)


OPTIONS = options.parser(__doc__, world_size=8, blocks=32, width=32, rounds=100, warmup=10)


def main() -> None:
    args = OPTIONS.parse_args()
    processes.join_fake_ranks(args.world_size)
    reference = build(args.blocks, args.width)
    reference(make_batch(args.width)).square().mean().backward()
    candidates = {
        name: Candidate(system, reference, args.blocks, args.width)
        for name, system in {**STEPS, **CLIPS}.items()
    }
    plain = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE, foreach=False, fused=False)
    for _ in range(CHECKED_STEPS):
        plain.step()
    for name in STEPS:
        candidates[name].check_step(reference)
    for name in CLIPS:
        candidates[name].check_clip()
    with turns.quiet_gc():
        measured = {
            what: turns.alternate(
                {name: candidates[name].sample for name in names}, args.rounds, args.warmup
            )
            for what, names in (("step", STEPS), ("clip", CLIPS))
        }
    dist.destroy_process_group()
    runner.publish(args, report(measured))


def report(measured: Mapping[str, Mapping[str, list[float]]]) -> Results:
    """`measured`: microseconds of each step and each clip, by system."""
    results = Results("14 parameters a block")
    faster_clip = min(FSDP2_CLIPS, key=lambda name: statistics.median(measured["clip"][name]))
    for quantity, systems, reference, more in (
        ("step", STEPS, FSDP2_FOREACH, [(OURS_STEP, FSDP2_FUSED, 0.06)]),
        ("clip", CLIPS, faster_clip, []),
    ):
        compared = [
            (name, reference, system.target)
            for name, system in systems.items()
            if name.startswith("ours")
        ]
        results.add(quantity, "us", measured[quantity], *compared, *more)
    return results


if __name__ == "__main__":
    main()
