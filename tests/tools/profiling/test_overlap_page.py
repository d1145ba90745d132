"""The overlap report as a person sees it: the page in a real browser, and the PNG."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from playwright.sync_api import Page, sync_playwright

from fsdp_overlap.tools.profiling.drawing import COLORS
from fsdp_overlap.tools.profiling.html import write_html
from fsdp_overlap.tools.profiling.json_report import write_json
from fsdp_overlap.tools.profiling.plot import write_png
from support.browser import find_browser
from support.traces import Step, report_of

# A name that would be read as HTML, were it not escaped.
REPORTS = {"mine": report_of(Step(), Step()), "<b>other</b>": report_of(Step(prefetch=0))}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_html(REPORTS, folder / "overlap.html")
    write_json(REPORTS, folder / "overlap.json")
    return folder


@pytest.fixture(scope="module")
def record(written: Path) -> dict[str, Any]:
    return json.loads((written / "overlap.json").read_text())["runs"]


@pytest.fixture(scope="module")
def page(written: Path) -> Iterator[Page]:
    browser_path = find_browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url))
        page.goto((written / "overlap.html").as_uri())
        page.wait_for_selector("#timeline .trace.bars .point path")
        # Nothing but the page itself, and images that it holds, was asked for.
        assert [url for url in problems if not url.startswith(("file:", "blob:", "data:"))] == []
        yield page
        browser.close()


def test_where_there_is_no_browser_the_page_is_skipped_but_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="install Debian's chromium"):
        find_browser()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"install Debian's chromium.*CI=true"):
        find_browser()


@pytest.mark.slow
def test_it_is_dark_where_the_reader_wants_that(page: Page) -> None:
    def brightness(selector: str, property: str) -> float:
        colour = page.locator(selector).first.evaluate(
            "(element, property) => getComputedStyle(element)[property]", property
        )
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    texts = [("td", "color"), ("#timeline .ytick text", "fill"), ("#timeline .legendtext", "fill")]
    assert brightness("body", "backgroundColor") > 200
    assert all(brightness(*text) < 100 for text in texts)
    page.emulate_media(color_scheme="dark")
    assert brightness("body", "backgroundColor") < 50
    assert all(brightness(*text) > 180 for text in texts)
    page.emulate_media(color_scheme="light")


def test_on_a_phone_nothing_is_wider_than_it(page: Page) -> None:
    browser = page.context.browser
    assert browser is not None
    phone = browser.new_page(viewport={"width": 400, "height": 800})
    phone.goto(page.url)
    phone.wait_for_selector("#timeline .trace.bars .point path")
    assert phone.evaluate("document.documentElement.scrollWidth") <= 400
    phone.close()


def spans(record: dict[str, Any], which: str) -> list[tuple[float, float]]:
    """Of all collectives, in milliseconds; each rank's are from its own start."""
    return [
        (start / 1e3, end / 1e3)
        for run in record.values()
        for rank in run["ranks"]
        for c in rank["collectives"]
        for start, end in c[which]
    ]


def test_the_timeline_shows_every_collective(page: Page, record: dict[str, Any]) -> None:
    drawn = page.evaluate(
        """() => document.getElementById("timeline").data.map(
            trace => [trace.name, trace.base.length])"""
    )
    painted = page.evaluate(
        """() => [...document.querySelectorAll("#timeline .trace.bars")].map(
            trace => trace.querySelectorAll(".point path").length)"""
    )
    counts = dict(drawn)
    assert painted == list(counts.values())
    assert counts["communication, hidden"] == len(spans(record, "spans"))
    assert counts["communication, exposed"] == len(spans(record, "exposed_spans")) > 0


def test_what_is_exposed_is_painted_where_it_was(page: Page, record: dict[str, Any]) -> None:
    exposed = page.evaluate(
        """() => {
            const plot = document.getElementById("timeline");
            const k = plot.data.findIndex(trace => trace.name == "communication, exposed");
            const axis = plot._fullLayout.xaxis, left = plot.getBoundingClientRect().left;
            const bars = document.querySelectorAll("#timeline .trace.bars")[k];
            return [...bars.querySelectorAll(".point path")].map(path => {
                const box = path.getBoundingClientRect();
                const at = x => axis.p2d(x - left - axis._offset);
                return [at(box.left), at(box.right)];
            });
        }"""
    )
    wanted = sorted(spans(record, "exposed_spans"))
    for (start, end), (wanted_start, wanted_end) in zip(sorted(exposed), wanted, strict=True):
        # A pixel is a hundredth of a millisecond here.
        assert start == pytest.approx(wanted_start, abs=0.03)
        assert end == pytest.approx(wanted_end, abs=0.03)


def test_pointing_at_a_bar_tells_what_it_is(page: Page, record: dict[str, Any]) -> None:
    first = record["mine"]["ranks"][0]["collectives"][0]
    k = page.evaluate(
        """() => document.getElementById("timeline").data.findIndex(
            trace => trace.name == "communication, exposed")"""
    )
    bar = page.locator("#timeline .trace.bars").nth(k).locator(".point path").first
    box = bar.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#timeline .hoverlayer .hovertext")
    told = page.locator("#timeline .hoverlayer").text_content() or ""
    assert f"all-gather of {first['name']} in forward" in told
    assert f"in flight {first['duration'] / 1e3:.2f} ms" in told
    assert f"exposed {first['exposed'] / 1e3:.2f} ms" in told
    assert f"held up {first['held_up']}" in told


def test_the_page_says_what_was_found(page: Page, record: dict[str, Any]) -> None:
    shown = page.locator(".findings li").all_text_contents()
    assert shown == [f["text"] for run in record.values() for f in run["findings"]]
    assert page.locator("h3").all_text_contents() == list(REPORTS)


def test_the_tables_are_those_of_the_record(page: Page, record: dict[str, Any]) -> None:
    rows = [row.locator("td").all_text_contents() for row in page.locator("#ranks tbody tr").all()]
    ranks = [rank for run in record.values() for rank in run["ranks"]]
    shown = {row[0].strip(): row[1:] for row in rows}
    for label, key in (("step", "step"), ("compute", "compute"), ("of it exposed", "exposed")):
        assert shown[label] == [f"{rank['per_step'][key] / 1e3:.1f}" for rank in ranks]
    worst = page.locator("#collectives-1 tbody tr").first.locator("td").all_text_contents()
    longest = max(ranks[2]["collectives"], key=lambda c: c["exposed"])
    assert longest["name"] in worst[0]
    assert worst[5] == f"{longest['exposed'] / 1e3:.2f}"


def test_the_eye_finds_what_is_exposed(page: Page, tmp_path: Path) -> None:
    page.locator("#timeline").screenshot(path=tmp_path / "page.png")
    write_png(REPORTS, tmp_path / "overlap.png")
    for name in ("page.png", "overlap.png"):
        pixels = (matplotlib.image.imread(tmp_path / name)[..., :3] * 255).round()
        share = {what: _share(pixels, colour) for what, colour in COLORS.items()}
        # Rows lie one below the other, so the red of one is in a few rows of pixels only.
        assert share["exposed"] > 0.002
        assert share["hidden"] > 0.002
        assert share["forward"] > 0.01


def _share(pixels: np.ndarray, colour: str) -> float:
    wanted = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return float((abs(pixels - wanted).max(axis=-1) <= 2).mean())
