"""Steps that are captured in a graph on any device, beside the same steps without one."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from support.twins import Twins, loss_of, same

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer": AdamW},
    "torch's AdamW": {"optimizer": torch.optim.AdamW, "capturable": True, "foreach": True},
    "Muon": {"optimizer": Muon, "ns_dtype": torch.double},
}


def step(twins: Twins, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    twins.optimizer.zero_grad()
    loss = loss_of(twins.model(batch[0]), batch[1])
    loss.backward()
    clip_grad_norm_(twins.model.parameters(), 0.1)
    twins.optimizer.step()
    return loss.detach()


def replay_steps(name: str, device: str, replays: int = 20) -> None:
    """As a user of ``torch.cuda`` writes it. Raises if a replay differs from the step itself."""
    streams: Any = torch.get_device_module(device)
    plain, captured = (Twins.of("layers", device=device, **OPTIMIZERS[name]) for _ in range(2))
    batches = [tuple(map(plain.mine, batch)) for batch in plain.batches(replays + 3)]
    static = batches[0][0].clone(), batches[0][1].clone()
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        for _ in range(2):
            step(captured, static)
            step(plain, static)
    streams.current_stream().wait_stream(side)
    graph = streams.CUDAGraph()
    with streams.graph(graph):
        loss = step(captured, static)
    for index, batch in enumerate(batches[:replays]):
        for target, source in zip(static, batch, strict=True):
            target.copy_(source)
        graph.replay()
        same(loss, step(plain, static), f"loss of replay {index}")
        for each, other in zip(captured.model.parameters(), plain.model.parameters(), strict=True):
            same(each.to_local(), other.to_local(), f"a parameter after replay {index}")
        if index % 5 == 4:  # without the graph, with the weights of the replay
            with torch.no_grad():
                scores = [twins.model(static[0]) for twins in (captured, plain)]
            same(*scores, f"scores after replay {index}")
