"""What is on its way from a device to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Landing(NamedTuple):
    """A gradient on its way to the host, to be read after :meth:`wait`."""

    host: torch.Tensor
    copied: torch.Event | None

    def wait(self) -> torch.Tensor:
        """Blocks the host until the gradient is there, and returns it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host
