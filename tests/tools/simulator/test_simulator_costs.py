"""What collectives cost, and what hardware files say. Published figures name their source."""

from __future__ import annotations

import itertools
import math
import operator
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp_overlap.tools.emulator import Operation, OperatorCall
from fsdp_overlap.tools.simulator.collective_time import (
    group_of,
    seconds_of_collective,
    seconds_of_list,
)
from fsdp_overlap.tools.simulator.costs import Costs, expected_maximum
from fsdp_overlap.tools.simulator.hardware import Device, Fabric, Host
from fsdp_overlap.tools.simulator.nccl_tuning import PROTOCOLS, Group, Kind, ring, tree
from fsdp_overlap.tools.simulator.tables import SHIPPED, Curve, HardwareError, shipped
from support.pages import ROOT

H100 = Fabric.read("nvlink4_400g")
LOOPBACK = Fabric.read("loopback_2g")
KINDS: list[Kind] = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]
MIB, GIB = 2**20, 2**30

# ---- hardware files ----


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*/*.toml")), ids=lambda path: path.stem)
def test_every_shipped_number_has_its_source_or_is_called_an_assumption(path: Path) -> None:
    {"device": Device, "fabric": Fabric, "host": Host}[path.parent.name].read(path)
    comments = ""
    for line in path.read_text().splitlines():
        before, _, comment = line.partition("#")
        if not before.strip():
            comments = f"{comments} {comment}" if comment else ""
        elif re.search(r"=\s*[\d{]", before):
            assert comment or comments, line
            comments = comments if not comment else ""
        else:
            comments = ""


def test_the_names_that_were_promised_are_shipped() -> None:
    assert {"h100_sxm", "h100_500w", "a100_sxm", "h200_sxm", "gb200"} <= {*shipped("device")}
    fabrics = {"nvlink4_400g", "nvlink5_800g", "nvlink3_roce_200g", "nvl72", "loopback_2g"}
    assert fabrics <= {*shipped("fabric")}


def test_a_wheel_has_the_files() -> None:
    package = SHIPPED.parents[2]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["fsdp_overlap"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {*SHIPPED.rglob("*.toml")} <= packed


def test_units_are_seconds_and_bytes() -> None:
    device = Device.read("h100_500w")
    assert device.products["bfloat16"].peak == 989e12
    assert device.memory_bandwidth == 2.4e12
    assert device.kernel_seconds == 2e-6
    assert H100.within.bandwidth == 450e9
    assert H100.whole_nodes.points[0] == (8 * MIB, 0.68)


def edited(tmp_path: Path, of: str, old: str, new: str) -> Path:
    text = (SHIPPED / f"{of}.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("peak_tflops = 989", "peak_tflops = 989e12", r"from 1 to 100000.*unit that its name ends"),
        ("peak_tflops = 989", 'peak_tflops = "989 TFLOPS"', r"write peak_tflops = a number"),
        ("efficiency = 0.803", "efficiency = 80.3", r"\[bfloat16\]: efficiency = 80.3.*0.01 to 1"),
        ("kernel_us = 2", "", "kernel_us is missing; write kernel_us = a number"),
        ("kernel_us = 2", "kernel_us = 2\nkernel_ms = 1", "kernel_ms is unknown; did you mean"),
        ("[products.float8]", "[products.fp8]", "fp8 is unknown; did you mean float8"),
        ("[host]", "[hosts]", r"host is missing; write a table \[host\]"),
        ("[host]", "[host", "mine.toml: "),
        ("slowdown = 0.189", "slowdown = true", "slowdown = True is none"),
        ("deviation = 0.015", "deviation = 1.5", r"\[variation\]: deviation = 1.5.*0 to 0.2"),
    ],
)
def test_a_wrong_device_file_says_what_to_write(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    with pytest.raises(HardwareError, match=says):
        Device.read(edited(tmp_path, "device/h100_sxm", old, new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"hopper"', '"volta"', "one of ampere, hopper, blackwell"),
        ("{ 2 = 0.96 }", "0.96", "shares by sizes"),
        ("{ 2 = 0.96 }", "{ 2 = 96 }", "shares by sizes"),
        ('library = "nccl"', 'library = "mpi"', "one of nccl, gloo"),
    ],
)
def test_a_wrong_fabric_file_says_what_to_write(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    with pytest.raises(HardwareError, match=says):
        Fabric.read(edited(tmp_path, "fabric/nvlink4_400g", old, new))


def test_an_unknown_name_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"no device 'b300'; there are a100_sxm, gb200, h100"):
        Device.read("b300")
    with pytest.raises(HardwareError, match="there is no file"):
        Fabric.read(tmp_path / "none.toml")


def test_the_slowest_of_many_devices() -> None:
    """Known means of the largest of so many normal draws: for two it is 1/sqrt(pi)."""
    known = {1: 0.0, 2: math.pi**-0.5, 3: 1.5 * math.pi**-0.5, 10: 1.53875, 100: 2.50759}
    for count, mean in known.items():
        assert expected_maximum(count) == pytest.approx(mean, abs=1e-5)
    device = replace(Device.read("h100_sxm"), variation=0.02)
    assert Costs(device, H100).slowest(100) == pytest.approx(1 + 0.02 * 2.50759)
    # Of 259 that were rented, the fastest and the slowest lie 34.5% apart.
    rented = Costs(device.rented(), H100)
    assert 2 * (rented.slowest(259) - 1) == pytest.approx(0.345, abs=0.001)
    with pytest.raises(HardwareError, match="write rented_deviation, as"):
        replace(device, rented_variation=None).rented()


def test_stretched_compute_takes_so_many_times_as_long() -> None:
    device = Device.read("h100_sxm")
    values = torch.empty(MIB, device="meta")
    unknown = Operation("copy", [values], [values])  # by Python, which calls no operator
    call = OperatorCall(torch.ops.aten.mul.Tensor, (values, values), {}, values)
    for operation, moved in ((unknown, 2), (unknown._replace(call=call), 3)):
        expected = 2e-6 + moved * 4 * MIB / (3.35e12 * 0.92)
        assert Costs(device, H100).compute(operation) == pytest.approx(expected)
        assert Costs(device, H100, matmul_stretch=1.5, other_stretch=1.5).compute(
            operation
        ) == pytest.approx(1.5 * expected)


def test_collectives_that_leave_their_node_have_another_link() -> None:
    costs = Costs(Device.read("h100_sxm"), H100)
    links = [costs.link(ranks) for ranks in (range(8), range(8, 16), range(16), range(0, 64, 8))]
    assert links == ["within nodes"] * 2 + ["between nodes"] * 2


def test_an_all_to_all_takes_as_long_as_its_slower_links() -> None:
    """Latencies and shares of the network are autoparallel's."""
    size = 16 * MIB
    within = seconds_of_collective(H100, Group(8), "all_to_all", size)
    assert within == pytest.approx(50e-6 + size * 7 / 8 / (450e9 * 0.766))
    across = seconds_of_collective(H100, Group(16, 2), "all_to_all", size)
    assert across == pytest.approx(37e-6 + size / 2 / (50e9 * 0.78))
    far = seconds_of_collective(H100, Group(64, 8), "all_to_all", size)
    assert far == pytest.approx(60e-6 + size * 7 / 8 / (50e9 * 0.945))


def test_a_curve_is_straight_over_the_logarithm_and_level_outside() -> None:
    curve = Curve(((2, 0.4), (8, 0.8), (16, 0.5)))
    found = [curve.at(size) for size in (1, 2, 4, 8, 16, 99)]
    assert found == pytest.approx([0.4, 0.4, 0.6, 0.8, 0.5, 0.5])


# ---- NCCL's own model ----

# With what NCCL counts on: NVLink that does not hold up the network, and no loss on whole nodes.
COUNTED_ON = replace(
    H100, within=replace(H100.within, bandwidth=1e12), whole_nodes=Curve(((1, 1.0),))
)

# (latency in us, bandwidth in GB/s) for LL, LL128 and Simple, as NCCL 2.27.5 logs them on H100:
# meta-pytorch/autoparallel, cost_models/nccl_cost_model.py, at a54c252.
LOGGED_RING = {
    ("all_gather", 2, 1): ((11.6, 48.0), (22.5, 88.3), (22.4, 96.0)),
    ("all_gather", 2, 8): ((23.3, 41.6), (44.6, 313.2), (70.0, 409.6)),
    ("all_gather", 4, 2): ((18.7, 23.3), (33.6, 100.9), (64.0, 109.7)),
    ("reduce_scatter", 8, 8): ((81.5, 20.7), (148.4, 298.3), (296.8, 390.1)),
    ("all_gather", 32, 4): ((186.3, 20.6), (320.4, 178.0), (768.8, 193.5)),
    ("all_gather", 32, 8): ((314.3, 20.5), (563.6, 294.8), (1204.0, 385.5)),
}
LOGGED_RING_ALL_REDUCE = {
    (2, 1): ((16.6, 24.0), (31.0, 44.2), (36.4, 48.0)),
    (4, 8): ((78.8, 10.5), (144.4, 151.5), (282.8, 198.2)),
    (32, 1): ((316.6, 10.5), (541.0, 22.8), (876.4, 24.8)),
}
LOGGED_TREE = {
    (2, 1): ((16.8, 9.3), (31.0, 31.2), (36.4, 35.2)),
    (2, 8): ((25.2, 16.6), (48.5, 124.8), (92.4, 140.8)),
    (4, 4): ((30.4, 8.7), (55.5, 70.4), (88.4, 75.1)),
    (16, 8): ((55.2, 8.7), (99.5, 98.6), (176.4, 122.4)),
    (32, 1): ((56.8, 4.9), (99.0, 17.6), (148.4, 18.8)),
}


def rounded(latency: float, bandwidth: float) -> tuple[float, float]:
    return latency * 1e6, bandwidth / 1e9


@pytest.mark.parametrize(("case", "logged"), LOGGED_RING.items(), ids=str)
def test_rings_are_what_nccl_logs(case: tuple[Kind, int, int], logged: tuple) -> None:
    kind, nodes, a_node = case
    for protocol, expected in zip(PROTOCOLS, logged, strict=True):
        found = rounded(*ring(COUNTED_ON, Group(nodes * a_node, nodes), kind, protocol))
        assert found == pytest.approx(expected, abs=0.06), protocol


@pytest.mark.parametrize(("case", "logged"), LOGGED_RING_ALL_REDUCE.items(), ids=str)
def test_rings_of_all_reduces_are_what_nccl_logs(case: tuple[int, int], logged: tuple) -> None:
    nodes, a_node = case
    for protocol, expected in zip(PROTOCOLS, logged, strict=True):
        found = rounded(*ring(COUNTED_ON, Group(nodes * a_node, nodes), "all_reduce", protocol))
        assert found == pytest.approx(expected, abs=0.06), protocol


@pytest.mark.parametrize(("case", "logged"), LOGGED_TREE.items(), ids=str)
def test_trees_are_what_nccl_logs(case: tuple[int, int], logged: tuple) -> None:
    nodes, a_node = case
    for protocol, expected in zip(PROTOCOLS, logged, strict=True):
        found = rounded(*tree(COUNTED_ON, Group(nodes * a_node, nodes), protocol, 2**40))
        assert found == pytest.approx(expected, abs=0.06), protocol


# ---- published measurements, which the model is not fitted to ----

# The shares of links are autoparallel's fits. These measurements are of others:
# (fabric, group, kind, size, bus bandwidth in GB/s, tolerance)
B200 = replace(
    Fabric.read("nvlink5_800g"), between=H100.between, whole_nodes=H100.whole_nodes
)  # AWS P6-B200: 400 Gb/s a GPU
MEASURED = [
    # NVIDIA/nccl-tests, issue 212: "370GB/s, which you can observe as BusBw", of one H100 node
    (H100, Group(8), "all_gather", 8 * GIB, 370, 0.08),
    # the same: all-reduce by the switches, "a peak busBw of ~480GB/s"
    (H100, Group(8), "all_reduce", 8 * GIB, 480, 0.08),
    # NVIDIA/nccl, issue 1218: all-gather of 2 GiB on 32 nodes, "only" 200 GB/s
    (H100, Group(256, 32), "all_gather", 2 * GIB, 200, 0.15),
    # stas00/ml-engineering, network/README.md, "Inter-node speed": all-reduce, 4 nodes
    (B200, Group(32, 4), "all_reduce", 1 * GIB, 362, 0.15),
    (B200, Group(32, 4), "all_reduce", 16 * GIB, 382, 0.15),
    # the same, one node
    (B200, Group(8), "all_reduce", 512 * MIB, 689, 0.08),
]


@pytest.mark.parametrize(("fabric", "group", "kind", "size", "bus", "tolerance"), MEASURED)
def test_large_collectives_run_at_measured_speed(
    fabric: Fabric, group: Group, kind: Kind, size: int, bus: float, tolerance: float
) -> None:
    passes = (2 if kind == "all_reduce" else 1) * (group.ranks - 1) / group.ranks
    found = size * passes / seconds_of_collective(fabric, group, kind, size) / 1e9
    assert found == pytest.approx(bus, rel=tolerance)


# docs/results.md, **collectives**: milliseconds of 25 MiB, 2 ranks, 2 Gbit/s
@pytest.mark.parametrize(
    ("kind", "count", "milliseconds"),
    [("broadcast", 2, 103), ("all_to_all", 1, 109), ("reduce_scatter", 1, 219)],
)
def test_collectives_over_the_slow_loopback_take_what_was_measured(
    kind: Kind, count: int, milliseconds: float
) -> None:
    found = seconds_of_list(LOOPBACK, Group(2), kind, [25 * MIB / count] * count)
    assert found * 1e3 == pytest.approx(milliseconds, rel=0.05)


# ---- properties ----


@pytest.mark.parametrize("name", shipped("fabric"))
@pytest.mark.parametrize("kind", KINDS)
def test_time_grows_with_size_and_in_the_end_in_proportion(name: str, kind: Kind) -> None:
    fabric = Fabric.read(name)
    groups = [Group(2), Group(8)]
    if fabric.between:
        groups += [Group(4, 4), Group(16, 4), Group(fabric.ranks_a_node * 16, 16)]
    for group in groups:
        sizes = [2 ** (at / 4) for at in range(4 * 10, 4 * 40)]
        seconds = [seconds_of_collective(fabric, group, kind, size) for size in sizes]
        assert all(itertools.starmap(operator.lt, itertools.pairwise(seconds))), group
        assert seconds[-1] / seconds[-5] == pytest.approx(2, rel=0.01), group


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("group", [Group(2), Group(8), Group(4, 4), Group(64, 8)])
def test_large_rings_tend_to_the_bound_of_their_links(kind: Kind, group: Group) -> None:
    size = 2**40
    link = 450e9 * H100.within.efficiency.at(group.ranks)
    if group.nodes > 1:
        link = 50e9 * 0.96 * group.a_node * (0.87 if group.a_node == 8 else 1)
    bound = size * (group.ranks - 1) / group.ranks / link
    assert seconds_of_collective(H100, group, kind, size) == pytest.approx(bound, rel=0.01)


def test_a_network_carries_what_the_group_has_ranks_for() -> None:
    seconds = [
        seconds_of_collective(H100, Group(4 * a_node, 4), "all_gather", 4 * GIB)
        for a_node in (1, 2, 4)
    ]
    # (n-1)/n of the bytes over so many links
    assert seconds[0] / seconds[1] == pytest.approx(2 * (3 / 4) / (7 / 8), rel=0.02)
    assert seconds[1] / seconds[2] == pytest.approx(2 * (7 / 8) / (15 / 16), rel=0.02)


def test_latency_of_small_gathers_grows_with_the_group() -> None:
    small, large = [
        seconds_of_collective(H100, Group(8 * nodes, nodes), "all_gather", 64 * 1024)
        for nodes in (2, 32)
    ]
    assert large > 10 * small


def test_small_all_reduces_take_trees_and_large_ones_rings() -> None:
    group = Group(256, 32)

    def of_rings(size: float) -> float:
        return min(ring(H100, group, "all_reduce", each).seconds(size) for each in PROTOCOLS)

    assert seconds_of_collective(H100, group, "all_reduce", 64 * 1024) < of_rings(64 * 1024) / 3
    assert seconds_of_collective(H100, group, "all_reduce", 32 * GIB) > of_rings(32 * GIB)


def test_one_rank_and_no_bytes_take_no_time() -> None:
    for kind in KINDS:
        assert seconds_of_collective(H100, Group(1), kind, GIB) == 0
        assert seconds_of_collective(H100, Group(8), kind, 0) == 0
    assert seconds_of_list(H100, Group(8), "broadcast", [0] * 8) == 0


def test_lists_carry_the_bytes_of_one_collective_and_more_latency() -> None:
    for group in (Group(8), Group(128, 16)):
        sizes = [GIB / group.ranks] * group.ranks
        equal = seconds_of_collective(H100, group, "all_gather", GIB)
        ragged = seconds_of_list(H100, group, "broadcast", sizes)
        assert equal <= ragged < 1.1 * equal
    # Where one rank has it all, the link past each of the others carries it all.
    one = seconds_of_list(H100, Group(8), "broadcast", [GIB, *[0] * 7])
    eight = seconds_of_list(H100, Group(8), "broadcast", [GIB / 8] * 8)
    assert one / eight == pytest.approx(8 / 7, rel=0.01)
    few, many = [seconds_of_list(H100, Group(8), "reduce", [MIB / n] * n) for n in (17, 170)]
    assert many > few


def test_collectives_of_one_launch_wait_for_each_other_only_on_the_same_channel() -> None:
    group, hops = Group(64, 8), ring(H100, Group(64, 8), "all_gather", "LL").latency
    one, as_many_as_channels, one_more = (
        seconds_of_list(H100, group, "all_gather", [GIB / count] * count) for count in (1, 8, 9)
    )
    assert one == as_many_as_channels == seconds_of_collective(H100, group, "all_gather", GIB)
    assert one_more - one == pytest.approx(hops)


def test_the_form_of_a_collective_tells_what_it_costs() -> None:
    """One tensor in and eight out are broadcasts, and as many out as in are gathers, if NCCL runs
    them."""
    costs, ranks = Costs(Device.read("h100_sxm"), H100), range(8)
    full, parts = torch.empty(8, MIB, device="meta"), torch.empty(8, MIB, device="meta").unbind()

    def gather(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> float:
        return costs.collective(Operation("all_gather", reads, writes), ranks)

    sizes = [part.nbytes for part in parts]
    assert gather(parts[:1], [full]) == seconds_of_collective(
        H100, Group(8), "all_gather", full.nbytes
    )
    ragged = gather(parts[:1], [*parts[1:], parts[0][: MIB // 2]])
    assert ragged == seconds_of_list(H100, Group(8), "broadcast", [*sizes[1:], 2 * MIB])
    assert gather(parts[:2], parts[2:4]) == seconds_of_list(H100, Group(8), "all_gather", sizes[:2])


def test_every_byte_of_every_rank_goes_over_a_shared_link() -> None:
    two, four = [seconds_of_collective(LOOPBACK, Group(n), "all_gather", GIB) for n in (2, 4)]
    assert four / two == pytest.approx(3, rel=0.01)


def test_groups_are_of_the_nodes_that_their_ranks_are_on() -> None:
    assert group_of(H100, range(16)) == (16, 2)
    assert group_of(H100, range(0, 64, 8)) == (8, 8)
    assert group_of(H100, [0, 4]) == (2, 1)
    assert group_of(Fabric.read("nvl72"), range(64)) == (64, 1)
    with pytest.raises(ValueError, match="give each rank once"):
        group_of(H100, [0, 0])


def test_wrong_collectives_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="there are all_gather"):
        seconds_of_collective(H100, Group(8), "gather", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0"):
        seconds_of_collective(H100, Group(8), "all_gather", -1)
    one_node = replace(H100, between=None)
    with pytest.raises(ValueError, match=r"write a table \[between\]"):
        seconds_of_collective(one_node, Group(16, 2), "all_gather", 1)


def test_every_time_is_a_number() -> None:
    for name in shipped("fabric"):
        fabric = Fabric.read(name)
        for nodes in (1, 2, 3, 64) if fabric.between else (1,):
            for kind in KINDS:
                group = Group(3 * nodes, nodes)
                assert math.isfinite(seconds_of_collective(fabric, group, kind, 12_345))
