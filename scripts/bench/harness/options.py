"""The options that benchmarks have in common."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from harness import output, slow_link

_OPTIONS: dict[str, dict[str, Any]] = {
    "rate": {"type": slow_link.checked_rate, "help": "of the link: 2gbit, 500mbit, ..."},
    "no_limit": {"action": "store_true", "help": "plain loopback, needs no root"},
    "rows": {"type": int, "help": "of each rank's batch"},
    "sleep": {"type": float, "metavar": "MS", "help": "of a block in forward, twice in backward"},
    "ranks": {"type": int},
    "world_size": {"type": int, "help": "of the fake process group"},
    "blocks": {"type": int},
    "width": {"type": int, "help": "of a block of 12 * width^2 parameters"},
    "prefetch": {"type": int, "help": "of our context"},
    "microbatches": {"type": int, "help": "forwards in a step"},
    "steps": {"type": int, "help": "steps per sample"},
    "rounds": {"type": int},
    "warmup": {"type": int, "help": "rounds thrown away"},
    "timeout": {"type": float, "help": "seconds, for the whole run"},
}
_NO_SETTINGS = {"json", "timeout", "no_limit", "memory", "measure", "profile", "calls"}


def parser(documentation: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of the output, of those options that have a default here, and of what these
    need."""
    if "rate" in defaults:
        defaults["no_limit"] = False
    if "ranks" in defaults or "rate" in defaults:
        defaults.setdefault("timeout", 600.0)
    made = argparse.ArgumentParser(description=documentation.splitlines()[0])
    for name, default in defaults.items():
        made.add_argument(f"--{name.replace('_', '-')}", default=default, **_OPTIONS[name])
    output.add_output(made)
    return made


def add_rates(parser: argparse.ArgumentParser, without_limit: str, rates: Sequence[str]) -> None:
    """Add the rates of links, one of which may be the word for a link without a limit."""
    parser.add_argument(
        "--rates",
        type=lambda text: text if text == without_limit else slow_link.checked_rate(text),
        nargs="+",
        default=rates,
        help=f"of the link, in tc's words, or {without_limit}, which needs no root",
    )


def add_folder(parser: argparse.ArgumentParser, takes: str) -> None:
    parser.add_argument(
        "--folder",
        default=tempfile.gettempdir(),
        help=f"where to save, in a folder that is removed at the end; takes {takes}",
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured with; ``rate`` is None if the link had no limit."""
    settings = {name: value for name, value in vars(args).items() if name not in _NO_SETTINGS}
    if getattr(args, "no_limit", False):
        settings["rate"] = None
    return {"torch": torch.__version__, **settings}


def in_words(args: argparse.Namespace) -> str:
    """Return the common options in a line."""
    given = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in vars(args).items()
    }
    words = {
        "ranks": "{ranks} ranks",
        "world_size": "a fake group of {world_size} ranks",
        "rate": slow_link.in_words(args) if "rate" in given else "",
        "blocks": "{blocks} blocks" + (" of 12*{width}^2" if "width" in given else ""),
        "microbatches": "{microbatches} microbatches a step",
        "rows": "{rows} rows a rank",
        "sleep": "a block sleeps {sleep:g} ms in forward, twice as long in backward",
        "prefetch": "prefetch {prefetch}",
        "rounds": "{rounds} rounds" + (" of {steps} steps" if "steps" in given else ""),
    }
    return ", ".join(text.format(**given) for name, text in words.items() if given.get(name))
