"""How much memory a piece of a program takes at most."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from typing import Any

# With this environment freed blocks of 64 KiB and more go back to the system at once.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class PeakMemory:
    """How far resident memory rises above what it is on entry: `nbytes`, known after the end.

    The kernel keeps the peak. Where it may not be reset, a thread looks once a millisecond.
    """

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).malloc_trim(0)
        self._done = threading.Event()
        self._watcher: threading.Thread | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
        except OSError:
            self._watcher = threading.Thread(target=self._watch)
            self._watcher.start()
        self._before = self._peak = resident("VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._watcher is None:
            self._peak = resident("VmHWM")
        else:
            self._done.set()
            self._watcher.join()
        self.nbytes = max(0, self._peak - self._before)

    def _watch(self) -> None:
        while not self._done.wait(1e-3):
            self._peak = max(self._peak, resident("VmRSS"))


class AllocatorPeak:
    """The same of what the allocator counts on the current device of a type such as "cuda"."""

    def __init__(self, device_type: str) -> None:
        import torch

        self._device: Any = torch.get_device_module(device_type)

    def __enter__(self) -> AllocatorPeak:
        self._device.synchronize()
        self._device.reset_peak_memory_stats()
        self._before = self._device.memory_allocated()
        return self

    def __exit__(self, *_: Any) -> None:
        self.nbytes = self._device.max_memory_allocated() - self._before


def resident(field: str) -> int:
    """`field` of this process's status, such as VmRSS, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
