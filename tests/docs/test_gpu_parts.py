"""What the parts of the GPU suite assert can fail."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gpu_parts
import gpu_suite
import memory
from fsdp_overlap.tools.emulator import EmulatedDevice, fake_ranks, running
from fsdp_overlap.tools.profiling import Report
from harness import simulated_training
from support.ranks import run_ranks
from support.traces import Step, report_of

BLOCKS = 7  # and the root, which the hand-made steps do not have


def test_a_step_that_takes_more_memory_than_it_may_fails() -> None:
    samples = {"ours, prefetch 0": [2.4, 2.5], "ours, prefetch 1": [3.4], "FSDP2": [9.0]}
    gpu_parts.assert_within_bounds(samples)
    samples["ours, prefetch 0"].append(3.2)
    with pytest.raises(AssertionError, match=r"a step takes 3\.20 blocks, at most 3\.1"):
        gpu_parts.assert_within_bounds(samples)


def test_a_loss_or_gradient_that_is_off_or_no_number_fails() -> None:
    gpu_parts.assert_parity("ours", "bfloat16", 1e-3, 1e-2)
    for loss, gradient, what in (
        (0.1, 0.0, "the loss"),
        (0.0, 0.1, "a gradient"),
        (float("nan"), 0.0, "the loss"),
        (0.0, float("nan"), "a gradient"),
    ):
        with pytest.raises(AssertionError, match=f"ours, bfloat16: {what} is off by"):
            gpu_parts.assert_parity("ours", "bfloat16", loss, gradient)


@pytest.mark.slow
def test_a_step_is_within_its_bounds_where_the_host_runs_far_ahead() -> None:
    with fake_ranks(8), running(EmulatedDevice()):
        samplers = memory.samplers(init_device_mesh("emulated", (8,)), blocks=8, width=256)
        peaks = {name: [sample() for _ in range(2)] for name, sample in samplers.items()}
    gpu_parts.assert_within_bounds(peaks)
    assert max(peaks["ours, prefetch 0"]) < 0.6 * min(peaks["FSDP2"])
    assert max(peaks["ours, prefetch 1"]) < 1.15 * min(peaks["FSDP2"])


def reports(steady: Step, first: Step) -> dict[str, Report]:
    return {gpu_parts.OURS: report_of(steady), gpu_parts.FIRST: report_of(first)}


def test_what_is_exposed_fails_in_a_steady_and_in_a_first_step() -> None:
    healthy, exposed = Step(units=BLOCKS + 1), Step(units=BLOCKS + 1, prefetch=0)
    gpu_parts.assert_hidden(reports(healthy, healthy), BLOCKS)
    for steady, first, which in ((exposed, healthy, "forward"), (healthy, exposed, "backward")):
        with pytest.raises(AssertionError, match=rf"0 of \d {which} all-gathers ran under compute"):
            gpu_parts.assert_hidden(reports(steady, first), BLOCKS)
    slow = Step(units=BLOCKS + 1, reduce_scatter=9000)
    with pytest.raises(AssertionError, match="reduce-scatters ran under compute"):
        gpu_parts.assert_hidden(reports(slow, healthy), BLOCKS)


def first_step() -> None:
    dist.destroy_process_group()  # the one real rank's
    bench = simulated_training.Bench.start(simulated_training.SCALES["cpu"], "cpu")
    for step in bench.steps().values():
        step()
    model = bench.new_ours()
    step = simulated_training.make_step(model, bench.batch)
    step()
    gpu_parts.assert_nothing_was_predicted(model)
    ours = gpu_parts.units_of(bench.models[gpu_parts.OURS])[0].context
    assert (
        gpu_parts.units_of(model)[0].context.comm_context.all_gather_stream
        is ours.comm_context.all_gather_stream
    )
    step()
    with pytest.raises(AssertionError, match="prefetch hits"):
        gpu_parts.assert_nothing_was_predicted(model)


def test_a_first_step_is_one_of_which_nothing_was_predicted() -> None:
    run_ranks(first_step, 1)


def test_the_suite_runs_every_file_with_tests_for_a_gpu() -> None:
    rooms = {"cuda": "comm", "cuda_offload": "features", "finalization": "schedule"}
    rooms |= {"compile": "features", "simulated_modes": "docs"}
    found = gpu_suite.tests_marked_gpu()
    assert {f"tests/{room}/test_{name}.py" for name, room in rooms.items()} <= set(found)
    assert "tests/integration/parity/test_parity.py" not in found


def hang(scale: object, device: str, folder: Path, tell: gpu_parts.Tell) -> None:
    tell(gpu_parts.Outcome({"found": 1}, "a page"))
    time.sleep(60)


@pytest.mark.slow
def test_a_part_that_is_not_done_leaves_what_it_found_and_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "speed", hang)
    args = argparse.Namespace(device="cpu", out=tmp_path)
    noted: list[dict[str, Any]] = []
    part = gpu_suite.run_part(multiprocessing.get_context("fork"), "speed", args, 5, noted.append)
    assert part["status"] == "failed"
    assert part["figures"] == {"found": 1}
    assert "not done in 5 s" in part["error"]
    assert "in hang" in part["error"]
    assert len(noted) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("chosen", "error"),
    [("no_such_test", "pytest ended with 5"), ("needs_a_gpu", "no test ran"), ("passes", "")],
)
def test_tests_that_do_not_run_have_failed(tmp_path: Path, chosen: str, error: str) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.skip\ndef test_needs_a_gpu(): pass\ndef test_passes(): pass\n"
    )
    args = argparse.Namespace(device="cpu", out=tmp_path)
    file = str(tmp_path / "test_some.py")
    part = gpu_suite.run_tests(args, "tests", 100, [file, "-k", chosen, f"--rootdir={tmp_path}"])
    assert part["status"] == ("failed" if error else "passed"), part
    assert error in part.get("error", "")


@pytest.mark.slow
def test_tests_that_are_not_done_say_what_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import time\ndef test_fails(): assert not 'wrong'\ndef test_hangs(): time.sleep(60)\n"
    )
    args = argparse.Namespace(device="cpu", out=tmp_path)
    part = gpu_suite.run_tests(args, "tests", 15, [str(tmp_path), f"--rootdir={tmp_path}"])
    assert "not done in 15 s" in part["error"]
    assert "test_some.py::test_fails" in part["page"]
    assert "assert not 'wrong'" in (tmp_path / "tests.txt").read_text()


@pytest.mark.slow
def test_memcheck_fails_by_what_the_tool_says_and_says_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_some.py").write_text("def test_passes(): pass\n")
    monkeypatch.setattr(gpu_suite, "MEMCHECKED", [str(tmp_path), f"--rootdir={tmp_path}"])
    args = argparse.Namespace(device="cpu", out=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    part = gpu_suite.run_memcheck(args, "memcheck", 100)
    assert part["status"] == "passed", part
    assert "without compute-sanitizer" in part["page"]
    tool = tmp_path / "compute-sanitizer"
    for errors, status in ((0, "passed"), (2, "failed")):
        # The options come first.
        lines = "#!/bin/sh", 'shift 6; "$@"', f'echo "===== ERROR SUMMARY: {errors} errors"'
        tool.write_text("\n".join(lines))
        tool.chmod(0o755)
        part = gpu_suite.run_memcheck(args, "memcheck", 100)
        assert part["status"] == status, part
        assert "under memcheck" in part["page"]


def test_optional_parts_run_only_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_suite.py"])
    assert not set(gpu_suite.OPTIONAL) & set(gpu_suite.parse().parts)
    monkeypatch.setattr("sys.argv", ["gpu_suite.py", "--parts", "two_ranks", "memcheck"])
    assert gpu_suite.parse().parts == ["two_ranks", "memcheck"]
    monkeypatch.setattr("sys.argv", ["gpu_suite.py", "--parts", "memcheck", "--device", "cpu"])
    with pytest.raises(SystemExit):
        gpu_suite.parse()
    versions = {"2.28.9": False, "2.30.7": True, "3.0.1": True, None: False}
    found = {version: gpu_suite.has_ranks_on_one_gpu(version) for version in versions}
    assert found == versions
