"""Three systems that train one model of Llama-like blocks under simulated ranks: ours, FSDP2, and
unsharded, which is compute alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_overlap
from fsdp_overlap import RaggedDTensor
from fsdp_overlap.engine.unit import Unit, unit_of
from harness import simulated_ranks
from harness.simulated_link import Link, Transfer, repeated

OURS, FSDP2, UNSHARDED = "ours", "FSDP2", "unsharded"
MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Scale:
    """How large the parts run.

    heads, hidden: of a block's attention and of its SwiGLU. tokens: of one sequence, the batch.
    ratios: of communication to compute alone; 0 for a link without limit. profiled: that of the
    profile. steps: that one sample of a round takes. memory_*: of the blocks whose peak is
    measured.
    """

    world_size: int
    blocks: int
    width: int
    heads: int
    hidden: int
    tokens: int
    ratios: tuple[float, ...]
    profiled: float
    rounds: int
    warmup: int
    steps: int
    memory_blocks: int
    memory_width: int


SCALES = {
    # Blocks as in an 8B model, except that keys and values have as many heads as queries.
    "cuda": Scale(
        world_size=8,
        blocks=8,
        width=4096,
        heads=32,
        hidden=14336,
        tokens=4096,
        ratios=(0.75, 1.0),
        profiled=0.75,
        rounds=9,
        warmup=2,
        steps=2,
        memory_blocks=8,
        memory_width=2048,
    ),
    "cpu": Scale(
        world_size=4,
        blocks=3,
        width=32,
        heads=4,
        hidden=64,
        tokens=16,
        ratios=(0.0, 1.0),
        profiled=0.5,
        rounds=3,
        warmup=1,
        steps=1,
        memory_blocks=4,
        memory_width=64,
    ),
}


class Block(nn.Module):
    """A Llama block without positions: RMSNorm, causal attention, SwiGLU."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        width, hidden = scale.width, scale.hidden
        self.heads = scale.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [1, tokens, width]."""
        h = self.norm1(x)
        q, k, v = (
            linear(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def build(scale: Scale, device: str) -> nn.Sequential:
    """Blocks and a last linear layer, the root's own, with random weights."""
    with torch.device("meta"):
        blocks = [Block(scale) for _ in range(scale.blocks)]
        model = nn.Sequential(*blocks, nn.Linear(scale.width, scale.width, bias=False))
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=scale.width**-0.5)
    return model


def build_ours(scale: Scale, device: str, mesh: DeviceMesh) -> nn.Sequential:
    """A model of ours, on a context of its own."""
    model = build(scale, device)
    ctx = fsdp_overlap.FsdpContext(mesh)
    for module in (*model[:-1], model):
        fsdp_overlap.fully_shard(module, ctx, mp_policy=MIXED)
    return model


def build_all(scale: Scale, device: str, mesh: DeviceMesh) -> dict[str, nn.Sequential]:
    """The unsharded one in the dtype in which the others compute. One after the other, so that only
    one is whole in float32 at a time."""
    models = {OURS: build_ours(scale, device, mesh), FSDP2: build(scale, device)}
    for module in (*models[FSDP2][:-1], models[FSDP2]):
        fsdp2.fully_shard(module, mesh=mesh, mp_policy=MIXED)
    models[UNSHARDED] = build(scale, device).to(MIXED.param_dtype)
    return models


def true_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters that a sharded model computes with under simulated ranks, by name.

    All ranks have this one's shards. So a flat buffer of ours repeats from range to range, each
    from the beginning, and FSDP2's parameters from rows to rows.
    """
    found: dict[int, torch.Tensor] = {}
    for param_group in chain.from_iterable(unit.param_groups for unit in units_of(model)):
        plan, parameters = param_group.plan, param_group.sharded_parameters
        flat = torch.cat([repeated(param_group.shard, numel) for numel in plan.shard_numels])
        for parameter, spec, offset in zip(parameters, plan.specs, plan.offsets, strict=True):
            found[id(parameter)] = flat[offset : offset + spec.numel].view(spec.shape)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in found:
            repeats = [parameter.device_mesh.size()] + [1] * (parameter.ndim - 1)
            rows = parameter.to_local().repeat(repeats)
            found[id(parameter)] = rows[: len(parameter)]
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def units_of(model: nn.Module) -> list[Unit]:
    """Ours, in the order of their modules."""
    return [unit for module in model.modules() if (unit := unit_of(module)) is not None]


def own_range(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What rank 0 holds of `whole`, flat, where it holds of `parameter`."""
    start, stop = 0, parameter.to_local().numel()  # FSDP2's: the first rows
    if isinstance(parameter, RaggedDTensor):
        start, stop = parameter.local_range
    return whole.flatten()[start:stop]


def make_step(model: nn.Module, batch: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Forward, backward and zero_grad; there is no optimizer. Returns the loss."""

    def step() -> torch.Tensor:
        loss = model(batch).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@dataclass(frozen=True)
class Bench:
    """Simulated ranks, the three systems under them, and what they train on."""

    scale: Scale
    device: str
    link: Link
    models: dict[str, nn.Sequential]
    batch: torch.Tensor

    @classmethod
    def start(cls, scale: Scale, device: str) -> Bench:
        link = simulated_ranks.start(device, scale.world_size)
        mesh = init_device_mesh(device, (scale.world_size,))
        torch.manual_seed(0)
        shape = (1, scale.tokens, scale.width)
        batch = torch.randn(shape, device=device, dtype=MIXED.param_dtype)
        models = build_all(scale, device, mesh)
        return cls(scale, device, link, models, batch)

    def new_ours(self) -> nn.Sequential:
        """Another model of ours, which has not run yet. It uses the comm streams, and so the
        memory, of the one that has: no first allocations disturb its first step."""
        mesh = init_device_mesh(self.device, (self.scale.world_size,))
        model = build_ours(self.scale, self.device, mesh)
        fsdp_overlap.share_comm_ctx([self.models[OURS], model])
        return model

    def steps(self) -> dict[str, Callable[[], torch.Tensor]]:
        return {name: make_step(model, self.batch) for name, model in self.models.items()}

    def give_true_weights(self, name: str) -> None:
        """To the unsharded model, of system `name`."""
        weights = true_weights(self.models[name])
        with torch.no_grad():
            for fqn, parameter in self.models[UNSHARDED].named_parameters():
                parameter.copy_(weights[fqn])

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, step: Callable[[], object], steps: int) -> Callable[[], float]:
        """A sample: milliseconds per step, from an idle device to an idle device."""

        def sample() -> float:
            self.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            self.synchronize()
            return (time.perf_counter() - start) / steps * 1e3

        return sample

    def compute_alone(self) -> float:
        """Milliseconds of an unsharded step; the median of a few."""
        sample = self.timed(self.steps()[UNSHARDED], self.scale.steps)
        sample()
        return statistics.median(sample() for _ in range(self.scale.rounds))

    def sent_by(self, name: str) -> list[Transfer]:
        """What one step of a system sends, once it knows its order."""
        step = self.steps()[name]
        for _ in range(2):
            self.link.sent.clear()
            step()
        return list(self.link.sent)

    def limit(self, ratio: float, sent: Sequence[Transfer], compute_ms: float) -> None:
        """Makes sending `sent` take `ratio` times the compute."""
        gigabytes = sum(transfer.nbytes for transfer in sent) / 1e9
        self.link.gigabytes_per_s = gigabytes / (ratio * compute_ms / 1e3) if ratio else None

    def replay(self, sent: Sequence[Transfer]) -> Callable[[], None]:
        """The same transfers one after the other, with no compute."""
        others = self.scale.world_size - 1
        most = max(transfer.nbytes for transfer in sent) // others
        whole = torch.zeros((others + 1) * most, dtype=torch.uint8, device=self.device)
        own = torch.empty(most, dtype=torch.uint8, device=self.device)

        def step() -> None:
            for kind, nbytes in sent:
                part = nbytes // others
                many, one = whole[: (others + 1) * part], own[:part]
                if kind == "all_gather":
                    self.link.all_gather(many, one, others + 1)
                else:
                    self.link.reduce_scatter(one, many, others + 1)

        return step
