"""Offloaded to the host of a GPU: parity, no wait in forward, and what works on shards there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fsdp_overlap import (
    CPUOffloadPolicy,
    FsdpContext,
    MixedPrecisionPolicy,
    RaggedDTensor,
    TensorAtomic,
)
from fsdp_overlap.optim import AdamW, Muon, OverlapPolicy, clip_grad_norm_
from support.hostile_streams import CYCLES, RANKS, HostileCommStream
from support.ranks import run_ranks
from support.twins import Twins, loss_of
from support.zoo import Model, shard_layers

pytestmark = pytest.mark.gpu


class Counted(Model):
    """With a buffer, which goes where compute runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(13))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.bias


def offloaded(pin_memory: bool = True, **options: Any) -> Twins:
    policy = CPUOffloadPolicy(pin_memory)
    return Twins(Counted, partial(shard_layers, offload_policy=policy), device="cuda", **options)


def train(pin_memory: bool, prefetch: int) -> None:
    twins = offloaded(pin_memory, prefetch=prefetch)
    twins.train(iterations=4)
    for parameter in twins.model.parameters():
        assert isinstance(parameter, RaggedDTensor)
        states = twins.optimizer.state[parameter]
        for tensor in (parameter, states["exp_avg"], states["exp_avg_sq"]):
            assert tensor.device.type == "cpu"
        assert (
            parameter.to_local().is_pinned() or not pin_memory or not parameter.to_local().numel()
        )


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_training_equals_unsharded_training(pin_memory: bool, prefetch: int) -> None:
    run_ranks(train, RANKS, pin_memory, prefetch, backend="nccl")


def train_on_hostile_streams() -> None:
    """Accumulating too: what is read on the host has arrived."""
    twins = offloaded(optimizer=AdamW)
    twins.ctx.comm_stream_factory = lambda comm_stream, device: HostileCommStream(device)
    for _ in range(3):
        for batch in twins.batches(2):
            twins.backward(*batch)
        twins.check_gradients()
        twins.step()
        twins.check_parameters()


def test_the_host_waits_for_gradients() -> None:
    run_ranks(train_on_hostile_streams, RANKS, backend="nccl")


def run_ahead() -> None:
    twins = offloaded(optimizer=AdamW)
    tokens, targets = next(twins.batches(1))
    mine = twins.mine(tokens), twins.mine(targets)
    for _ in range(3):
        loss_of(twins.model(mine[0]), mine[1]).backward()
        twins.optimizer.step()
        twins.optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda._sleep(500 * CYCLES)
    loss = loss_of(twins.model(mine[0]), mine[1])
    assert not torch.cuda.current_stream().query(), "the host waited for the GPU"
    loss.backward()


def test_forward_never_waits_for_the_gpu() -> None:
    run_ranks(run_ahead, RANKS, backend="nccl")


def edit_after_evaluation() -> None:
    """What is edited on the host was read before."""
    twins = offloaded()
    twins.ctx.comm_stream_factory = lambda comm_stream, device: HostileCommStream(device)
    tokens, _ = next(twins.batches(1))
    with torch.no_grad():
        expected = twins.twin(tokens)
        scores = twins.model(tokens)
        for parameter in twins.model.parameters():
            parameter.zero_()
    torch.testing.assert_close(scores, expected)


def test_an_edit_after_an_evaluation_does_not_reach_it() -> None:
    run_ranks(edit_after_evaluation, RANKS, backend="nccl")


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "torch's AdamW, a loop": (torch.optim.AdamW, {"foreach": False}),
    "torch's AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "Muon": (Muon, {"ns_dtype": torch.float64}),
    "Muon, whole matrices": (Muon, {"ns_dtype": torch.float64, "layout": TensorAtomic()}),
}


def optimize(name: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    offloaded(optimizer=optimizer, **options).train(iterations=3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_on_the_host(name: str) -> None:
    run_ranks(optimize, RANKS, name, backend="nccl")


def overlap(policy: OverlapPolicy, optimizer: Any, **options: Any) -> None:
    """On streams that are late: the same bits as without the thread."""
    plain = offloaded(optimizer=optimizer, **options)
    threaded = offloaded(optimizer=optimizer, overlap=policy, **options)
    groups = plain.optimizer.param_groups
    for twins in (plain, threaded):
        twins.ctx.comm_stream_factory = lambda comm_stream, device: HostileCommStream(device)
    for tokens, targets in plain.batches(5):
        for twins in (plain, threaded):
            loss_of(twins.model(twins.mine(tokens)), twins.mine(targets)).backward()
            if twins is plain and policy.max_norm is not None:
                clip_grad_norm_([p for group in groups for p in group["params"]], policy.max_norm)
            twins.optimizer.step()
            twins.optimizer.zero_grad()
    pairs = zip(plain.model.named_parameters(), threaded.model.parameters(), strict=True)
    for (name, parameter), other in pairs:
        assert torch.equal(parameter.to_local(), other.to_local()), name  # type: ignore[operator]


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("name", ["AdamW", "Muon, whole matrices"])
def test_a_thread_steps_beside_the_device(name: str, max_norm: float | None) -> None:
    optimizer, options = OPTIMIZERS[name]
    policy = OverlapPolicy(max_norm=max_norm, buffer_bytes=1000)
    run_ranks(partial(overlap, policy, optimizer, **options), RANKS, backend="nccl")


def clip() -> None:
    for clip_ours in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        twins = offloaded()
        for batch in twins.batches(2):
            twins.backward(*batch)
            total = clip_ours(twins.model.parameters(), 0.1)
            expected = nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
            torch.testing.assert_close(total.cpu(), expected.cpu())
            twins.check_gradients()
            twins.step()
            twins.check_parameters()


def test_gradients_on_the_host_are_clipped() -> None:
    run_ranks(clip, RANKS, backend="nccl")


def save_and_load(folder: str) -> None:
    twins = offloaded(optimizer=AdamW)
    twins.train(iterations=2)
    model, optimizer = twins.model, twins.optimizer
    names = "model", "optimizer"
    dcp.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    states = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    twins.check_parameters()
    twins.train(iterations=2)


def test_checkpoints_are_saved_from_the_host_and_loaded_to_it(tmp_path: Path) -> None:
    run_ranks(save_and_load, RANKS, str(tmp_path), backend="nccl")


def whole_state_dict() -> None:
    # Without a buffer on the GPU, which torch refuses beside parameters on the host.
    twins = Twins(Model, partial(shard_layers, offload_policy=CPUOffloadPolicy()), device="cuda")
    whole = get_model_state_dict(
        twins.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    expected = twins.twin.state_dict()
    with torch.no_grad():
        for parameter in twins.model.parameters():
            parameter.zero_()
    if not whole:  # cpu_offload leaves it on the first rank alone
        whole = {name: value.cpu() for name, value in expected.items()}
    set_model_state_dict(twins.model, whole, options=StateDictOptions(full_state_dict=True))
    twins.check_parameters()


def test_whole_state_dicts() -> None:
    run_ranks(whole_state_dict, RANKS, backend="nccl")


def start_on_meta() -> None:
    twins = offloaded()
    with torch.device("meta"):
        model = Counted()
    twins.ctx, twins.model = FsdpContext(), model.double()
    shard_layers(twins.model, twins.ctx, offload_policy=CPUOffloadPolicy())
    with pytest.raises(RuntimeError, match="to_empty\\(device='cpu'\\)"):
        twins.model.to_empty(device="cuda")
    twins.model.to_empty(device="cpu").load_state_dict(twins.twin.state_dict())
    assert twins.model.bias.is_cuda
    twins.optimizer = torch.optim.AdamW(twins.model.parameters(), lr=0.05)
    twins.train(iterations=3)


def test_a_model_that_started_on_meta_gets_memory_on_the_host() -> None:
    run_ranks(start_on_meta, RANKS, backend="nccl")


def compute_in_bfloat16() -> None:
    """The same as without offloading, to the bit."""
    results = []
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
        torch.manual_seed(7)
        model: Any = Model().cuda()
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        shard_layers(model, FsdpContext(), mp_policy=mixed, **options)
        tokens, targets = torch.randint(13, (2, 3, 5)).cuda()
        loss = loss_of(model(tokens).float(), targets)
        loss.backward()
        results.append([loss, *(p.grad.full_tensor().cuda() for p in model.parameters())])
    for plain, offloaded in zip(*results, strict=True):
        assert torch.equal(plain, offloaded)


def test_bfloat16_compute_of_shards_on_the_host() -> None:
    run_ranks(compute_in_bfloat16, RANKS, backend="nccl")
