"""What a rank's parameters held when they were sharded, as numbers to compare."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from hashlib import sha256
from math import isqrt
from operator import add

import torch

from fsdp_overlap.tensor.extension import inner_tensors

# Odd, with about as many ones as zeros: a small difference in a factor changes many bits of the
# product.
FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB

# Up to this many elements go into a digest one by one.
FEW = 4096

# Stands for the digest of values that are not known any more.
UNKNOWN = -(2**63)


def digest(values: torch.Tensor) -> torch.Tensor:
    """A number that almost surely differs if the bits of ``values`` or their order differ. It is a
    0-dimensional tensor on their device, so the host does not wait for it. Takes little memory, and
    two passes over ``values``."""
    integers = {1: torch.int8, 2: torch.int16}.get(values.element_size(), torch.int32)
    bits = values.resolve_conj().resolve_neg().reshape(-1).view(integers)
    # The bits as a matrix: every element counts in the sum of its row and in that of its column.
    # Width and height are odd, because a sum of an odd number of equal elements tells which element
    # that is, whatever the width of integers.
    width = isqrt(bits.numel()) | 1
    height = _odd_up_to(bits.numel() // width) if bits.numel() > FEW else 0
    matrix = bits[: height * width].view(height, width)
    sums = [matrix.sum(0, dtype=integers), matrix.sum(1, dtype=integers), bits[matrix.numel() :]]
    mixed = torch.cat(sums).long()
    mixed = mixed * FACTORS[0] + torch.arange(len(mixed), device=mixed.device) * FACTORS[1]
    mixed = (mixed ^ (mixed >> 31)) * FACTORS[2]
    return (mixed ^ (mixed >> 29)).sum()


def _odd_up_to(number: int) -> int:
    return number if number % 2 else max(0, number - 1)


def number_of(content: bytes) -> int:
    """A number of 56 bits that almost surely differs if ``content`` differs."""
    return int.from_bytes(sha256(content).digest()[:7], "little")


class Start:
    """Digests of ``values``, the whole parameters of a bucket as this rank had them. They are valid
    while the shard is still of ``version``."""

    def __init__(self, values: Sequence[torch.Tensor], version: int) -> None:
        parts = [inner_tensors(each) for each in values]
        are_known = all(parts) and not any(each.is_meta for each in values)
        self._digests = [reduce(add, map(digest, each)) for each in parts] if are_known else []
        self._count = len(values)
        self._version = version

    def digests(self, version: int) -> list[int]:
        """The digest of each parameter. ``UNKNOWN`` if ``version``, that of the shard now, is not
        the first, or if the values were on the meta device. The host waits for them."""
        if not self._digests or version != self._version:
            return [UNKNOWN] * self._count
        device = self._digests[0].device  # some may be on the host
        found: list[int] = torch.stack([each.to(device) for each in self._digests]).tolist()
        return found

    def move(self, version: int, new_version: int) -> None:
        """Follow the parameters into another shard. The old one was of ``version``, the new one is
        of ``new_version``."""
        self._version = new_version if self._version == version else -1
