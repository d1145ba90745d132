"""A byte-level GPT: pre-norm blocks of causal attention with rotary positions and a squared-ReLU
MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


class GPT(nn.Module):
    """Bytes `[batch, time]` (int64) to logits of the next byte `[batch, time, 256]`.

    width must be a multiple of 2 * heads.
    """

    def __init__(self, *, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self._initialize(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        rotation = _rotation(tokens.shape[1], self.head_width, x)
        for block in self.blocks:
            x = block(x, rotation)
        return self.output(self.norm(x))

    def _initialize(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds to the residual twice; without this its variance would grow with
                # depth.
                residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)


class GPTBlock(nn.Module):
    """`[batch, time, width]` to the same shape; `rotation` as made by `_rotation`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self._attend(self.norm_attention(x), rotation)
        return x + self.down(F.relu(self.up(self.norm_mlp(x))).square())

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        # [batch, time, 3 * width] -> three of [batch, heads, time, head_width]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            _rotate(q, rotation), _rotate(k, rotation), v, is_causal=True
        )
        return self.project(y.transpose(1, 2).flatten(2))


def _rotation(time: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[time, head_width / 2]` of rotary positions (arXiv 2104.09864), in
    the dtype of `like`."""
    frequencies = 10000 ** (-torch.arange(0, head_width, 2, device=like.device) / head_width)
    angles = torch.arange(time, device=like.device)[:, None] * frequencies
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
