"""What the parts of the GPU suite assert can fail."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gpu_parts
import gpu_suite
import gpu_tests
import llama
import memory
import predicted_llama
from fsdp_overlap.tools.emulator import EmulatedDevice, fake_ranks, running
from fsdp_overlap.tools.profiling import Report
from harness import simulated_training, traces
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
    gpu_parts.assert_parity("ours", 1e-3, 1e-2)
    for loss, gradient, what in (
        (0.1, 0.0, "the loss"),
        (0.0, 0.1, "a gradient"),
        (float("nan"), 0.0, "the loss"),
        (0.0, float("nan"), "a gradient"),
    ):
        with pytest.raises(AssertionError, match=f"ours: {what} is off by"):
            gpu_parts.assert_parity("ours", loss, gradient)


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
    gpu_parts.assert_is_first_step(model)
    ours = gpu_parts.units_of(bench.models[gpu_parts.OURS])[0].context
    assert (
        gpu_parts.units_of(model)[0].context.comm_context.all_gather_stream
        is ours.comm_context.all_gather_stream
    )
    step()
    with pytest.raises(AssertionError, match="prefetch hits"):
        gpu_parts.assert_is_first_step(model)


def test_a_first_step_gathers_ahead_in_order_of_registration() -> None:
    run_ranks(first_step, 1)


def test_the_suite_runs_every_file_with_tests_for_a_gpu() -> None:
    rooms = {"cuda": "comm", "cuda_offload": "features", "finalization": "schedule"}
    rooms |= {"compile": "features", "simulated_modes": "docs"}
    found = gpu_tests.files_with("gpu")
    assert {f"tests/{room}/test_{name}.py" for name, room in rooms.items()} <= set(found)
    assert "tests/integration/parity/test_parity.py" not in found


def test_two_ranks_share_a_gpu_in_a_part_of_their_own() -> None:
    ranks, of_one = gpu_tests.tests()["ranks"], gpu_tests.tests()["tests"]
    assert ranks.chosen[0] == "tests/comm/test_two_ranks.py"  # of which one step is first
    others = "comm/test_cuda", "comm/test_groups", "features/test_conditional"
    assert {f"tests/{name}.py" for name in others} < set(ranks.chosen)
    assert ranks.env == {"FSDP_OVERLAP_RANKS_ON_GPUS": "2"}
    assert "gpu and not two_ranks" in of_one.chosen


def arguments(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(device="cpu", out=folder, all=False, budget=560)


def hang(room: object, tell: gpu_parts.Tell) -> None:
    tell(gpu_parts.Outcome({"found": 1}, "a page", "one"))
    time.sleep(60)


@pytest.mark.slow
def test_a_part_that_is_not_done_leaves_what_it_found_and_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "speed", hang)
    noted: list[dict[str, Any]] = []
    context = multiprocessing.get_context("fork")
    part = gpu_suite.run_part(context, "speed", arguments(tmp_path), 5, noted.append)
    assert part["status"] == "failed"
    assert part["figures"] == {"found": 1}
    assert "not done in 5 s" in part["error"]
    assert "in hang" in part["error"]
    assert [each["said"] for each in noted] == ["one"]


def run_tests(
    folder: Path, *chosen: str, seconds: float = 100, said: list[str] | None = None
) -> gpu_tests.Part:
    tests = gpu_tests.Tests([*chosen, f"--rootdir={folder}"])
    say = [].append if said is None else said.append
    return gpu_tests.run_tests(arguments(folder), "tests", seconds, tests, say, "sources")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("chosen", "error"),
    [("no_such_test", "pytest ended with 5"), ("needs_a_gpu", "no test ran"), ("passes", None)],
)
def test_tests_that_do_not_run_have_failed(tmp_path: Path, chosen: str, error: str | None) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.skip\ndef test_needs_a_gpu(): pass\ndef test_passes(): pass\n"
    )
    part = run_tests(tmp_path, str(tmp_path / "test_some.py"), "-k", chosen)
    assert part["status"] == ("failed" if error else "passed"), part
    assert (error or "") in (part["error"] or "")


@pytest.mark.slow
def test_what_passed_is_not_repeated_until_its_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    text = "def test_passes(): pass\ndef test_fails(): assert {}\n"
    file.write_text(text.format(False))
    said: list[str] = []
    part = run_tests(tmp_path, str(file), said=said)
    assert "1 failed, 1 passed" in part["page"]
    assert [line.rpartition("/")[0].partition("/2 ")[2][:6] for line in said] == [
        "passed",
        "FAILED",
    ]
    assert said[-1].endswith("test_some.py::test_fails")
    part = run_tests(tmp_path, str(file))
    assert "1 failed, 1 deselected" in part["page"]
    assert "1 passed before" in part["page"]
    file.write_text(text.format(True))
    part = run_tests(tmp_path, str(file))
    assert "`2 passed in" in part["page"]
    part = run_tests(tmp_path, str(file))
    assert part["status"] == "passed", part
    assert "2 passed before" in part["page"]


@pytest.mark.slow
def test_tests_that_are_not_done_say_what_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import time\ndef test_fails(): assert not 'wrong'\ndef test_hangs(): time.sleep(60)\n"
    )
    part = run_tests(tmp_path, str(tmp_path), seconds=15)
    assert "not done in 15 s" in part["error"]
    assert "test_some.py::test_fails" in part["page"]
    assert "assert not 'wrong'" in (tmp_path / "tests.txt").read_text()


@pytest.mark.slow
def test_memcheck_fails_by_what_the_tool_says_and_says_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_some.py").write_text("def test_passes(): pass\n")
    tests = gpu_tests.Tests([str(tmp_path), f"--rootdir={tmp_path}"])
    monkeypatch.setattr(gpu_tests, "tests", lambda: {"memcheck": tests})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def run(sources: str) -> gpu_tests.Part:
        args = arguments(tmp_path)
        return gpu_tests.run_memcheck(args, "memcheck", 100, [].append, sources)

    part = run("without the tool")
    assert part["status"] == "passed", part
    assert "without compute-sanitizer" in part["page"]
    tool = tmp_path / "compute-sanitizer"
    for errors, status in ((0, "passed"), (2, "failed")):
        # The options come first.
        lines = "#!/bin/sh", 'shift 6; "$@"', f'echo "===== ERROR SUMMARY: {errors} errors"'
        tool.write_text("\n".join(lines))
        tool.chmod(0o755)
        part = run(f"{errors} errors")
        assert part["status"] == status, part
        assert "under memcheck" in part["page"]


ABOUT = {"device": "CPU", "torch": "2.11.0", "cuda": None, "nccl": None, "speeds": "fast"}


def test_parts_that_passed_are_not_repeated_by_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run_part(context: object, name: str, *_: object) -> gpu_tests.Part:
        ran.append(name)
        return {"status": "passed" if name == "speed" else "failed", "error": None}

    monkeypatch.setattr(gpu_suite, "run_part", run_part)
    monkeypatch.setattr(gpu_suite, "STARTED", time.monotonic())
    args = arguments(tmp_path)
    for _ in range(2):
        suite = gpu_suite.Suite(args, ABOUT)
        for name in ("speed", "memory"):
            suite.run(name, None)
    assert ran == ["speed", "memory", "memory"]
    assert "speed: passed before" in capsys.readouterr().out
    assert set(suite.results["parts"]) == {"speed", "memory"}  # of both commands
    gpu_suite.Suite(args, ABOUT | {"torch": "2.13.0"}).run("speed", None)
    args.all = True
    gpu_suite.Suite(args, ABOUT).run("speed", None)
    assert ran[3:] == ["speed", "speed"]


def test_a_part_for_which_no_time_is_left_keeps_what_it_found_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"status": "failed", "error": "not done", "page": "half a table"}
    monkeypatch.setattr(gpu_suite, "run_part", lambda *_: found)
    monkeypatch.setattr(gpu_suite, "STARTED", time.monotonic())
    args = arguments(tmp_path)
    gpu_suite.Suite(args, ABOUT).run("training", None)
    args.budget = 0
    suite = gpu_suite.Suite(args, ABOUT)
    suite.run("training", None)
    assert suite.results["parts"]["training"]["error"] == "not begun: 0 s were over"
    assert "half a table" in (tmp_path / "summary.md").read_text()
    monkeypatch.setattr(gpu_suite, "digest", lambda *_: "other sources")
    gpu_suite.Suite(args, ABOUT).run("training", None)
    assert "half a table" not in (tmp_path / "summary.md").read_text()


def test_optional_parts_run_only_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_suite.py"])
    assert not set(gpu_suite.OPTIONAL) & set(gpu_suite.parse().parts)
    monkeypatch.setattr("sys.argv", ["gpu_suite.py", "--parts", "ranks", "memcheck"])
    assert gpu_suite.parse().parts == ["ranks", "memcheck"]
    monkeypatch.setattr("sys.argv", ["gpu_suite.py", "--parts", "memcheck", "--device", "cpu"])
    with pytest.raises(SystemExit):
        gpu_suite.parse()


def exposed_on_a_cpu() -> float:
    model = torch.nn.Linear(4, 4)
    return traces.Exposed(lambda: model(torch.ones(2, 4)).sum().backward(), 1).value()


def test_a_process_of_its_own_reads_a_trace() -> None:
    assert run_ranks(exposed_on_a_cpu, 1) == [0.0]


def refuse(*_: object) -> NoReturn:
    raise NotImplementedError("not here")


def table_without_one() -> tuple[str, list[str], set[str]]:
    dist.destroy_process_group()
    llama.SYSTEMS["refuses"] = refuse
    said: list[str] = []
    systems = ["--systems", llama.UNSHARDED, "refuses", llama.OURS]
    args = llama.parse([*"--device cpu --model tiny --steps 1 --rounds 2".split(), *systems])
    found = llama.measured(args, lambda _, line: said.append(line))
    return found.about, said, {figure.system for figure in found.figures}


@pytest.mark.slow
def test_a_system_that_raises_is_left_out_of_the_table() -> None:
    [(about, said, systems)] = run_ranks(table_without_one, 1)
    assert "; refuses raised;" in about
    assert [line.partition(":")[0] for line in said] == [
        llama.UNSHARDED,
        "refuses raised",
        *(llama.OURS, llama.OURS, llama.UNSHARDED),
    ]
    assert systems == {llama.UNSHARDED, llama.OURS}


def predicted(*arguments: str) -> dict[str, list[float]]:
    """The figures of each row: milliseconds of a step, of its compute and exposed ones, GiB."""
    argv = ["predicted_llama.py", "--model", "tiny", *arguments]
    with patch.object(sys, "argv", argv), redirect_stdout(StringIO()) as shown:
        predicted_llama.main()
    _, _, *rows = (line.strip("| ").split("|") for line in shown.getvalue().splitlines())
    return {name.strip(): [float(cell) for cell in cells] for name, *cells in rows}


@pytest.mark.slow
def test_the_table_is_predicted_without_a_gpu() -> None:
    rates = ["--gigabytes-per-s", "0.001"]
    rows = predicted(*rates)
    assert [*rows] == [*predicted_llama.SYSTEMS]
    assert all(exposed > 0 for _, _, exposed, _ in rows.values())
    by_range = predicted(*rates, "--range-us", "5000")
    exposes_more = {name for name in rows if by_range[name][2] > rows[name][2] + 10}
    assert exposes_more == {llama.WHOLE}  # of which alone shards are ragged
