"""FSDP2 on emulated time: it does what its documents say, and is used as its users do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.tools.emulator import Operation, fake_ranks
from fsdp_overlap.tools.emulator.queues import Queue
from fsdp_overlap.tools.simulator import (
    Clock,
    Costs,
    Device,
    Fabric,
    Fsdp2Training,
    Prediction,
    Training,
    simulate,
)
from support.cli_runs import run_main

RANKS, WIDTH, BLOCKS, VOCABULARY = 8, 64, 4, 128
OF_A_BLOCK = 2 * WIDTH * 4 * WIDTH
OF_ROOT = 2 * VOCABULARY * WIDTH
COSTS = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))


class Divisible(nn.Module):
    """FSDP2 pads no parameter of it, on as many ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


MODEL = f"{__name__}:Divisible"


def fsdp2(**options: Any) -> Prediction:
    training = Fsdp2Training.like(Training(MODEL, RANKS, sequence=128, **options))
    return simulate(training.program, RANKS, COSTS)


def counted(prediction: Prediction) -> dict[str, tuple[int, int]]:
    """How many collectives of each kind there are, and their bytes to or from this rank."""
    found: dict[str, tuple[int, int]] = {}
    for each in prediction.report.collectives:
        number, nbytes = found.get(each.kind, (0, 0))
        found[each.kind] = number + 1, nbytes + (each.nbytes or 0)
    return found


def travels(numel: int, width: int) -> int:
    return numel * width * (RANKS - 1) // RANKS


ALL = BLOCKS * OF_A_BLOCK + OF_ROOT
REDUCED = BLOCKS + 1, travels(ALL, 4)


@pytest.mark.parametrize(
    ("options", "gathered"),
    [
        # Blocks once more in backward; the root is whole until its backward is done.
        ({}, (2 * BLOCKS + 1, travels(ALL + BLOCKS * OF_A_BLOCK, 2))),
        ({"prefetch": 2}, (2 * BLOCKS + 1, travels(ALL + BLOCKS * OF_A_BLOCK, 2))),
        ({"blocks_per_unit": BLOCKS}, (3, travels(ALL + BLOCKS * OF_A_BLOCK, 2))),
        ({"stage": 2}, (BLOCKS + 1, travels(ALL, 2))),
        ({"stage": 2, "microbatches": 2}, (BLOCKS + 1, travels(ALL, 2))),
    ],
)
def test_it_communicates_what_its_documents_say(
    options: dict[str, Any], gathered: tuple[int, int]
) -> None:
    found = counted(fsdp2(**options))
    reduced = BLOCKS // options.get("blocks_per_unit", 1) + 1, REDUCED[1]
    assert found == {"all_gather": gathered, "reduce_scatter": reduced}


def test_it_copies_in_and_out_of_every_collective() -> None:
    names = Counter(
        event["name"] for event in fsdp2().trace["traceEvents"] if event["cat"] == "kernel"
    )
    copies_in = names["chunk_cat"] + names["chunk_cat_mixed_dtype"]  # by the version of torch
    assert copies_in == names["ncclDevKernel_reduce_scatter"] == BLOCKS + 1
    for copy in ("all_gather_copy_in", "split_with_sizes_copy"):
        assert names[copy] == names["ncclDevKernel_all_gather"] == 2 * BLOCKS + 1


def test_prefetch_is_set_as_given() -> None:
    """Two units ahead take the memory of one more."""
    assert fsdp2(prefetch=2).memory > fsdp2().memory


def test_what_it_has_not_is_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"stage": 1},
        {"prefetch": 0},
        {"implicit_units": True},
        {"layout": TensorAtomic()},
        {"gather_dtype": torch.float8_e4m3fn},
        {"optimizer": "muon"},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.*FSDP2 has nothing like it"):
            Fsdp2Training.like(Training(MODEL, RANKS, **options))


def test_a_communicators_collectives_run_in_order_on_whatever_streams() -> None:
    def end(group: dist.ProcessGroup, ready: float) -> float:
        operation = Operation("all_gather", [torch.empty(8)], [torch.empty(64)], group=group)
        return clock.end(operation, Queue(int(ready), ""), 0.0, ready)

    with fake_ranks(8):
        clock = Clock(COSTS)
        one, other = dist.new_group(range(8)), dist.new_group(range(8))
        first = end(one, 5.0)
        assert end(one, 1.0) > first
        assert end(other, 1.0) < 5.0


def test_both_are_shown_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--gpus 8 --sequence 128 --against-fsdp2 --out".split()
    assert run_main("simulate", MODEL, *options, str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "ratio" in shown
    assert "exposed communication" in shown
    assert (tmp_path / "fsdp2" / "rank0.json.gz").exists()
    assert run_main("simulate", MODEL, "--layout", "tensor-atomic", "--against-fsdp2") == 2
    assert "FSDP2 has nothing like it" in capsys.readouterr().err
