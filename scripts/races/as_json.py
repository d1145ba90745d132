"""Runs a program on the emulated device and prints what was found, as JSON.

python scripts/races/as_json.py --ranks 4 [--change NAME] PROGRAM
"""

from __future__ import annotations

import argparse
import json

import changes

from fsdp_overlap.races import to_json
from fsdp_overlap.races.runner import Program, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--change", default="")
    parser.add_argument("program")
    given = parser.parse_args()
    if given.change:
        getattr(changes, given.change)()
    _, result = run(Program(given.program), given.ranks)
    print(json.dumps(to_json(result.found) | {"error": result.error}))


if __name__ == "__main__":
    main()
