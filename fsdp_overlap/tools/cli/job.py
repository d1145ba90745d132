"""Find the run to resume when the ranks of a job start again: after one of them died, with another
machine, or because a queue runs the job once more."""

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from fsdp_overlap.tools.cli.process_group import kept_store

RUNS = Path("runs")  # holds the runs that were given no folder
_NO_ID = "none"  # torchrun's default


def restarts() -> tuple[int, int]:
    """Return how often the launcher has started the ranks again, and how often it may."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    done, most = (int(os.environ.get(name, 0)) for name in names)
    return done, most


def this_job() -> dict[str, Any]:
    """Return what tells this job from others: torchrun's --rdzv-id and the command. If torchrun was
    given no id, one is drawn that lasts as long as torchrun does."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", _NO_ID)
    if given == _NO_ID and (kept := kept_store()) is not None:
        given = kept.compare_set("id of the job", "", uuid.uuid4().hex).decode()
    return {"id": given, "command": sys.argv[1:]}


def run_of_this_job(out: Path | None) -> Path | None:
    """Return the folder of the run that this job has begun: `out` or, by default, the last such
    folder under `runs`. None if there is none."""
    job = this_job()
    if job["id"] == _NO_ID:
        return None
    folders = sorted(RUNS.glob("*"), reverse=True) if out is None else [out]
    return next((folder for folder in folders if _job_of(folder) == job), None)


def _job_of(folder: Path) -> object:
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return settings.get("job") if isinstance(settings, dict) else None
