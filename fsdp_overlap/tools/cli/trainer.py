"""A sharded model on one rank and what trains it."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.profiler import ProfilerActivity, profile, supported_activities

from fsdp_overlap import (
    Flat,
    FsdpContext,
    MixedPrecisionPolicy,
    QuantizedCommPolicy,
    TensorAtomic,
    fully_shard,
)
from fsdp_overlap.comm.comm_streams import has_streams, make_comm_stream
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from fsdp_overlap.tensor.dcp import writing
from fsdp_overlap.tools.cli.config import TrainConfig
from fsdp_overlap.tools.cli.data import Text, move, sample_batch
from fsdp_overlap.tools.cli.model import GPT
from fsdp_overlap.tools.cli.output import BadInput
from fsdp_overlap.weights import load_weights
from fsdp_overlap.weights.exchange import WeightExchange
from fsdp_overlap.weights.load_plan import LoadPlan

PROFILED_STEPS = 2
_STEPS_BEFORE_PROFILE = 2
_VALIDATION_BATCHES = 8


class Trainer:
    """The sharded model of one rank and what trains it. Every method is collective."""

    def __init__(self, config: TrainConfig, text: Text, device: torch.device) -> None:
        self.config = config
        self.text = text
        self.device = device
        # Every rank makes the same weights and keeps its shard of them.
        torch.manual_seed(config.seed)
        model = _make_model(config).to(device)
        self.parameters = sum(p.numel() for p in model.parameters())
        # Muon steps whole matrices, but not the output head.
        layout = TensorAtomic(split=("output.weight",)) if config.optimizer == "muon" else Flat()
        self.context = FsdpContext(prefetch=config.prefetch, layout=layout)
        wire = None
        if config.gather_dtype is not None:
            wire = QuantizedCommPolicy(gather_dtype=getattr(torch, config.gather_dtype))
        else:  # a plan of all units would be made before it is known which elements share a scale
            self.context.plan_layout([*model.blocks, model])
        policy = MixedPrecisionPolicy()
        if config.dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, self.context, mp_policy=policy, comm_policy=wire)
        self.model = fully_shard(model, self.context, mp_policy=policy, comm_policy=wire)
        self.model.set_zero_stage(config.zero_stage)
        self.optimizer = _make_optimizer(self.model, config)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)
        self._draws = torch.Generator().manual_seed(config.seed)
        self.steps_done = 0
        # The sum over this rank's sequences since the last line of metrics. In double precision the
        # sum of these few is exact. So it does not depend on which ranks saw them, or on when the
        # run was interrupted.
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._sequences_summed = 0  # of all ranks
        self._steps_timed = 0
        self._start = self._lap = time.perf_counter()

    def load_weights(self) -> None:
        """Load the weights that the run begins with, if it was given any."""
        if self.config.from_ is not None:
            load_weights(self.model, self.config.from_)

    def advance(self) -> dict[str, float]:
        """Train one step. Return its number and, every `log_every` steps, at every validation and
        at the last step, the metrics since they were last returned."""
        config, ranks = self.config, dist.get_world_size()
        loss_sum, norm = self.step()
        self.context.start_param_sync()  # runs under all that follows, the next forward too
        self.steps_done += 1
        self._loss_sum += loss_sum
        self._sequences_summed += ranks * config.batch_size
        self._steps_timed += 1
        step = self.steps_done
        metrics: dict[str, float] = {"step": step}
        validates = step % config.eval_every == 0 or step == config.steps
        if not validates and step % config.log_every:
            return metrics
        # Reading a number makes the host wait for the device: not at every step.
        metrics["loss"] = _sum_over_ranks(self._loss_sum).item() / self._sequences_summed
        metrics["grad_norm"] = norm.item()
        metrics["lr"] = float(self.schedule.get_last_lr()[0])
        tokens = self._steps_timed * ranks * config.batch_size * config.seq_len
        metrics["tokens_per_s"] = tokens / (time.perf_counter() - self._lap)
        if validates:
            metrics["val_loss"] = self.validate()
        self._loss_sum.zero_()
        self._sequences_summed = self._steps_timed = 0
        self._lap = time.perf_counter()
        metrics["seconds"] = self._lap - self._start
        return metrics

    def step(self) -> tuple[Tensor, Tensor]:
        """Train one optimizer step. Return the sum of the losses of this rank's sequences, in
        double precision, and the gradients' norm, both scalars on the device."""
        count = self.config.microbatches
        loss_sum = torch.zeros_like(self._loss_sum)
        for index, batch in enumerate(self._microbatches(self.text.train, self._draws), start=1):
            self.model.set_is_last_backward(index == count)
            loss = self._loss(*batch)
            (loss / count).backward()
            loss_sum += loss.detach().double() * (self.config.batch_size // count)
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss_sum, norm

    @torch.no_grad()
    def validate(self) -> float:
        """Return mean loss in nats per byte over the same validation sequences each time."""
        draws = torch.Generator().manual_seed(0)
        losses = [
            self._loss(*batch)
            for _ in range(_VALIDATION_BATCHES)
            for batch in self._microbatches(self.text.validation, draws)
        ]
        return _sum_over_ranks(torch.stack(losses).mean()).item() / dist.get_world_size()

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, for DCP. It may be loaded on another number of
        ranks."""
        return {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "schedule": self.schedule.state_dict(),
            "draws": self._draws.get_state(),
            "random": torch.get_rng_state(),
            "steps_done": self.steps_done,
            "loss_sum": _sum_over_ranks(self._loss_sum),
            "sequences_summed": self._sequences_summed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self._draws.set_state(state["draws"])
        torch.set_rng_state(state["random"])
        self.steps_done = state["steps_done"]
        self._loss_sum.copy_(state["loss_sum"] * (dist.get_rank() == 0))
        self._sequences_summed = state["sequences_summed"]

    def release_unsharded(self) -> None:
        """Free the full buffers that stages 1 and 2 keep, and what was gathered for the next step,
        before a checkpoint is written. The next step gathers them again. On an accelerator torch's
        allocator gives back what it would hold of those that are kept, for those who allocate
        without torch, such as NCCL."""
        self.context.release_unsharded()
        if self.config.zero_stage < 3 and has_streams(self.device):
            torch.accelerator.empty_cache()

    def profile_steps(self, trace: Path, zero_stage: int) -> None:
        """Train two more steps at `zero_stage` under the profiler and write what this rank did to
        `trace`. Every rank profiles, so that none is slower than the others. A few unprofiled steps
        come before: after a validation or a checkpoint, ranks first confirm to each other what they
        do."""
        self.model.set_zero_stage(zero_stage)

        def step() -> None:
            # Before the step, not after it: the trace then holds the all-gathers of whole steps.
            self.context.start_param_sync()
            self.step()

        for _ in range(_STEPS_BEFORE_PROFILE):
            step()
        activities = {ProfilerActivity.CPU}
        if has_streams(self.device):
            activities |= supported_activities()
        with profile(activities=activities) as profiler:
            dist.barrier()  # starting takes a while, and longer on one rank than on another
            for _ in range(PROFILED_STEPS):
                step()
            dist.barrier()  # a profiler that stops may crash on what is in flight
        with writing(trace):
            trace.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
        dist.barrier()  # all traces are written

    def _microbatches(
        self, text: Tensor, draws: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw this rank's sequences of one step: the inputs and targets of each microbatch."""
        # All ranks draw the same global batch and each takes its part, so that a run does not
        # depend on how many ranks share a batch.
        ranks, size = dist.get_world_size(), self.config.batch_size
        drawn = sample_batch(text, ranks * size, self.config.seq_len, draws)
        mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        inputs, targets = (part[mine].chunk(self.config.microbatches) for part in drawn)
        return zip(inputs, targets, strict=True)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of one microbatch in nats per byte."""
        targets = move(targets.flatten(), self.device)
        logits = self.model(move(inputs, self.device)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets)

    def _lr_factor(self, step: int) -> float:
        """Return linear warmup over a tenth of the run, then a cosine down to a tenth of the
        peak."""
        warmup = max(1, self.config.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.config.steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _make_model(config: TrainConfig) -> GPT:
    return GPT(layers=config.layers, width=config.width, heads=config.heads)


def check_weights(config: TrainConfig) -> None:
    """Raise BadInput if a run cannot begin with the weights that it was given."""
    if config.from_ is None:
        return
    with torch.device("meta"):
        model = _make_model(config)
    host = torch.device("cpu")
    plan = LoadPlan(strict=True)
    try:
        plan.find(model, config.from_, None, None, None)
        plan.compare(WeightExchange("load_weights", None, host, make_comm_stream(host)))
    except (ValueError, RuntimeError) as error:
        problems = " ".join(line.strip() for line in str(error).splitlines())
        raise BadInput(f"--from {config.from_}: {problems}") from None


def _make_optimizer(model: GPT, config: TrainConfig) -> torch.optim.Optimizer:
    assert config.lr is not None
    adamw: dict[str, Any] = {"lr": config.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if config.optimizer == "adamw":
        return AdamW(model.parameters(), **adamw)
    return Muon(
        model,
        config.lr,
        adjust_lr_fn="match_rms_adamw",  # so that one learning rate suits both
        split={"*.qkv.weight": 3},
        adamw=adamw,
    )


def _sum_over_ranks(value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total
