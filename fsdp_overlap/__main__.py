"""The program `fsdp-overlap`, which is also `python -m fsdp_overlap`."""

import os
import sys
from importlib.util import find_spec


def main() -> None:
    # Else the profiler's library prints its own start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Checked now, because some are imported only at the end, after a run of hours.
    for name in ("typer", "rich", "matplotlib", "jinja2", "plotly"):
        if find_spec(name) is None:
            sys.exit(f"error: {name} is not installed; pip install 'fsdp_overlap[cli]'")
    from fsdp_overlap.tools.cli.main import run

    sys.exit(run())


if __name__ == "__main__":
    main()
