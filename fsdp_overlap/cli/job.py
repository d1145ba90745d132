"""Which run the ranks of a job go on with when they start again: after one of them died, with
another machine, or because a queue runs the job once more."""

import json
import os
import sys
from pathlib import Path
from typing import Any

RUNS = Path("runs")  # where runs are that were given no folder
_NO_ID = "none"  # torchrun's own


def restarts() -> tuple[int, int]:
    """How often the launcher has started the ranks again, and how often it may."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    done, most = (int(os.environ.get(name, 0)) for name in names)
    return done, most


def this_job() -> dict[str, Any]:
    """What tells this job from others: torchrun's --rdzv-id and the command."""
    return {"id": os.environ.get("TORCHELASTIC_RUN_ID", _NO_ID), "command": sys.argv[1:]}


def run_of_this_job(out: Path | None) -> Path | None:
    """The folder of the run that this job has begun, at `out` or, by default, the last under
    `runs`. A job without an id knows its run only while its launcher lives."""
    job = this_job()
    if job["id"] == _NO_ID and not restarts()[0]:
        return None
    folders = sorted(RUNS.glob("*"), reverse=True) if out is None else [out]
    return next((folder for folder in folders if _job_of(folder) == job), None)


def _job_of(folder: Path) -> object:
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return settings.get("job") if isinstance(settings, dict) else None
