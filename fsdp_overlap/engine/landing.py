"""What is on its way from a device to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsdp_overlap.comm.streams import mark_enqueued


class Landing(NamedTuple):
    """A gradient on its way to the host, to be read after :meth:`wait`."""

    host: torch.Tensor
    copied: torch.Event | None

    def wait(self) -> torch.Tensor:
        """Blocks the host until the gradient is there, and returns it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host


def land(source: torch.Tensor, host: torch.Tensor) -> Landing:
    """Enqueues the copy of ``source`` to ``host``, after the work that makes it."""
    host.copy_(source, non_blocking=True)
    return Landing(host, mark_enqueued(source.device))
