"""A sharded model on one rank and what trains it."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, fully_shard
from fsdp_overlap.cli.config import TrainConfig
from fsdp_overlap.cli.data import Text, sample_batch
from fsdp_overlap.cli.model import GPT
from fsdp_overlap.optim import AdamW, clip_grad_norm_

PROFILED_STEPS = 2
_VALIDATION_BATCHES = 8


class Trainer:
    """The sharded model of one rank and what trains it. Every method is collective."""

    def __init__(self, config: TrainConfig, text: Text, device: torch.device) -> None:
        self.config = config
        self.text = text
        self.device = device
        # The same weights on every rank, of which each keeps its shard.
        torch.manual_seed(config.seed)
        model = GPT(layers=config.layers, width=config.width, heads=config.heads, tied=config.tied)
        self.model = model.to(device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.context = FsdpContext(prefetch=config.prefetch)
        policy = MixedPrecisionPolicy()
        if config.dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, self.context, mp_policy=policy)
        fully_shard(self.model, self.context, mp_policy=policy)
        self.optimizer = AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)
        self._draws = torch.Generator().manual_seed(config.seed)

    def run(self) -> Iterator[dict[str, float]]:
        """Trains, and yields metrics every `log_every` steps, at every validation and at the last
        step."""
        config, ranks = self.config, dist.get_world_size()
        loss_sum = torch.zeros((), device=self.device)
        steps = 0
        start = lap = time.perf_counter()
        for step in range(1, config.steps + 1):
            loss, norm = self.step()
            loss_sum += loss
            steps += 1
            validates = step % config.eval_every == 0 or step == config.steps
            if not validates and step % config.log_every:
                continue
            # A number makes the host wait for the device: not at every step.
            metrics: dict[str, float] = {"step": step}
            metrics["loss"] = _mean_over_ranks(loss_sum / steps)
            metrics["grad_norm"] = norm.item()
            metrics["lr"] = float(self.schedule.get_last_lr()[0])
            tokens = steps * ranks * config.batch_size * config.seq_len
            metrics["tokens_per_s"] = tokens / (time.perf_counter() - lap)
            if validates:
                metrics["val_loss"] = self.validate()
            lap = time.perf_counter()
            metrics["seconds"] = lap - start
            loss_sum.zero_()
            steps = 0
            yield metrics

    def step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step; this rank's loss and the gradients' norm, both scalars on the
        device."""
        loss = self._loss(self.text.train, self._draws)
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss in nats per byte over the same validation sequences each time."""
        draws = torch.Generator().manual_seed(0)
        losses = [self._loss(self.text.validation, draws) for _ in range(_VALIDATION_BATCHES)]
        return _mean_over_ranks(torch.stack(losses).mean())

    def profile_steps(self, trace: Path | None) -> None:
        """Two more steps under the profiler, on every rank so that none is slower than the others;
        what this rank did is written to `trace`, if given."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            dist.barrier()  # starting takes a while, and longer on one rank than on another
            for _ in range(PROFILED_STEPS):
                self.step()
            dist.barrier()  # it may crash on what is in flight when it stops
        if trace is not None:
            profiler.export_chrome_trace(str(trace))

    def _loss(self, text: Tensor, draws: torch.Generator) -> Tensor:
        # All ranks draw the same global batch and each takes its part, so that a run does not
        # depend on how many ranks share a batch.
        ranks, size = dist.get_world_size(), self.config.batch_size
        inputs, targets = sample_batch(text, ranks * size, self.config.seq_len, draws)
        mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        logits = self.model(inputs[mine].to(self.device)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets[mine].flatten().to(self.device))

    def _lr_factor(self, step: int) -> float:
        """Linear warmup over a tenth of the run, then a cosine down to a tenth of the peak."""
        warmup = max(1, self.config.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.config.steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _mean_over_ranks(value: Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
