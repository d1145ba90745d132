"""Texts of the repository, rewritten so that they read well on the site. Needs no package."""

from __future__ import annotations

import re
from collections.abc import Callable
from posixpath import basename, dirname, join, normpath, relpath, splitext

FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
NOTE = re.compile(r"(?<![#\[] )(?<!\[)Note \[([a-z ]+)\]")
BREAK = re.compile(r"(?<=\w)(?<!\btest)([_/=(]|\.(?!\d)|::)(?=\w)")
ROLE = re.compile(r":(attr|class|data|func|meth|mod):`(~?)([\w.]+)`")


def rewrite_page(text: str, source: str, page: str, repository: str | None) -> str:
    """A page's text, with links that are right on the site.

    Args:
        text: Markdown.
        source: the file that it is from, as the repository has it: ``docs/muon.md``.
        page: the page that it becomes, below the site's source: ``muon.md``.
        repository: the address under which the repository's files can be read, if there is one.
    """
    notes = relpath("design.md", dirname(page) or ".")

    def note(found: re.Match[str]) -> str:
        return rf"[Note \[{found[1]}\]]({notes}#note-{found[1].replace(' ', '-')})"

    prose_and_code = FENCE.split(text)
    for at in range(0, len(prose_and_code), 2):
        prose = LINK.sub(lambda found: _link(found, source, page, repository), prose_and_code[at])
        prose_and_code[at] = NOTE.sub(note, prose)
    return "".join(prose_and_code)


def _link(found: re.Match[str], source: str, page: str, repository: str | None) -> str:
    picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    if not target or ":" in target:
        return found[0]
    target = normpath(join(dirname(source), target))
    if target == "README.md":
        target = "docs/index.md"
    if not target.startswith("docs/"):
        if repository:
            return f"{picture}[{text}]({repository}/{target}{anchor})"
        return f"{text} (`{target}` in the repository)"
    target = target.removeprefix("docs/")
    if dirname(target) == "examples":
        target = page_of_example(target)
    return f"{picture}[{text}]({relpath(target, dirname(page) or '.')}{anchor})"


def page_of_example(path: str) -> str:
    """The page that shows ``examples/training.py``."""
    return splitext(path)[0] + ".md"


def example_page(path: str, code: str) -> str:
    """A page that shows a program."""
    language = {".py": "python", ".sh": "bash"}[splitext(path)[1]]
    name = basename(path)
    return f'# {name}\n\n```{language} title="docs/examples/{name}"\n{code.rstrip()}\n```\n'


def summary_of(code: str) -> str:
    """The first sentence that a program says of itself, in a docstring or in comments."""
    said = re.search(r'^"""(.*?)(?:"""|\n\n)|((?:^# .*\n)+)', code, re.MULTILINE | re.DOTALL)
    assert said
    text = " ".join((said[1] or re.sub("^# ", "", said[2], flags=re.MULTILINE)).split())
    sentence = re.split(r"\.(?:\s|$)", text)[0]
    return re.sub(r"(: run it by)?:?$", "", sentence) + "."


def roles_to_markdown(docstring: str, path_of: Callable[[str], str | None]) -> str:
    """``docstring`` with Markdown in the place of roles such as :func:`fully_shard`: a link if
    ``path_of`` knows what the name stands for and a page describes it, else code."""

    def link(found: re.Match[str]) -> str:
        role, is_short, name = found[1], found[2], found[3]
        text = name.rpartition(".")[2] if is_short else name
        code = f"`{text}()`" if role in ("func", "meth") else f"`{text}`"
        path = path_of(name)
        return f'<autoref identifier="{path}" optional>{code}</autoref>' if path else code

    return ROLE.sub(link, docstring)


def soften_tables(html: str) -> str:
    """``html`` with places in the code of tables where a line may end: after ``_``, for example."""

    def soften(cell: re.Match[str]) -> str:
        return re.sub(r"(?<=<code>)[^<]*", lambda code: BREAK.sub(r"\1<wbr>", code[0]), cell[0])

    return re.sub(r"<td.*?</td>", soften, html, flags=re.DOTALL)
