"""Check this machine: what is there, what is missing, and what to do."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console

from fsdp_overlap.tools.cli import trial
from fsdp_overlap.tools.cli.network import (
    addresses,
    by_host_name,
    is_free,
    reachable,
    why_no_connection,
)
from fsdp_overlap.tools.cli.process_group import cores

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)
"""The newest that the library is tested with."""
EXTRAS = {
    "checkpoint": ({"isal"}, "checksums of checkpoints are several times as fast"),
    "report": ({"jinja2", "matplotlib", "plotly"}, "the page and picture of the overlap report"),
    "cli": ({"numpy", "rich", "safetensors", "typer"}, "this program"),
}
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PORT = 29500  # where torchrun meets by default
_GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One line of the answer. ``state``: "missing" is what training cannot do without, "note" is
    what may surprise. ``hint``: what to do; a state other than "ok" may need nothing."""

    name: str
    state: Literal["ok", "note", "missing"]
    found: str
    hint: str = ""


def doctor(seconds: float, as_json: bool) -> bool:
    """Look at this machine and try two ranks, for at most ``seconds``. Print what it found.
    Return whether nothing that is needed is missing."""
    found = [*looked_at()]
    console = Console(highlight=False, soft_wrap=True)
    if not as_json:
        for check in found:
            _show(console, check)
    found.append(tried := try_out(seconds))
    missing = [check.name for check in found if check.state == "missing"]
    if as_json:
        print(json.dumps({"ready": not missing, "checks": [asdict(each) for each in found]}))
        return not missing
    _show(console, tried)
    console.print()
    console.print(f"not ready: {', '.join(missing)}" if missing else "ready", style="bold")
    return not missing


def looked_at() -> Iterator[Check]:
    """Return all that can be found out without starting anything."""
    yield _library()
    yield _system()
    yield _torch()
    yield _backends()
    yield _devices()
    yield gloo_interface()
    yield _nccl_variables()
    yield overlap_variables()
    yield threads()
    for extra in EXTRAS:
        yield _extra(extra)
    yield torchrun_variables()


def try_out(seconds: float) -> Check:
    """Return whether two ranks on this machine can gather and reduce one layer."""
    name = "two ranks"
    with Console(stderr=True).status("trying two ranks") as status:
        try:
            took = trial.try_two_ranks(
                seconds, lambda stage: status.update(f"trying two ranks: {stage}")
            )
        except trial.TrialError as error:
            return Check(name, "missing", str(error), _why_not(error))
    return Check(name, "ok", f"gathered and reduced a sharded layer by gloo, in {took:.0f} s")


def _why_not(error: trial.TrialError) -> str:
    message = str(error)
    if "Unable to find address" in message:
        return f"the interface has no address; export GLOO_SOCKET_IFNAME={_one_interface()}"
    if error.stage == trial.IMPORTING:
        if "not done" in message:
            return "the machine is slow or busy; give it more time: --timeout 300"
        return f"try by hand: {sys.executable} -c 'import fsdp_overlap'"
    if error.stage == trial.MEETING:
        return (
            "the ranks cannot reach each other: a firewall, or another address than this "
            f"machine's; export GLOO_SOCKET_IFNAME={_one_interface()}, or give it more time: "
            "--timeout 300"
        )
    if "not done" in message:
        return "the ranks met, then hung or were slow; give it more time: --timeout 300"
    return "please report this with all that is printed here"


def _one_interface() -> str:
    return next(iter([*reachable(), *addresses()]), "lo")


def _show(console: Console, check: Check) -> None:
    style = {"ok": "green", "note": "yellow", "missing": "bold red"}[check.state]
    console.print(f"{check.state:<8}", style=style, end="")
    # Not as markup: it may have brackets.
    console.print(f"{check.name:<20} {' '.join(check.found.split())}", markup=False)
    if check.hint:
        console.print(f"{'':<28} -> {check.hint}", markup=False)


def _library() -> Check:
    try:
        found = version("fsdp_overlap")
    except PackageNotFoundError:
        return Check(
            "fsdp_overlap", "note", "is not installed: it runs from a folder", "pip install ."
        )
    return Check("fsdp_overlap", "ok", found)


def _system() -> Check:
    found = f"{platform.python_version()} on {platform.system()}"
    if platform.system() != "Linux":
        return Check("Python", "note", found, "it is tested on Linux alone")
    return Check("Python", "ok", found)


def _torch() -> Check:
    found = str(torch.__version__)
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST_TORCH, NEWEST_TORCH))
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None:
        return Check("torch", "note", found, f"it is tested with {oldest} to {newest}")
    release = int(numbers[1]), int(numbers[2])
    if release < OLDEST_TORCH:
        return Check("torch", "missing", f"{found} is too old", f"pip install 'torch>={oldest}'")
    if release > NEWEST_TORCH:
        return Check(
            "torch",
            "note",
            f"{found} is newer than what was tested",
            f"if something breaks, pip install torch=={newest}.0",
        )
    return Check("torch", "ok", f"{found}; supported are {oldest} to {newest}")


def _backends() -> Check:
    has = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
    }
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for a CPU"
    if getattr(torch.version, "hip", None):
        built = f"built for ROCm {torch.version.hip}"
    found = f"{', '.join(name for name, there in has.items() if there) or 'none'}; {built}"
    if not has["gloo"]:
        return Check("backends", "missing", found, "install a build of torch that has gloo")
    if torch.cuda.is_available() and not has["nccl"]:
        return Check("backends", "missing", found, "GPUs need a build of torch that has NCCL")
    return Check("backends", "ok", found)


def _devices() -> Check:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        without = "no GPU: collectives run on gloo, on the CPU"
        if torch.version.cuda is not None:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            hint = (
                "torch sees none; if the machine has one, nvidia-smi must show it"
                if hidden is None
                else f"CUDA_VISIBLE_DEVICES={hidden!r} hides what there is; unset it to use GPUs"
            )
            return Check("devices", "note", without, hint)
        if _NVIDIA_DRIVER.exists():
            return Check(
                "devices",
                "note",
                without,
                "the machine has an NVIDIA driver, but this torch is built for a CPU: install one "
                "for CUDA, see pytorch.org/get-started",
            )
        return Check("devices", "note", without)
    count = torch.accelerator.device_count()
    names = [f"{found.type}:{index}" for index in range(count)]
    if found.type == "cuda":
        every = [torch.cuda.get_device_properties(index) for index in range(count)]
        names = [f"{each.name}, {each.total_memory / _GIB:.0f} GiB" for each in every]
    text = "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    hint = "one H200 was measured so far; docs/gpu.md says how to try this device"
    return Check("devices", "note", text, hint)


def gloo_interface() -> Check:
    """Return which interface gloo uses, and whether a connection can be made through it: that of
    GLOO_SOCKET_IFNAME, else that of the host name's first address, as torch chooses."""
    name = "gloo's interface"
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    others = reachable()
    if given:
        has = addresses()
        for each in given.split(","):
            if not has.get(each):
                what = "has no address" if each in has else "is no interface of this machine"
                return Check(
                    name,
                    "missing",
                    f"GLOO_SOCKET_IFNAME={given}: {each!r} {what}",
                    f"use one of {', '.join(key for key, own in has.items() if own)}; or unset it",
                )
            if why := why_no_connection(has[each][0], each):
                return _no_connection(f"GLOO_SOCKET_IFNAME={given}", has[each][0], why)
        return Check(name, "ok", f"{given}, because GLOO_SOCKET_IFNAME says so")
    chosen = by_host_name()
    host = platform.node()
    for_several = (
        f"enough for one machine; for several, export GLOO_SOCKET_IFNAME={others[0]}"
        if others
        else "enough for one machine; for several, none has an address that others could reach"
    )
    if chosen.address is None:
        why = f"the loopback, because the host name {host!r} is no address of this machine"
        return Check(name, "note", why, for_several)
    why = (
        f"{chosen.interface or chosen.address}, because the host name {host!r} is {chosen.address}"
    )
    if failed := why_no_connection(chosen.address, chosen.interface):
        return _no_connection(why, chosen.address, failed)
    if chosen.is_loopback:
        return Check(name, "note", why, for_several)
    return Check(name, "ok", why)


def _no_connection(what: str, address: str, why: str) -> Check:
    works = [
        interface
        for interface, own in addresses().items()
        if own and address not in own and why_no_connection(own[0], interface) is None
    ]
    order = sorted(works, key=lambda interface: interface not in reachable())
    hint = f"export GLOO_SOCKET_IFNAME={order[0]}" if order else "no other interface works either"
    found = f"{what}: this machine cannot connect to itself at {address}: {why}"
    return Check("gloo's interface", "missing", found, f"a firewall? {hint}")


def _nccl_variables() -> Check:
    name = "NCCL variables"
    found = {
        key: value
        for key, value in sorted(os.environ.items())
        if key.startswith(("NCCL_", "TORCH_NCCL_"))
    }
    if not found:
        return Check(name, "ok", "none is set")
    text = ", ".join(f"{key}={value}" for key, value in found.items())
    given = found.get("NCCL_SOCKET_IFNAME", "")
    # NCCL takes beginnings of names; "=" in front asks for whole names, "^" for all others.
    if given and not given.startswith("^"):
        there = list(addresses())
        is_there = (
            [each for each in given[1:].split(",") if each in there]
            if given.startswith("=")
            else [each for each in there if each.startswith(tuple(given.split(",")))]
        )
        if not is_there:
            return Check(
                name,
                "note",
                text,
                f"NCCL_SOCKET_IFNAME fits no interface of this machine: {', '.join(there)}",
            )
    return Check(name, "ok", text)


# What is worth a word, by the variable and what its value looks like.
_OVERLAP = (
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        r"1",
        "the GPU takes work of all streams from one queue, so gathers wait behind compute that was "
        "enqueued before and hide less; unset it, or use 8 or more",
    ),
    (
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        r"0",
        "collectives of several groups run at once in no set order: with tensor, context or expert "
        "parallelism beside sharding they can use up the GPU and wait for each other for ever; "
        "set it to 1, or limit max_ctas in pg_options",
    ),
    (
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        r"1",
        "with a driver older than CUDA 12.9, collectives that a CUDA graph captures run one after "
        "the other, those of different groups too; to capture steps, use a newer driver, or limit "
        "max_ctas in pg_options instead",
    ),
    (
        "NCCL_COMM_SPLIT_SHARE_RESOURCES",
        r"1",
        "communicators that are split share buffers with their parent, so that the collectives of "
        "both may not run at once; the library splits none then, and connects its groups anew; "
        "unset it",
    ),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        r"(?i)detail",
        "each collective waits for all hosts first, so that nothing overlaps, and in torch 2.11 "
        "destroying a group does not end its collectives; unset it to train",
    ),
    (
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        r"(?i)1|t(rue)?|y(es)?",
        "another thread may launch NCCL's kernels, so that the overlap report cannot tell which "
        "unit they are for; unset it to profile",
    ),
)


def overlap_variables() -> Check:
    """Return what variables do to overlap and to recovery from faults on GPUs."""
    found = {key: os.environ[key] for key, *_ in _OVERLAP if os.environ.get(key)}
    text = ", ".join(f"{key}={value}" for key, value in found.items())
    hints = [
        f"{key}: {effect}"
        for key, pattern, effect in _OVERLAP
        if re.fullmatch(pattern, found.get(key, ""))
    ]
    if not found:
        text = (
            "none is set; with more kinds of parallelism, NCCL_LAUNCH_ORDER_IMPLICIT=1 is safer "
            "(in a captured CUDA graph it needs a driver of CUDA 12.9 or newer to overlap)"
        )
    return Check("overlap variables", "note" if hints else "ok", text, "; ".join(hints))


def threads() -> Check:
    """Return how many threads a rank computes with. torchrun sets OMP_NUM_THREADS=1 where it is not
    set, and other launchers leave each rank all cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or max(2, torch.accelerator.device_count()))
    share = max(1, cores() // ranks)
    given = os.environ.get("OMP_NUM_THREADS", "")
    if not given:
        found = f"{cores()}; OMP_NUM_THREADS is not set, and torchrun then gives a rank 1 thread"
        if share == 1:
            return Check("cores", "ok", found)
        return Check(
            "cores", "note", found, f"for {ranks} ranks here, export OMP_NUM_THREADS={share}"
        )
    found = f"{cores()}; OMP_NUM_THREADS={given}"
    if not given.isdecimal() or int(given) > share:
        return Check(
            "cores",
            "note",
            found,
            f"{ranks} ranks here would wait for each other; export OMP_NUM_THREADS={share}",
        )
    return Check("cores", "ok", found)


def _extra(extra: str) -> Check:
    packages, purpose = EXTRAS[extra]
    if absent := sorted(name for name in packages if find_spec(name) is None):
        return Check(
            f"extra {extra!r}",
            "note",
            f"{', '.join(absent)} not installed",
            f"pip install 'fsdp_overlap[{extra}]': {purpose}",
        )
    return Check(f"extra {extra!r}", "ok", f"{', '.join(sorted(packages))}: {purpose}")


def torchrun_variables() -> Check:
    """Return whether a launcher has started this process, and whether its port can be had if
    not."""
    name = "torchrun"
    has = [key for key in _MEETING if os.environ.get(key)]
    if not has:
        if not is_free("127.0.0.1", _TORCHRUN_PORT):
            return Check(
                name,
                "note",
                f"its variables are not set; another program has its port {_TORCHRUN_PORT}",
                "start with torchrun --standalone, or with another --master-port",
            )
        return Check(
            name, "ok", "its variables are not set; start programs with torchrun, which sets them"
        )
    text = ", ".join(f"{key}={os.environ[key]}" for key in has)
    if absent := [key for key in _MEETING if key not in has]:
        return Check(
            name,
            "note",
            f"{text}, but not {', '.join(absent)}",
            "init_process_group() needs all; start with torchrun, which sets them, or unset these",
        )
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        return Check(name, "note", text, f"MASTER_PORT={port} is no port; use one up to 65535")
    # torchrun itself listens there.
    by_hand = "TORCHELASTIC_RUN_ID" not in os.environ
    if by_hand and not is_free(os.environ["MASTER_ADDR"], int(port)):
        return Check(name, "note", text, f"another program has port {port}; choose another")
    return Check(name, "ok", text)
