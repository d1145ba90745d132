"""Run `fsdp-overlap`, or a script, in processes of its own, forked from a process that has imported
torch.

A new interpreter imports torch for 4 s, and so does every rank that a run starts. Claims about how
the program starts and ends its processes need that; claims about what it computes do not.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from support.ranks import PRELOAD

END_SECONDS = 30.0  # for ranks, once their launcher has ended
STACKS_SECONDS = 0.5  # for a process that hangs, to write where
_TELL_STACKS = signal.SIGUSR2


class Program:
    """`fsdp-overlap` with `arguments` in `folder`, by itself or under torchrun with the options
    `torchrun`; with the ranks that it forks, a session and a process group of its own. Like a
    `subprocess.Popen` whose output is text. With `is_script` the first argument is a script to run
    in place of `fsdp-overlap`."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        torchrun: Sequence[str] | None = None,
        is_script: bool = False,
    ) -> None:
        context: Any = multiprocessing.get_context(
            "forkserver" if sys.platform == "linux" else "spawn"
        )
        multiprocessing.set_forkserver_preload(PRELOAD)  # it may be the first to need the server
        # Files, because nobody reads pipes while a test waits for something else.
        self._output = tempfile.TemporaryDirectory(prefix="program-")
        self._paths = [Path(self._output.name) / name for name in ("out", "err")]
        self._process = context.Process(
            target=_main,
            args=(
                str(folder),
                list(arguments),
                [str(path) for path in self._paths],
                torchrun,
                is_script,
            ),
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that run now, in the order of their start."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sorted(map(int, children))

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what was printed, once the process has ended and so have its ranks. After
        `timeout` seconds they write their stacks and are killed, which an assertion reports."""
        self._process.join(timeout)
        is_late = self.returncode is None
        if is_late:
            for process in (self.pid, *self.ranks()):  # one by one: they write to the same file
                with suppress(ProcessLookupError):
                    os.kill(process, _TELL_STACKS)
                time.sleep(STACKS_SECONDS)
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
        end = time.monotonic() + END_SECONDS
        while somebody_is_left(self.pid) and time.monotonic() < end:
            time.sleep(0.01)
        out, err = (path.read_text() for path in self._paths)
        assert not is_late, f"not done after {timeout} s\n{out}\n{err}"
        return out, err


def somebody_is_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _main(
    folder: str,
    arguments: list[str],
    output: list[str],
    torchrun: Sequence[str] | None,
    is_script: bool,
) -> None:
    os.setsid()
    for number, path in enumerate(output, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.register(_TELL_STACKS, file=2)  # in the ranks that it forks, too
    os.chdir(folder)
    if torchrun is not None:
        from support.torchrun import main

        program = [] if is_script else ["-m", "fsdp_overlap"]
        main([*torchrun, *program, *arguments])
        return

    import torch

    from fsdp_overlap import __main__
    from fsdp_overlap.tools.cli import launch
    from support.beginning import begin_together

    begin_together()
    # A pool of threads would be gone in forked ranks, which would wait for it.
    torch.set_num_threads(1)
    if is_script:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
        return
    launch.LaunchConfig = partial(launch.LaunchConfig, start_method="fork")  # type: ignore
    sys.argv = ["fsdp-overlap", *arguments]
    __main__.main()
