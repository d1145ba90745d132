"""Programs that are written for GPUs are predicted as they are, with FSDP2 and with our names."""

from __future__ import annotations

import resource
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.patching import patch_fsdp2
from fsdp_overlap.tools.races.runner import Program
from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Fsdp2Training, Training, simulate
from fsdp_overlap.tools.simulator.program import (
    CollectiveTotal,
    ProgramError,
    ProgramPrediction,
    predict_here,
    predict_program,
)
from support.gpu_programs.llama import BLOCKS, TOKENS
from support.pages import TESTS

PROGRAMS = TESTS / "support" / "gpu_programs"
RANKS = 64
COSTS = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))


@cache
def llama(where: str, ours: bool) -> ProgramPrediction:
    return predict_here(Program(str(PROGRAMS / "llama.py"), [where], steps=4), COSTS, RANKS, ours)


class UnderOurNames(Fsdp2Training):
    """Training as within ``patch_fsdp2()``."""

    def _shard(self, model: Any, units: Any, meshes: Any) -> Any:
        policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype)
        with patch_fsdp2():
            for unit in units:
                torch.distributed.fsdp.fully_shard(
                    unit.modules[0], mesh=meshes.dense, mp_policy=policy
                )
            return torch.distributed.fsdp.fully_shard(model, mesh=meshes.dense, mp_policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize("ours", [True, False])
def test_a_program_takes_what_the_same_training_takes(ours: bool) -> None:
    training = (UnderOurNames if ours else Fsdp2Training).like(
        Training("support.gpu_programs.llama:Llama", RANKS, sequence=TOKENS)
    )
    expected = simulate(training.program, RANKS, COSTS)
    found = llama("meta", ours)
    assert found.seconds == pytest.approx(expected.seconds, rel=2e-3)
    assert found.exposed == pytest.approx(expected.report.exposed_time * 1e-6, rel=2e-3)
    assert found.compute == pytest.approx(expected.compute, rel=2e-3)
    assert found.allocated == pytest.approx(expected.memory, rel=2e-3)
    # The program's allocator also keeps what was free after the model was built.
    assert expected.memory < found.reserved < 1.5 * expected.reserved
    kinds = {kind: total.count for kind, total in found.collectives.items()}
    assert kinds == {
        kind: sum(each.kind == kind for each in expected.collectives)
        for kind in {each.kind for each in expected.collectives}
    }
    assert found.low < found.seconds < found.high
    assert found.seconds_of_steps[-1] == pytest.approx(found.seconds_of_steps[-2])


def test_ours_keeps_the_last_block_and_checks_the_order() -> None:
    theirs, ours = llama("meta", False), llama("meta", True)
    assert theirs.collectives["all_gather"].count == 2 * BLOCKS + 1
    assert ours.collectives["all_gather"].count == 2 * BLOCKS
    assert theirs.collectives["reduce_scatter"] == ours.collectives["reduce_scatter"]
    assert ours.seconds < theirs.seconds


@pytest.mark.slow
@pytest.mark.parametrize(("where", "ours"), [("cuda", False), ("cpu", True)])
def test_where_a_model_is_built_changes_nothing(where: str, ours: bool) -> None:
    """Built on the host, it takes no memory there either."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, expected = llama(where, ours), llama("meta", ours)
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-3)
    assert found.allocated == pytest.approx(expected.allocated, rel=1e-3)
    assert found.collectives == expected.collectives
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # of 3.6 GB


@pytest.mark.slow
def test_a_process_of_its_own_predicts_the_same() -> None:
    program = Program(str(PROGRAMS / "fsdp2.py"), ["hsdp", "mixed"])
    found = predict_program(program, COSTS, RANKS, ours=False)
    assert found == predict_here(program, COSTS, RANKS, ours=False)
    assert len(found.seconds_of_steps) == 2  # it ends after 3 steps by itself
    assert found.collectives["all_gather"].count == 7


READS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
told = [None] * dist.get_world_size()
dist.all_gather_object(told, "a word")
assert told[0] == "a word"
model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100)).cuda()
model[1].weight = model[0].weight
fully_shard(model)
assert len(list(model.parameters())) == 2  # still tied
optimizer = torch.optim.AdamW(model.parameters())
for _ in range({steps}):
    tokens = torch.randint(100, (4, 128), device="cuda")
    tokens[0, :10] = -100
    count = (tokens != -100).sum()
    dist.all_reduce(count)
    loss = nn.functional.cross_entropy(model(tokens.abs() % 100).flatten(0, 1), tokens.flatten())
    loss = loss / count.item()
    if loss.isnan() or not torch.isfinite(loss).all():
        raise SystemExit(1)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not norm.isfinite():
        raise SystemExit(1)
    {line}
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), norm.item())
"""


def reading(folder: Path, line: str = "pass", steps: int = 2) -> ProgramPrediction:
    path = folder / "reads.py"
    path.write_text(READS.format(line=line, steps=steps))
    return predict_here(Program(str(path)), COSTS, RANKS, ours=False)


def test_what_programs_read_of_numbers(tmp_path: Path) -> None:
    """Of integers they read values, of others zeros, which count as finite."""
    kinds = reading(tmp_path).collectives
    assert kinds["all_reduce"].count == 2
    # 100 rows are padded to 2 on each of 64 ranks.
    assert kinds["reduce_scatter"] == CollectiveTotal(1, 4 * 128 * (64 + 1))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("if loss > 5: print()", r"depends on a value \(\S*reads\.py:31"),
        ("if norm > 5: print()", r"depends on a value \(.*reads\.py:31"),
        ("torch.nonzero(loss)", r"depends on a value \(\S*reads\.py:31"),
        ("1 / loss.item()", r"division by zero \(\S*reads\.py:31.*zeros, last by item at \S*:31"),
        ("torch.cuda.list_gpu_processes()", r"is not emulated; called at \S*reads\.py:31"),
        ("sys.exit(3)", r"ended with exit status 3"),
    ],
)
def test_what_cannot_be_known_is_an_error(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        reading(tmp_path, line)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"made one step .* let it make more steps"):
        reading(tmp_path, steps=1)
    with pytest.raises(ValueError, match="at least 2 steps"):
        predict_program(Program("none.py"), COSTS, RANKS, ours=True, steps=1)
    with pytest.raises(ValueError, match="compiles=True"):
        predict_program(
            Program("none.py"), Costs(COSTS.device, COSTS.fabric, compiles=True), 64, ours=True
        )
