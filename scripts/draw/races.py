"""Draws docs/races.png: the page of `fsdp-overlap races` on the first finding of docs/races.md."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

PAGE = Path(__file__).resolve().parents[2] / "docs" / "races.md"
PICTURE = PAGE.with_suffix(".png")


def main() -> None:
    text = PAGE.read_text()
    [program] = re.findall(r"^```python\n# prefetch.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        lines = program.splitlines(keepends=True)
        Path("prefetch.py").write_text("".join(x for x in lines if "wait_stream" not in x))
        command = [sys.executable, "-m", "fsdp_overlap", "races", "--page", "races.html"]
        subprocess.run([*command, "prefetch.py"], check=False, stdout=subprocess.DEVNULL)
        with sync_playwright() as playwright:
            program = shutil.which("chromium") or shutil.which("google-chrome")
            chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = chromium.new_page(viewport={"width": 1000, "height": 800}, device_scale_factor=2)
            page.goto(Path("races.html").absolute().as_uri())
            page.locator("#finding-1").screenshot(path=PICTURE)
            chromium.close()


if __name__ == "__main__":
    main()
