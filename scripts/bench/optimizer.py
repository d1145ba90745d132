"""What the optimizer step and clipping by norm cost the host: ours against FSDP2's.

Every system has a copy of the model of `host_overhead.py`, sharded over a fake process group, of
which this process is rank 0. Forward and backward run once per system; then the operation alone is
timed, once per round. Before each sample and outside of its time the gradients are set to what an
unsharded backward gives, because a fake reduce-scatter promises no values and because clipping
changes them. With `--fresh-gradients` a whole forward and backward run there instead, as in
training, so that nothing can be remembered of the gradients of the sample before.

*Optimizer step*: `step()` of AdamW with the same settings everywhere, its states warmed up. The
reference, 1.0, is torch's foreach AdamW on what FSDP2 shards. Our AdamW is a fused one, so it is
compared with torch's fused one too.

*Clipping*: from `model.parameters()` to the norm as a plain tensor on every rank. The limit is half
the norm, so every gradient is scaled in every sample. FSDP2's norm is a DTensor; `full_tensor()`,
which makes the plain one, belongs to its time (the norm comes back replicated on the versions of
torch that were looked at, so this is no second collective). The reference is the faster of FSDP2's
two. Walking `model.parameters()` is part of every row, and is shown alone as well.

Three steps on every system must give what three plain steps give the unsharded model, on this
rank's shard; each clip must return the norm of this rank's gradients, which is what a fake
all-reduce leaves, and scale them to half.

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
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_

from fsdp_overlap import RaggedDTensor, optim
from harness import options, output, processes, runner, turns
from harness.runner import Results
from harness.sharding import cpu_mesh, shard_fsdp2
from host_overhead import ROWS, build, shard_ours, timed

LEARNING_RATE = 1e-3
CLIP_TO = 0.5  # of the norm
CHECKED_STEPS = 3

Operation = Callable[[], Any]


@dataclass(frozen=True)
class System:
    """A way to do one of the two operations; `prepare` makes it for a model with gradients."""

    shard: Callable[[nn.Sequential, DeviceMesh], None]
    prepare: Callable[[nn.Module], Operation]
    target: float | None = None


def ours(model: nn.Sequential, mesh: DeviceMesh) -> None:
    shard_ours(model, mesh, prefetch=1)


def stepping(adamw: Callable[..., torch.optim.Optimizer], **settings: Any) -> Any:
    """The step of `adamw`, the same everywhere but for `settings`."""
    return lambda model: adamw(model.parameters(), lr=LEARNING_RATE, **settings).step


def clipping(clip: Callable[[Iterator[nn.Parameter], float], torch.Tensor]) -> Any:
    """`clip` called as users call it, with a limit that always takes effect; returns the norm."""

    def prepare(model: nn.Module) -> Operation:
        limit = CLIP_TO * local_norm(model)
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
OURS_CLIP = "ours, fsdp_overlap.optim.clip_grad_norm_"
CLIPS = {
    name: System(
        shard_fsdp2,
        clipping(lambda parameters, limit, clip=clip: clip(parameters, limit).full_tensor()),
    )
    for name, clip in zip(FSDP2_CLIPS, (clip_grad_norm_, clip_foreach), strict=True)
}
CLIPS["ours, torch clip_grad_norm_(foreach=True)"] = System(ours, clipping(clip_foreach))
CLIPS[OURS_CLIP] = System(ours, clipping(optim.clip_grad_norm_), target=0.15)

WALK = "(walking model.parameters(), part of each)"


def local_part(parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `full`, which is whole and lies as `parameter` does."""
    if isinstance(parameter, RaggedDTensor):
        start, stop = parameter.local_range
        return full.flatten()[start:stop]
    mesh = parameter.device_mesh
    return full.chunk(mesh.size())[mesh.get_local_rank()]


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's gradients, sharing memory."""
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if missing:
        output.fail(f"no gradient after backward: {missing[0]} ({len(missing)} in all)", code=1)
    return [parameter.grad.to_local() for parameter in model.parameters()]


def local_norm(model: nn.Module) -> float:
    """Of this rank's gradients, which is what a fake all-reduce makes the norm of them all."""
    flat = torch.cat([local.flatten() for local in local_gradients(model)])
    return flat.double().norm().item()


def forward_backward(model: nn.Module, width: int) -> None:
    """Gives `model` new gradients."""
    model.zero_grad(set_to_none=True)
    batch = torch.linspace(-1.0, 1.0, ROWS * width).view(ROWS, width)
    model(batch).square().mean().backward()


class Candidate:
    """A system with a model of its own, gradients on it, and the operation to be timed."""

    def __init__(
        self, name: str, system: System, reference: nn.Module, blocks: int, width: int
    ) -> None:
        self.name = name
        self.width = width
        self.model = build(blocks, width)
        system.shard(self.model, cpu_mesh())
        pairs = zip(self.model.parameters(), reference.parameters(), strict=True)
        self._gradients = [local_part(parameter, full.grad) for parameter, full in pairs]
        self.renew_gradients(fresh=True)
        self.operation = system.prepare(self.model)

    def renew_gradients(self, fresh: bool) -> None:
        """Sets the gradients to those of an unsharded backward; of a new backward if `fresh`."""
        if fresh:
            forward_backward(self.model, self.width)
        torch._foreach_copy_(local_gradients(self.model), self._gradients)

    def sampler(self, fresh: bool) -> Callable[[], float]:
        take = timed(self.operation, 1)

        def sample() -> float:
            self.renew_gradients(fresh)
            return take()

        return sample

    def check_step(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        """Fails unless stepping takes this rank's shard from `before` to `after`."""
        self._check_parameters(before, "before the first step")
        for _ in range(CHECKED_STEPS):
            self.operation()
        self._check_parameters(after, f"after {CHECKED_STEPS} steps")

    def _check_parameters(self, full: list[torch.Tensor], when: str) -> None:
        for (name, parameter), whole in zip(self.model.named_parameters(), full, strict=True):
            # Some units in the last place; the weight decay of all steps, 6e-7, would show.
            self._check(
                parameter.detach().to_local(), local_part(parameter, whole), f"{name} {when}", 1e-6
            )

    def check_clip(self) -> None:
        """Fails unless clipping returns the norm and scales every gradient."""
        expected = local_norm(self.model)
        norm = self.operation()
        if type(norm) is not torch.Tensor:
            output.fail(f"{self.name}: the norm is a {type(norm).__name__}", code=1)
        self._check(norm, torch.tensor(expected), "norm", 1e-4)
        for clipped, whole in zip(local_gradients(self.model), self._gradients, strict=True):
            self._check(clipped, whole * CLIP_TO, "gradient", 1e-4)

    def _check(self, actual: torch.Tensor, expected: torch.Tensor, what: str, rtol: float) -> None:
        try:
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-9)
        except AssertionError as error:
            output.fail(f"{self.name}: wrong {what}: {error}", code=1)


def check(candidates: Mapping[str, Candidate], reference: nn.Module) -> None:
    """Has every candidate do its work once where the right result is known."""
    before = [parameter.detach().clone() for parameter in reference.parameters()]
    plain = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE, foreach=False, fused=False)
    for _ in range(CHECKED_STEPS):
        plain.step()
    after = [parameter.detach() for parameter in reference.parameters()]
    if any(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        output.fail("the reference steps left a parameter as it was", code=1)
    for name in STEPS:
        candidates[name].check_step(before, after)
    for name in CLIPS:
        candidates[name].check_clip()


OPTIONS = options.parser(__doc__, world_size=8, blocks=32, width=32, rounds=100, warmup=10)
OPTIONS.add_argument(
    "--fresh-gradients",
    action="store_true",
    help="an untimed forward and backward before every sample (takes far longer)",
)


def main() -> None:
    args = OPTIONS.parse_args()
    processes.join_fake_ranks(args.world_size)
    reference = build(args.blocks, args.width)
    forward_backward(reference, args.width)
    candidates = {
        name: Candidate(name, system, reference, args.blocks, args.width)
        for name, system in {**STEPS, **CLIPS}.items()
    }
    check(candidates, reference)
    walk = timed(lambda: list(candidates[OURS_CLIP].model.parameters()), 1)
    measured: dict[str, dict[str, list[float]]] = {}
    with turns.quiet_gc():
        for what, names in (("step", STEPS), ("clip", CLIPS)):
            samplers = {name: candidates[name].sampler(args.fresh_gradients) for name in names}
            if what == "clip":
                samplers[WALK] = walk
            measured[what] = turns.alternate(samplers, args.rounds, args.warmup)
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
