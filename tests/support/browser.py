"""The browser that pages are looked at with."""

from __future__ import annotations

import os
import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str:
    """The path of a browser. Where there is none the test is skipped, but in CI it fails."""
    if found := next((path for name in BROWSERS if (path := shutil.which(name))), None):
        return found
    reason = "no browser to look at the page with: install Debian's chromium, or Google Chrome"
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; CI={os.environ['CI']}, where nothing may be skipped")
    pytest.skip(reason)
