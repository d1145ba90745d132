"""Collectives of the library as it chooses them for NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from fsdp_overlap.comm import collectives
from fsdp_overlap.features.rows import collectives as row_collectives


@contextmanager
def chosen_as_for_nccl() -> Iterator[None]:
    """The library chooses the collectives that it chooses for NCCL."""

    def nccl(*arguments: object) -> str:
        return "nccl"

    with (
        patch.object(collectives, "backend_name", nccl),
        patch.object(row_collectives, "backend_name", nccl),
    ):
        yield
