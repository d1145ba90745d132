"""What is said of a race: both lines, the missing wait, and the same as text, JSON and a page."""

from __future__ import annotations

import json
import pickle
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import patch

import pytest
import torch
from playwright.sync_api import Page, sync_playwright
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_overlap.tools.emulator import (
    EmulatedDevice,
    Event,
    Finding,
    Stream,
    current_stream,
    fake_ranks,
    running,
)
from fsdp_overlap.tools.emulator.queues import RECENT
from fsdp_overlap.tools.races.report import (
    HEADINGS,
    RaceReport,
    describe,
    faults_of,
    summary,
    to_json,
    write_page,
)
from fsdp_overlap.tools.races.rules import RULES, name_of_rule
from support.browser import find_browser
from support.emulated import kinds

HEAD = """\
import torch, torch.distributed as dist
from fsdp_overlap.tools.emulator import Stream, current_stream, stream
side = Stream()
x = torch.zeros(8, device="emulated")
"""

Run = Callable[..., EmulatedDevice]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a program, of which the first line after the imports is the fifth."""
    monkeypatch.chdir(tmp_path)

    def run(program: str, **options: Any) -> EmulatedDevice:
        path = tmp_path / "train.py"
        path.write_text(HEAD + dedent(program))
        with fake_ranks(2), running(EmulatedDevice(**options)) as device:
            runpy.run_path(str(path))
        return device

    return run


# What is said of each kind


def test_a_race_names_both_lines_the_streams_and_the_wait_that_is_missing(run: Run) -> None:
    device = run("""\
        def step():
            with stream(side):
                x.add_(1)
        step()
    """)
    assert describe(device.findings) == "\n".join(
        (
            "race: operations on the same memory that nothing orders",
            "  zeros on the default stream writes    train.py:4 in <module>",
            "  add_ on stream 2 (train.py:3) writes  train.py:7 in step",
            "  missing: stream 2 (train.py:3) has to wait for the default stream before "
            "train.py:7: side.wait_stream(torch.cuda.default_stream())",
            "  waits: stream 2 (train.py:3) never waited for the default stream",
        )
    )
    assert str(device.findings[0]) == (
        "race: add_ on stream 2 (train.py:3) writes memory (train.py:7 in step); nothing orders it "
        "after zeros on the default stream, which writes it (train.py:4 in <module>); missing: "
        "stream 2 (train.py:3) has to wait for the default stream before train.py:7: "
        "side.wait_stream(torch.cuda.default_stream())"
    )


def test_the_same_lines_are_one_finding(run: Run) -> None:
    device = run("""\
        for _ in range(3):
            x.mul_(2)
            with stream(side): x.add_(1)
    """)
    counts = [(f.first.operation, f.second.operation, f.count) for f in device.findings]
    assert counts == [("mul_", "add_", 3), ("add_", "mul_", 2)]
    assert describe(device.findings[:1]).startswith(
        "race: operations on the same memory that nothing orders (3 times)\n"
    )
    device.findings.clear()
    assert not device.findings


def test_findings_that_one_wait_would_mend_are_one_fault(run: Run) -> None:
    device = run("""\
        with stream(side):
            x.add_(1)
            x.mul_(2)
        y = x.exp() + x
        side.wait_stream(current_stream())
        with stream(side): x.sin_()
        x.neg()
    """)
    operations = [each.first.operation for each in device.findings if each.first is not None]
    assert operations == ["zeros", "mul_", "mul_", "sin_"]
    faults = [each["findings"] for each in to_json(device)["faults"]]
    assert faults == [[0], [1, 2], [3]]
    texts = describe(device.findings).split("\n\n")
    assert len(texts) == 3
    assert texts[1] == "\n".join(
        (
            "race: operations on the same memory that nothing orders (2 times)",
            "  mul_ on stream 2 (train.py:3) writes  train.py:7 in <module>",
            "  exp on the default stream reads       train.py:8 in <module>",
            "  add on the default stream reads       train.py:8 in <module>",
            f"  missing: {device.findings[1].missing}",
            f"  waits: {device.findings[1].last_wait}",
        )
    )


@pytest.mark.parametrize(
    ("program", "missing", "waits"),
    [
        (
            """\
            side.wait_stream(current_stream())
            x.mul_(2)
            with stream(side): x.add_(1)
            """,
            "stream 2 (train.py:3) has to wait for the default stream before train.py:7: "
            "side.wait_stream(torch.cuda.default_stream())",
            "stream 2 (train.py:3) last waited for the default stream at train.py:5, for what was "
            "enqueued before mul_ (train.py:6)",
        ),
        (
            """\
            early = current_stream().record_event()
            x.mul_(2)
            side.wait_event(early)
            with stream(side): x.add_(1)
            """,
            "stream 2 (train.py:3) has to wait for the default stream before train.py:8: "
            "side.wait_stream(torch.cuda.default_stream())",
            "stream 2 (train.py:3) last waited for the default stream at train.py:7, for what was "
            "enqueued before mul_ (train.py:6)",
        ),
        (
            """\
            other = [Stream()]
            other[0].wait_stream(current_stream())
            with stream(side): x.add_(1)
            """,
            "stream 2 (train.py:3) has to wait for the default stream before train.py:7: "
            "side.wait_stream(torch.cuda.default_stream())",
            "stream 2 (train.py:3) never waited for the default stream; stream 3 (train.py:5) "
            "waited for it at train.py:6",
        ),
        (
            """\
            side.wait_stream(current_stream())
            with stream(side): x.add_(1)
            x.sum()
            """,
            "the default stream has to wait for stream 2 (train.py:3) before train.py:7: "
            "torch.cuda.current_stream().wait_stream(side)",
            "the default stream never waited for stream 2 (train.py:3)",
        ),
        (
            """\
            work = dist.all_reduce(x, async_op=True)
            x.sum()
            work.wait()
            """,
            "the default stream has to wait for the all_reduce before train.py:6: work.wait()",
            "the default stream never waited for NCCL's stream of group 0",
        ),
        (
            """\
            work = dist.all_reduce(x, async_op=True)
            with stream(side): work.wait()
            x.sum()
            """,
            "the default stream has to wait for the all_reduce before train.py:7: work.wait()",
            "the default stream never waited for NCCL's stream of group 0; stream 2 (train.py:3) "
            "waited for it at train.py:6",
        ),
        (
            """\
            side.wait_stream(current_stream())
            with stream(side): x.add_(1)
            dist.all_reduce(x, async_op=True).wait()
            """,
            "the stream that calls the all_reduce has to wait for stream 2 (train.py:3) before "
            "train.py:7: torch.cuda.current_stream().wait_stream(side)",
            "NCCL's stream of group 0 never waited for stream 2 (train.py:3)",
        ),
        (
            """\
            copy = x.to("cpu", non_blocking=True)
            copy.sum()
            """,
            "the host has to wait for the default stream before train.py:6: "
            "torch.cuda.default_stream().synchronize(), or synchronize() of an event that is "
            "recorded after train.py:5",
            "the host never waited for the default stream",
        ),
        (
            """\
            y = torch.ones(8, device="emulated")
            side.wait_stream(current_stream())
            with stream(side): y.sum()
            del y
            torch.ones(8, device="emulated")
            """,
            "tensor.record_stream(side) before the memory is freed at train.py:8, or a wait for "
            "stream 2 (train.py:3) there",
            "the default stream never waited for stream 2 (train.py:3)",
        ),
        (
            """\
            y = torch.ones(1 << 18, device="emulated")
            work = dist.all_reduce(y, async_op=True)
            del y
            with stream(side): work.wait()
            torch.ones(1 << 18, device="emulated")
            """,
            "work.wait() on the stream that the tensor was made on, before the memory is freed at "
            "train.py:8",
            "the default stream never waited for NCCL's stream of group 0; stream 2 (train.py:3) "
            "waited for it at train.py:8",
        ),
    ],
)
def test_what_would_have_ordered_them(run: Run, program: str, missing: str, waits: str) -> None:
    [finding] = run(program).findings
    assert finding.missing == missing
    assert finding.last_wait == waits


def test_memory_that_is_freed_too_early_is_one_finding_whatever_gets_it(run: Run) -> None:
    device = run("""\
        y = torch.ones(8, device="emulated")
        side.wait_stream(current_stream())
        with stream(side): y.sum()
        del y
        torch.ones(8, device="emulated")
        torch.zeros(4, device="emulated")
    """)
    assert "\n".join(describe(device.findings).splitlines()[:5]) == dedent("""\
        reuse: memory used again before operations of its last owner (2 times)
          sum on stream 2 (train.py:3) reads  train.py:7 in <module>
          ones on the default stream writes   train.py:9 in <module>
          freed                               train.py:8 in <module>
          taken again                         train.py:9 in <module>""")


def test_use_of_freed_memory_names_where_it_was_freed(run: Run) -> None:
    device = run("""\
        x.untyped_storage().resize_(0)
        try:
            x.sum()
        except RuntimeError as error:
            assert "sum uses memory that is freed (train.py:7 in <module>)" in str(error)
    """)
    assert describe(device.findings) == dedent("""\
        freed: an operation on memory that was freed
          sum on the default stream uses  train.py:7 in <module>
          freed                           train.py:5 in <module>""")


def test_another_device_is_named(run: Run) -> None:
    device = run("torch.zeros(1, device='emulated:1')")
    assert describe(device.findings) == dedent("""\
        context: a thread that uses another device
          the host makes a context on device 1  train.py:5 in <module>""")


# Lines


def test_a_line_of_a_library_stands_beside_that_of_the_program(run: Run, tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "lib" / "core.py"
    library.parent.mkdir(parents=True)
    library.write_text("def grow(x):\n    def inner():\n        x.add_(1)\n    inner()\n")
    device = run(f"""\
        import sys; sys.path.insert(0, {str(library.parents[1])!r})
        from lib.core import grow
        with stream(side):
            grow(x)
    """)
    [finding] = device.findings
    assert finding.second is not None
    assert {of: str(line) for of, line in finding.second.site.lines.items()} == {
        "program": "train.py:8 in <module>",
        "library": "lib/core.py:3 in inner",
    }
    assert "before lib/core.py:3: side.wait_stream" in finding.missing
    assert describe([finding]).splitlines()[2:4] == [
        "  add_ on stream 2 (train.py:3) writes  train.py:8 in <module>",
        "                                        lib/core.py:3 in inner",
    ]


def test_backward_names_its_call_and_the_forward_of_the_node(run: Run) -> None:
    device = run("""\
        w = torch.ones(8, device="emulated", requires_grad=True)
        z = w * x
        side.wait_stream(current_stream())
        with stream(side): x.data.add_(1)
        z.sum().backward()
        x.sum()
    """)
    backward, after = device.findings
    assert backward.second is not None
    assert {of: str(line) for of, line in backward.second.site.lines.items()} == {
        "program": "train.py:9 in <module>",
        "forward": "train.py:6 in <module>",
    }
    assert "  mul on the default stream reads" in describe([backward])
    assert describe([backward]).splitlines()[3].endswith("  backward of train.py:6 in <module>")
    assert after.second is not None
    assert list(after.second.site.lines) == ["program"]


def test_a_backward_within_another_goes_back_to_its_node(run: Run) -> None:
    device = run("""\
        w = torch.ones(8, device="emulated", requires_grad=True)
        z = w * 2
        def hook(gradient):
            with torch.enable_grad():
                (gradient.detach().requires_grad_() * 3).sum().backward()
            with stream(side): gradient.add_(1)
        z.register_hook(hook)
        z.exp().sum().backward()
    """)
    finding = device.findings[0]
    assert finding.second is not None
    assert {of: str(line) for of, line in finding.second.site.lines.items()} == {
        "program": "train.py:10 in hook",
        "forward": "train.py:6 in <module>",
    }


def test_a_stream_without_a_variable_of_its_own_is_described(run: Run) -> None:
    device = run("""\
        sides = [Stream() for _ in range(2)]
        with stream(sides[1]): x.add_(1)
        x.sum()
    """)
    assert [finding.missing for finding in device.findings] == [
        "stream 4 (train.py:5) has to wait for the default stream before train.py:6: "
        "torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())",
        "the default stream has to wait for stream 4 (train.py:5) before train.py:7",
    ]


def test_fsdp2_is_named_where_it_leaves_a_wait_out() -> None:
    with fake_ranks(2), running(EmulatedDevice()) as device, patch.object(Event, "wait", _nothing):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("emulated")
        mesh = init_device_mesh("emulated", (2,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        model(torch.zeros(2, 8, device="emulated")).sum().backward()
    accesses = [each for f in device.findings for each in (f.first, f.second) if each is not None]
    of_library = [each.site.library for each in accesses if each.site.library is not None]
    assert all("torch/distributed/fsdp/" in line.place for line in of_library)
    assert of_library
    for access in accesses:
        assert access.site.program is not None
        assert access.site.program.file == __file__
    assert any("(_fsdp_param_group.py:" in access.stream for access in accesses)
    assert any(access.site.forward is not None for access in accesses)


def _nothing(*_: object) -> None:
    pass


# What is allowed


@pytest.mark.parametrize(
    ("comment", "allowed"),
    [
        ("  # races: allow", "train.py:7"),
        ("  # races: allow, a metric", "train.py:7: a metric"),
        ("  # noqa  # races: allow: a metric ", "train.py:7: a metric"),
        ("  # allow", ""),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_comment_allows_what_its_line_does(
    run: Run, comment: str, allowed: str, is_first: bool
) -> None:
    first, second = "x.mul_(2)", "with stream(side): x.add_(1)"
    order = "side.wait_stream(current_stream())"
    program = f"pass\n{order}\n{first}{comment}\n{second}"
    if not is_first:
        program = f"{order}\n{first}\n{second}{comment}"
    device = run(program)
    assert [finding.allowed for finding in device.allowed] == ([allowed] if allowed else [])
    assert kinds(device) == ([] if allowed else ["race"])


@pytest.mark.parametrize(
    ("allow", "is_allowed"),
    [("train.py:5", True), ("train.py:6", True), ("train.py:7", False), ("rain.py:5", False)],
)
def test_lines_are_allowed_by_name(run: Run, allow: str, is_allowed: bool) -> None:
    device = run("x.mul_(2)\nwith stream(side): x.add_(1)", allow=[allow])
    assert [finding.allowed for finding in device.allowed] == ([allow] if is_allowed else [])
    assert bool(device.findings) is not is_allowed


# Waits of the host


@pytest.mark.parametrize(
    ("steps", "times"), [(1, None), (2, 2), (3, 2), (4, 3), (9, 3)], ids=lambda each: str(each)
)
def test_waits_of_each_of_the_last_steps_are_reported(
    run: Run, steps: int, times: int | None
) -> None:
    device = run(f"""\
        from fsdp_overlap.tools.emulator import active
        for step in range({steps}):
            x.sum().item()
            x.sum().item()  # races: allow
            if step % 2: x.tolist()
            active().mark_step()
        x.sum().item()
    """)
    assert device.steps == steps
    waits = device.steady_waits()
    assert [wait.count for wait in waits] == ([] if times is None else [times])
    if waits:
        assert describe(waits).splitlines()[1:] == [
            "  the host waits in _local_scalar_dense  train.py:7 in <module>"
        ]
    assert not device.findings


# The forms of the report

PROGRAM = """\
    from fsdp_overlap.tools.emulator import active
    copy = x.to("cpu", non_blocking=True)
    copy.sum(); copy.exp()
    for step in range(3):
        side.wait_stream(current_stream())
        with stream(side): x.add_(1)
        x.mul_(2)  # races: allow, as <b>expected</b>
        with stream(side): torch.sum(x) < 1
        y = torch.ones(8, device="emulated")
        side.wait_stream(current_stream())
        with stream(side): y.sum()
        del y
        torch.ones(8, device="emulated")
        x[0].item()
        active().mark_step()
    with stream(side):
        x.sin_(); x.cos_()
    x.neg_()
    for _ in range(30): x.sum()
"""


def test_the_json_form(run: Run) -> None:
    device = run(PROGRAM)
    found = json.loads(json.dumps(to_json(device)))
    assert found.keys() == {
        "format", "torch", "operations", "steps", "faults", "findings", "allowed", "waits", "rules"
    }  # fmt: skip
    assert sorted(i for each in found["faults"] for i in each["findings"]) == list(
        range(len(device.findings))
    )
    assert len(found["faults"]) < len(device.findings)
    assert [each["kind"] for each in found["findings"]] == kinds(device)
    assert {each["kind"] for each in found["findings"]} == {"race", "reuse"}
    assert {each["kind"] for each in found["waits"]} == {"sync"}
    assert {each["allowed"] for each in found["allowed"]} == {"train.py:11: as <b>expected</b>"}
    first = found["findings"][0]
    assert first["rule"] == "host"
    assert first["first"] == {
        "operation": "_to_copy",
        "access": "writes",
        "stream": "the default stream",
        "lines": [
            {
                "of": "program",
                "place": "train.py:6",
                "path": str(Path("train.py").absolute()),
                "line": 6,
                "function": "<module>",
                "source": 'copy = x.to("cpu", non_blocking=True)',
            }
        ],
    }
    for each in (*found["findings"], *found["allowed"], *found["waits"]):
        assert each["rule"] in found["rules"]
        assert each["heading"] == HEADINGS[each["kind"]]
        assert each.keys() == first.keys()
    assert summary(device) == (
        f"{len(found['faults'])} faults, {len(device.allowed)} allowed, "
        "1 wait of the host in each step"
    )


def test_a_timeline_has_what_was_enqueued_around_both(run: Run) -> None:
    device = run(PROGRAM)
    found = to_json(device)["findings"][-1]
    assert found["second"]["operation"] == "neg_"
    entries = {each["number"]: each for each in found["timeline"]["entries"]}
    assert entries[found["timeline"]["first"]]["operation"] == found["first"]["operation"]
    assert entries[found["timeline"]["second"]]["operation"] == "neg_"
    after = [each for number, each in entries.items() if number > found["timeline"]["second"]]
    assert [each["operation"] for each in after] == ["sum"] * 10
    assert {each["waits_for"] for each in entries.values() if "waits_for" in each}
    assert len(entries) <= 42
    assert list(entries) == sorted(entries)


def test_what_is_kept_of_an_endless_program_is_bounded(run: Run) -> None:
    device = run("""\
        side.wait_stream(current_stream())
        with stream(side): x.add_(1)
        y = torch.ones(8, device="emulated")
        for _ in range(200):
            y.add_(1)
            current_stream().synchronize()
        x.sum()
    """)
    assert max(len(queue.recent) for queue in device.queues) == RECENT
    [finding] = device.findings
    assert finding.timeline is not None
    assert finding.timeline.first  # on a stream that did little since
    with running(EmulatedDevice()) as device:
        far = torch.zeros(8, device="emulated")
        side = Stream()
        for _ in range(RECENT + 1):
            torch.zeros(8, device="emulated").sum()
        with torch.get_device_module("emulated").stream(side):
            far.add_(1)
        assert current_stream() != side
    assert device.findings[0].timeline is not None
    assert device.findings[0].timeline.first == 0


def test_reports_of_ranks_are_merged(run: Run) -> None:
    report = RaceReport.of(run(PROGRAM))
    other = pickle.loads(pickle.dumps(report))
    assert other.findings == report.findings
    counts = [finding.count for finding in report.findings]
    merged = RaceReport.merged([report, other])
    assert [finding.count for finding in merged.findings] == [2 * count for count in counts]
    assert [finding.count for finding in report.findings] == counts
    assert (merged.operations, merged.steps) == (2 * report.operations, report.steps)
    assert merged.findings[-1].timeline is not None
    assert to_json(other) == to_json(report)


def test_each_finding_has_a_rule_with_its_source() -> None:
    assert HEADINGS.keys() >= {name_of_rule(Finding(kind, "")) for kind in HEADINGS} - {"race"}
    for rule in RULES.values():
        assert rule.url.startswith(("https://docs.pytorch.org/", "https://docs.nvidia.com/"))
        assert rule.text.endswith(".")


@pytest.fixture
def page(run: Run, tmp_path: Path) -> Iterator[tuple[EmulatedDevice, Page]]:
    device = run(PROGRAM)
    write_page(device, tmp_path / "races.html")
    browser_path = find_browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url))
        page.goto((tmp_path / "races.html").as_uri())
        assert [url for url in problems if not url.startswith("file:")] == []
        yield device, page
        browser.close()


@pytest.mark.slow
def test_the_page_shows_each_finding_with_its_timeline(page: tuple[EmulatedDevice, Page]) -> None:
    device, shown = page
    faults = faults_of(device.findings)
    assert shown.locator("section.finding").count() == len(faults)
    assert shown.locator("section.finding svg").count() == len(device.findings)
    assert shown.locator("#rules dt").all_text_contents() == list(RULES)
    missing = [each.strip() for each in shown.locator("dd.missing").all_text_contents()]
    assert missing == [fault.findings[0].missing for fault in faults]
    assert "<b>expected</b>" in (shown.locator("#allowed").text_content() or "")
    assert "item()" in (shown.locator("#waits").text_content() or "")
    last = shown.locator(".timeline").last
    assert last.locator(".first, .second").count() == 2
    assert last.locator("line.missing").count() == 1


@pytest.mark.slow
def test_the_missing_wait_points_from_the_first_to_the_second(
    page: tuple[EmulatedDevice, Page],
) -> None:
    _, shown = page
    last = shown.locator(".timeline").last
    boxes = [last.locator(f".{which} rect").bounding_box() for which in ("first", "second")]
    arrow = last.locator("line.missing").bounding_box()
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert arrow is not None
    assert arrow["x"] == pytest.approx(boxes[0]["x"] + boxes[0]["width"], abs=8)
    assert arrow["x"] + arrow["width"] == pytest.approx(boxes[1]["x"], abs=8)


@pytest.mark.slow
def test_on_a_phone_no_page_is_wider_than_it(page: tuple[EmulatedDevice, Page]) -> None:
    _, shown = page
    shown.set_viewport_size({"width": 400, "height": 800})
    assert shown.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_program_without_faults_has_a_page_that_says_so(run: Run, tmp_path: Path) -> None:
    device = run("x.add_(1)")
    write_page(device, tmp_path / "races.html")
    assert "<h1>No faults</h1>" in (tmp_path / "races.html").read_text()
    assert summary(device) == "0 faults, 0 allowed, 0 waits of the host in each step"
    assert describe(device.findings) == ""
