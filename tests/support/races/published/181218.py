"""Trains a model of language whose loss is computed in pieces, to keep logits small."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

DEVICE = "cuda"
WORDS, WIDTH, DEPTH, LENGTH, PIECES, STEPS = 64, 32, 3, 16, 4, 3


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def main() -> None:
    mesh = init_device_mesh(DEVICE, (4,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Trunk().to(DEVICE)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        tokens = torch.randint(WORDS, (2, LENGTH + 1), device=DEVICE)
        hidden = model(tokens[:, :-1])
        detached = hidden.detach().requires_grad_()
        pieces = zip(detached.chunk(PIECES, 1), tokens[:, 1:].chunk(PIECES, 1), strict=True)
        for x, labels in pieces:
            logits = model.head(x).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            (loss / PIECES).backward()
        hidden.backward(detached.grad)
        optimizer.step()
        optimizer.zero_grad()


main()
