"""torchrun, run as it is, but for one thing: ranks are forks of it, and not new interpreters that
import torch for seconds each. ``python -m support.torchrun`` takes torchrun's arguments."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import subprocess_handler

from support.beginning import begin_together

_PR_SET_PDEATHSIG = 1


class Fork(subprocess.Popen):
    """``python -u script arguments`` or ``python -u -m module arguments``."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        env: dict[str, str] = next(each for each in rest if isinstance(each, dict))
        sys.stdout.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        os.setsid()  # as torchrun asks
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        os._exit(_run(list(args[args.index("-u") + 1 :])))


def _run(command: list[str]) -> int:
    """Return the exit code."""
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, os.path.dirname(command[0]))
            runpy.run_path(command[0], run_name="__main__")
        return 0
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main(arguments: list[str]) -> None:
    # A pool of threads would be gone in forked ranks, which would wait for it.
    torch.set_num_threads(1)
    subprocess_handler.subprocess_handler.Popen = Fork
    begin_together()
    run.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
