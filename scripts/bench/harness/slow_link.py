"""A network link that carries only so much: loopback, limited by `tc`."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.output import fail
from harness.processes import launch_ranks

_CLONE_NEWNET = 0x40000000  # linux/sched.h


UNITS = {"gbit": 1.0, "mbit": 1e-3}


def gbit(rate: str) -> float:
    """Of a limited link, in Gbit/s. Raises argparse's error for what `tc` alone may know."""
    found = re.fullmatch(r"([\d.]+)(gbit|mbit)", rate)
    if found is None:
        raise argparse.ArgumentTypeError(f"{rate}: use 2gbit, 500mbit and so on")
    return float(found[1]) * UNITS[found[2]]


def checked_rate(rate: str) -> str:
    """`rate`, if `gbit` knows it."""
    gbit(rate)
    return rate


def in_words(args: argparse.Namespace) -> str:
    return "unlimited loopback" if args.no_limit else f"{args.rate} link"


class LinkError(RuntimeError):
    """The link cannot be limited here; the message says what is missing."""


def _command(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def limited_link(rate: str) -> Iterator[None]:
    """Put this thread, and the processes it starts, where loopback carries at most `rate`.

    `rate` is in the words of `tc` ("2gbit"). Both directions share it, as all loopback traffic
    leaves through one queue. The network namespace is a nameless one: the kernel removes it with
    the last process inside, so that not even SIGKILL can leave one behind. Raises LinkError
    where the rights or the programs are missing.
    """
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise LinkError(f"limiting the link needs {' and '.join(missing)} (package iproute2)")
    if os.geteuid() != 0:
        raise LinkError("limiting the link needs root: it makes a network namespace")
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise LinkError(f"cannot make a network namespace: {reason}")
        try:
            _command("ip", "link", "set", "lo", "up")
            tbf = f"tc qdisc add dev lo root tbf rate {rate} burst 512kb limit 4mb"
            _command(*tbf.split())
            yield
        finally:
            libc.setns(home, _CLONE_NEWNET)
    finally:
        os.close(home)


def launch_on_link(
    args: argparse.Namespace,
    argv: Sequence[str],
    extra_env: Mapping[str, str] | None = None,
    script: Path | None = None,
) -> Any:
    """`launch_ranks` by the options `ranks` and `timeout`, over a link limited to `rate` unless
    there is `no_limit`."""
    if args.no_limit:
        return launch_ranks(args.ranks, argv, args.timeout, extra_env, script)
    try:
        with limited_link(args.rate):
            return launch_ranks(args.ranks, argv, args.timeout, extra_env, script)
    except LinkError as error:
        fail(f"{error}; --no-limit runs on plain loopback")
