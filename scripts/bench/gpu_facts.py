"""Print which device there is, and how fast it multiplies and copies, as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch


def per_second(run: Callable[[], object], amount: float) -> float:
    """`amount` a call, of the fastest of three."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return amount / min(seconds[1:])


def speeds(device: str) -> str:
    size, nbytes = (8192, 1 << 30) if device == "cuda" else (512, 1 << 24)
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty(nbytes // 4, dtype=torch.uint8, pin_memory=device == "cuda")
    teraflops = per_second(lambda: a @ a, 2e-12 * size**3)
    copied = per_second(lambda: there[: nbytes // 2].copy_(there[nbytes // 2 :]), nbytes / 1e9)
    to, back = (
        per_second(lambda pair=pair: pair[0].copy_(pair[1]), here.nbytes / 1e9)  # type: ignore[misc]
        for pair in ((there[: len(here)], here), (here, there[: len(here)]))
    )
    return (
        f"bfloat16 {teraflops:.3g} TFLOP/s, memory {copied:.3g} GB/s, "
        f"from the host {to:.3g} GB/s, to it {back:.3g} GB/s"
    )


def main() -> None:
    wanted = sys.argv[1]
    device = {"cpu": "CPU", "cuda": None}[wanted]
    nccl = None
    if wanted == "cuda" and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    about = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}
    print(json.dumps(about | {"speeds": speeds(wanted) if device else ""}))


if __name__ == "__main__":
    main()
