"""`fsdp-overlap` and `python -m fsdp_overlap.cli`, which torchrun starts once per rank."""

import os
import sys


def main() -> None:
    # Else the profiler's library prints its own start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        from fsdp_overlap.cli.main import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "matplotlib"):
            raise
        sys.exit(f"error: {error.name} is not installed; pip install 'fsdp_overlap[cli]'")
    sys.exit(run())


if __name__ == "__main__":
    main()
