"""What the site has beyond the files of docs/: README.md as its home, and pages of the examples."""

from __future__ import annotations

import logging
import re
import sys
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for docstrings.py too

from rewriting import (  # noqa: E402
    example_page,
    page_of_example,
    rewrite_page,
    soften_tables,
    summary_of,
)

ROOT = HERE.parents[1]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
REPOSITORY = f"{URLS['Repository']}/blob/main" if "Repository" in URLS else None
log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> None:
    config.repo_url = URLS.get("Repository")


def on_files(files: Files, config: MkDocsConfig) -> None:
    home = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=home))
    lines = ["# Examples", "", "Whole programs, which the tests run.", ""]
    for path in sorted((ROOT / "docs" / "examples").glob("*.*")):
        code, page = path.read_text(), page_of_example(f"examples/{path.name}")
        files.append(File.generated(config, page, content=example_page(path.name, code)))
        lines.append(f"- [{path.name}](examples/{path.name}): {summary_of(code)}")
    files.append(File.generated(config, "examples.md", content="\n".join(lines)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    source = "README.md" if uri == "index.md" else f"docs/{uri}"
    return rewrite_page(markdown, source, uri, REPOSITORY)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith("reference/") and (
        left := re.search(r":(?:attr|class|data|func|meth|mod):(?:`|<code>)[^<`]*", html)
    ):
        log.warning("%s shows a role as text: %s", page.file.src_uri, left[0])
    if page.parent is None:
        page.meta["hide"] = ["navigation"]  # which would be this page alone
    return soften_tables(html)
