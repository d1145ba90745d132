"""Run a program, without the libraries of the command line: ``fsdp-overlap races`` starts each of
several processes so."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_overlap.tools.races.runner import Program, report, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program. Return its exit status."""
    parser = argparse.ArgumentParser("python -m fsdp_overlap.tools.races", description=__doc__)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    target, *args = given.program or parser.error("name a program")
    program = Program(target, args, given.module, given.steps, given.allow)
    return report(*run(program, given.ranks, given.rank, given.real), given.json)


if __name__ == "__main__":
    sys.exit(main())
