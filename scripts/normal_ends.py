"""Does a program that trains end normally? Runs one on two ranks of gloo again and again.

    .venv/bin/python scripts/normal_ends.py --runs 50

Prints how many of the runs ended with exit code 0 on both ranks, and what the others said. The
program trains, gathers its parameters, takes a last step, which gathers for a forward that never
comes, and destroys its process group, with nothing in between that would give threads time to come
to rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

RANKS = 2
WIDTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the runs of a program that end with 0.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument(
        "--fsdp2", action="store_true", help="shard by torch.distributed.fsdp, to compare"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        train(args.rank, args.store, args.fsdp2)
        return
    normal = sum(ends_normally(args.fsdp2) for _ in range(args.runs))
    print(f"{normal} of {args.runs} runs ended with 0")
    sys.exit(normal < args.runs)


def ends_normally(fsdp2: bool) -> bool:
    """Whether one run did, on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--store", os.path.join(folder, "store")]
        command += ["--fsdp2"] if fsdp2 else []
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], stderr=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        said = [process.communicate(timeout=300)[1] for process in ranks]
    for rank, (process, text) in enumerate(zip(ranks, said, strict=True)):
        if process.returncode:
            print(f"rank {rank} ended with {process.returncode}: {text.strip()}")
    return not any(process.returncode for process in ranks)


def train(rank: int, store: str, fsdp2: bool) -> None:
    """The program, on one rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    if fsdp2:
        from torch.distributed.fsdp import fully_shard
        from torch.optim import AdamW
    else:
        from fsdp_overlap import fully_shard
        from fsdp_overlap.optim import AdamW
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    options = {} if fsdp2 else {"prefetch_next_forward": True}
    optimizer = AdamW(model.parameters(), **options)
    for step in range(4):
        model(torch.ones(2, WIDTH)).sum().backward()
        if step == 3:
            assert all(each.full_tensor().isfinite().all() for each in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    # Kept as globals would be: the model is freed when Python ends, and not before.
    globals()["kept"] = model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
