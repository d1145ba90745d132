"""Copies from a device to the host that are under way."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsdp_overlap.comm.comm_streams import mark_enqueued


class D2HCopy(NamedTuple):
    """A gradient on its way to the host, to be read after :meth:`wait`."""

    host: torch.Tensor
    copied: torch.Event | None

    def is_done(self) -> bool:
        """Return whether :meth:`wait` would return at once."""
        return self.copied is None or self.copied.query()

    def wait(self) -> torch.Tensor:
        """Block the host until the gradient is there, and return it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host


def copy_to_host(source: torch.Tensor, host: torch.Tensor) -> D2HCopy:
    """Enqueue the copy of ``source`` to ``host``, after the work that makes it."""
    host.copy_(source, non_blocking=True)
    return D2HCopy(host, mark_enqueued(source.device))
