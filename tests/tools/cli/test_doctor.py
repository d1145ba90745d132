"""`fsdp-overlap doctor`: what it says of a machine, each hint provoked, and its exit code."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_overlap.tools.cli import doctor, network, trial
from fsdp_overlap.tools.cli.doctor import Check
from fsdp_overlap.tools.cli.network import GlooInterface
from support.cli_runs import run_main
from support.pages import ROOT
from support.ranks import PRELOAD

RANK = trial._rank
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def plain(monkeypatch: Patch) -> None:
    """A machine with two cores and a name of its own, and no variables."""
    for name in list(os.environ):
        if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCHELASTIC_")) or name in (
            *doctor._MEETING,
            "LOCAL_WORLD_SIZE",
            "OMP_NUM_THREADS",
            "CUDA_VISIBLE_DEVICES",
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "TORCH_DISTRIBUTED_DEBUG",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "cores", lambda: 2)
    monkeypatch.setattr(doctor, "addresses", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"]})
    monkeypatch.setattr(doctor, "reachable", lambda: ["eth0"])
    monkeypatch.setattr(doctor, "why_no_connection", lambda address, interface: None)
    monkeypatch.setattr(doctor, "by_host_name", lambda: GlooInterface("eth0", "10.0.0.2"))
    monkeypatch.setattr(doctor, "is_free", lambda address, port: True)
    multiprocessing.set_forkserver_preload(PRELOAD)  # a server that has imported torch
    monkeypatch.setattr(trial, "START_METHOD", "forkserver")


def check(name: str) -> Check:
    [found] = [each for each in doctor.looked_at() if each.name == name]
    return found


# ---- the whole command ----


@pytest.mark.slow
def test_a_plain_run_ends_with_0() -> None:
    """In a process of its own, whose ranks are spawned as a user's are."""
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_overlap", "doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "ready"
    assert not [line for line in lines if line.startswith("missing")]
    assert re.search(r"^ok +two ranks +gathered and reduced", done.stdout, re.MULTILINE)
    assert re.search(rf"^ok +torch +{re.escape(torch.__version__)}", done.stdout, re.MULTILINE)


def test_json_has_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"] is True
    assert len({each["name"] for each in found["checks"]}) == len(found["checks"]) == 14
    assert all(each["found"] for each in found["checks"])


def test_what_is_missing_ends_with_1_and_is_named(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert run_main("doctor") == 1
    out = capsys.readouterr().out
    assert re.search(r"missing torch +2\.9\.1\+cpu is too old\n +-> pip install", out)
    assert out.splitlines()[-1] == "not ready: torch"


def test_no_time_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("doctor", "--timeout", "0") == 2
    assert "--timeout 0: must be more than 0" in capsys.readouterr().err


def test_of_torchruns_ranks_one_answers(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("RANK", "1")
    assert run_main("doctor") == 0
    assert capsys.readouterr().out == ""


# ---- the trial ----


def with_an_unknown_interface(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    RANK(rank, port, seconds, pipe)


def whose_other_does_not_come(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    if rank == 0:
        RANK(rank, port, 2, pipe)
    else:
        time.sleep(seconds)


def that_dies(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    pipe.send((trial.GATHERING, ""))
    os._exit(9)


def that_is_wrong(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    torch.full_like = lambda whole, mean: whole  # type: ignore[assignment, misc]
    RANK(rank, port, seconds, pipe)


def that_hangs(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    time.sleep(600)


def that_never_imports(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    raise SystemExit


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rank", "seconds", "found", "hint"),
    [
        (with_an_unknown_interface, 60, "Unable to find address", "GLOO_SOCKET_IFNAME=eth0"),
        (whose_other_does_not_come, 60, "rank 0, forming a gloo group: ", "firewall"),
        (that_dies, 60, "rank [01] died while gathering the layer", "report this"),
        (that_is_wrong, 60, "rank [01], reducing its gradients: AssertionError", "report this"),
        (that_never_imports, 60, "rank [01] died while importing torch", "-c 'import fsdp_ov"),
        (that_hangs, 0.5, r"not done after 0\.5 seconds: rank 0 was importing", "--timeout 300"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_trial_that_fails_says_where_and_what_to_do(
    monkeypatch: Patch, rank: Callable[..., None], seconds: float, found: str, hint: str
) -> None:
    monkeypatch.setattr(trial, "_rank", rank)
    tried = doctor.try_out(seconds)
    assert tried.state == "missing"
    assert re.search(found, tried.found), tried.found
    assert hint in tried.hint


def test_a_trial_says_what_it_does() -> None:
    said: list[str] = []
    trial.try_two_ranks(60, said.append)
    assert [*dict.fromkeys(said)] == [
        trial.IMPORTING,
        trial.MEETING,
        trial.GATHERING,
        trial.REDUCING,
        "done",
    ]


# ---- what is looked at ----


def test_supported_is_what_the_readme_and_the_package_say() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = (".".join(map(str, t)) for t in (doctor.OLDEST_TORCH, doctor.NEWEST_TORCH))
    assert project["dependencies"] == [f"torch>={oldest}"]
    [tested] = re.findall(r"Tested with torch (.*)\.\n", (ROOT / "README.md").read_text())
    assert re.findall(r"[\d.]+\d", tested)[0] == oldest
    assert re.findall(r"[\d.]+\d", tested)[-1] == newest
    extras = project["optional-dependencies"]
    for extra, (packages, _) in doctor.EXTRAS.items():
        needed = {re.split(r"[><=\[]", each)[0] for each in extras[extra]}
        assert packages == needed - {"fsdp_overlap"}
    assert doctor.EXTRAS.keys() == extras.keys() - {"dev"}


@pytest.mark.parametrize(
    ("version", "state", "hint"),
    [
        ("2.10.0", "missing", "pip install 'torch>=2.11'"),
        ("2.11.0+cu130", "ok", ""),
        ("2.15.1", "ok", ""),
        ("2.16.0.dev20260101", "note", "pip install torch==2.15.0"),
        ("3.0.0", "note", "pip install torch==2.15.0"),
        ("unknown", "note", "tested with 2.11 to 2.15"),
    ],
)
def test_versions_of_torch(monkeypatch: Patch, version: str, state: str, hint: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = check("torch")
    assert (found.state, version in found.found) == (state, True)
    assert hint in found.hint


def test_a_torch_without_gloo_is_missing_it(monkeypatch: Patch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert check("backends").state == "missing"


def test_gpus_without_nccl_are_missing_it(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "NCCL" in check("backends").hint


def test_devices_are_named_with_their_memory(monkeypatch: Patch) -> None:
    class Card:
        name = "NVIDIA H100"
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Card)
    assert check("devices").found == "8 x NVIDIA H100, 80 GiB"


def test_why_there_are_no_devices(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", tmp_path / "none")
    found = check("devices")
    assert (found.state, found.hint) == ("note", "")
    assert found.found == "no GPU: collectives run on gloo, on the CPU"
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", tmp_path)
    assert "this torch is built for a CPU" in check("devices").hint
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi must show it" in check("devices").hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides" in check("devices").hint


def test_the_interface_that_is_asked_for(monkeypatch: Patch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert doctor.gloo_interface().state == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    found = doctor.gloo_interface()
    assert found.state == "missing"
    assert "'eth7' is no interface of this machine" in found.found
    assert "use one of lo, eth0" in found.hint
    monkeypatch.setattr(doctor, "addresses", lambda: {"lo": ["127.0.0.1"], "eth7": []})
    found = doctor.gloo_interface()
    assert "'eth7' has no address" in found.found
    assert "use one of lo;" in found.hint


def test_the_interface_of_the_host_name(monkeypatch: Patch) -> None:
    host = platform.node()
    found = doctor.gloo_interface()
    assert found.found == f"eth0, because the host name {host!r} is 10.0.0.2"
    for chosen, why in (
        (GlooInterface("lo", "127.0.1.1"), f"lo, because the host name {host!r} is 127.0.1.1"),
        (GlooInterface(None, None), f"the loopback, because the host name {host!r} is no address"),
    ):
        monkeypatch.setattr(doctor, "by_host_name", lambda chosen=chosen: chosen)
        found = doctor.gloo_interface()
        assert (found.state, why in found.found) == ("note", True)
        assert found.hint.endswith("for several, export GLOO_SOCKET_IFNAME=eth0")
    monkeypatch.setattr(doctor, "reachable", list)
    assert "none has an address that others could reach" in doctor.gloo_interface().hint


def test_an_interface_that_nothing_goes_through(monkeypatch: Patch) -> None:
    def fails(address: str, interface: str | None) -> str | None:
        return None if interface == "eth1" else "timed out"

    own = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "eth1": ["10.0.1.2"], "eth2": []}
    monkeypatch.setattr(doctor, "addresses", lambda: own)
    monkeypatch.setattr(doctor, "why_no_connection", fails)
    found = doctor.gloo_interface()
    assert found.state == "missing"
    assert found.found.endswith("cannot connect to itself at 10.0.0.2: timed out")
    assert found.hint.endswith("export GLOO_SOCKET_IFNAME=eth1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert doctor.gloo_interface().state == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1,eth0")
    assert doctor.gloo_interface().hint.endswith("export GLOO_SOCKET_IFNAME=eth1")
    monkeypatch.setattr(doctor, "why_no_connection", lambda *_: "timed out")
    assert doctor.gloo_interface().hint.endswith("no other interface works either")


def test_connections_are_tried(monkeypatch: Patch) -> None:
    assert network.why_no_connection("127.0.0.1") is None
    assert network.why_no_connection("192.0.2.77")  # an address of documents
    monkeypatch.setattr(network, "CONNECT_SECONDS", 0.01)

    def drops(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket.socket, "connect", drops)
    assert network.why_no_connection("127.0.0.1") == "timed out"


def test_the_host_name_is_looked_up_as_torch_does(monkeypatch: Patch) -> None:
    def names(*found: str) -> None:
        answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in found]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)

    names("192.0.2.77", "127.0.0.1")  # the first is of documents, and so of no machine
    assert network.by_host_name() == GlooInterface("lo", "127.0.0.1")
    names("127.0.1.1")
    assert network.by_host_name() == GlooInterface("lo", "127.0.1.1")
    names("192.0.2.77")
    assert network.by_host_name() == GlooInterface(None, None)


def test_interfaces_have_the_addresses_that_can_be_bound() -> None:
    found = network.addresses()
    assert "127.0.0.1" in found["lo"]
    assert "lo" not in network.reachable()
    with socket.socket() as bound:
        bound.bind((found["lo"][0], 0))
        bound.listen()
        assert not network.is_free("127.0.0.1", bound.getsockname()[1])
        port = bound.getsockname()[1]
    assert network.is_free("127.0.0.1", port)
    assert network.is_free("192.0.2.77", port)  # of another machine


@pytest.mark.parametrize(
    ("value", "state"),
    [("eth", "ok"), ("=eth0", "ok"), ("^lo", "ok"), ("ib0", "note"), ("=eth", "note")],
)
def test_variables_of_nccl_are_shown_and_its_interface_is_looked_for(
    monkeypatch: Patch, value: str, state: str
) -> None:
    assert check("NCCL variables").found == "none is set"
    monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    found = check("NCCL variables")
    assert found.found == f"NCCL_SOCKET_IFNAME={value}, TORCH_NCCL_NAN_CHECK=1"
    assert found.state == state
    assert bool(found.hint) == (state == "note")


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "hide less"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", ""),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "0", "set it to 1"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", "a CUDA graph captures run one after the other"),
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1", "may not run at once"),
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0", ""),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "nothing overlaps"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", ""),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "true", "overlap report"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "0", ""),
    ],
)
def test_what_variables_do_to_overlap(
    monkeypatch: Patch, variable: str, value: str, hint: str
) -> None:
    assert "none is set" in check("overlap variables").found
    monkeypatch.setenv(variable, value)
    found = check("overlap variables")
    assert found.found == f"{variable}={value}"
    assert found.state == ("note" if hint else "ok")
    assert hint in found.hint


@pytest.mark.parametrize(
    ("cores", "given", "hint"),
    [
        (2, "", ""),
        (8, "", "for 2 ranks here, export OMP_NUM_THREADS=4"),
        (8, "4", ""),
        (8, "8", "would wait for each other; export OMP_NUM_THREADS=4"),
        (8, "many", "export OMP_NUM_THREADS=4"),
    ],
)
def test_threads_a_rank(monkeypatch: Patch, cores: int, given: str, hint: str) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "cores", lambda: cores)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    found = doctor.threads()
    assert found.state == ("note" if hint else "ok")
    assert found.hint.endswith(hint)


def test_packages_of_extras(monkeypatch: Patch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "isal" else name)
    found = check("extra 'checkpoint'")
    assert (found.state, found.found) == ("note", "isal not installed")
    assert found.hint.startswith("pip install 'fsdp_overlap[checkpoint]'")
    assert check("extra 'report'").state == "ok"


@pytest.mark.parametrize(
    ("given", "found", "hint"),
    [
        ({}, "are not set", ""),
        ({"RANK": "0"}, "RANK=0, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "needs all"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000", "is no port"),
        ({"MASTER_PORT": "29511"}, "MASTER_PORT=29511", ""),
    ],
)
def test_variables_of_torchrun(
    monkeypatch: Patch, given: dict[str, str], found: str, hint: str
) -> None:
    complete = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in ({**complete, **given} if "MASTER_PORT" in given else given).items():
        monkeypatch.setenv(name, value)
    answer = doctor.torchrun_variables()
    assert found in answer.found
    assert (hint in answer.hint) if hint else not answer.hint


def test_a_port_that_is_taken(monkeypatch: Patch) -> None:
    monkeypatch.setattr(doctor, "is_free", network.is_free)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "_TORCHRUN_PORT", port)
        assert "torchrun --standalone" in doctor.torchrun_variables().hint
        for name, value in zip(doctor._MEETING, ("0", "2", "127.0.0.1", str(port)), strict=True):
            monkeypatch.setenv(name, value)
        assert f"another program has port {port}" in doctor.torchrun_variables().hint
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")  # it is torchrun's
        assert doctor.torchrun_variables().state == "ok"
