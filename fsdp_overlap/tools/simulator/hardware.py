"""Devices and fabrics, described by TOML files.

The files that come with the library are in ``hardware/``. Their keys carry the unit
(``bandwidth_gb_per_s``); here everything is in seconds, bytes, bytes/s and FLOP/s. GB is 10^9 bytes
and GiB is 2^30.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from fsdp_overlap.tools.simulator.tables import Curve, HardwareError, TomlTable, reading

MICRO, GIGA, TERA, GIB = 1e-6, 1e9, 1e12, 2**30
PRODUCTS = ("bfloat16", "float8", "float32", "tfloat32", "float64")
ATTENTIONS = ("flash", "cudnn")


@dataclass(frozen=True)
class MatmulRate:
    """Matrix products of one dtype: FLOP/s by the data sheet, without sparsity, and the share of
    them that large products reach."""

    peak: float
    efficiency: float


@dataclass(frozen=True)
class AttentionRate:
    """The shares of the products' peak that an attention kernel reaches."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Device:
    """One GPU, and the host that feeds it."""

    name: str
    products: Mapping[str, MatmulRate]
    """By dtype, of those in ``PRODUCTS``: bfloat16 is float16 too, tfloat32 is float32 that is
    rounded."""
    small_products: Curve
    """The share of the efficiency that products in 8 and 16 bits reach, by their FLOPs."""
    attentions: Mapping[str, AttentionRate]
    """By kernel: ``flash`` is torch's, ``cudnn`` also stands for FlashAttention-3 and those of
    Transformer Engine."""
    memory_bandwidth: float
    """By the data sheet, bytes/s."""
    memory_efficiency: float
    memory_size: int
    """Bytes that programs can have."""
    kernel_seconds: float
    """What each kernel takes on the device however little it does."""
    operation_seconds: float
    """What the host takes for one operation of an eager program."""
    overlap_slowdown: float
    """How much longer compute takes while a collective runs beside it: 0.1 is ten percent."""
    attention: str
    """Which of the kernels there is."""
    variation: float
    """By how much devices of this name differ: the standard deviation of the time of compute, as a
    share of its mean."""
    rented_variation: float | None = None
    """The same of devices that a cloud rents out, if it is known."""
    share_in_training: float = 1.0
    """The share of these rates that matrix products reach within a step, beside all else that uses
    power, caches and memory."""

    @classmethod
    def read(cls, name_or_path: str | Path) -> Self:
        """Return the device of this name in `hardware/`, or of the TOML file at this path."""
        with reading("device", name_or_path) as top:
            of_products, memory = top.table("products"), top.table("memory")
            products = {
                dtype: MatmulRate(
                    table.number("peak_tflops", 1, 1e5) * TERA, table.number("efficiency", 0.01, 1)
                )
                for dtype, table in of_products.tables(PRODUCTS)
            }
            small, share = Curve(((1.0, 1.0),)), 1.0
            if "share_in_training" in of_products:
                share = of_products.number("share_in_training", 0.1, 1)
            if "share_by_gflop" in of_products:
                small = of_products.curve("share_by_gflop", GIGA)
            attentions = {
                kernel: AttentionRate(
                    table.number("forward_efficiency", 0.01, 1),
                    table.number("backward_efficiency", 0.01, 1),
                )
                for kernel, table in top.table("attention").tables(ATTENTIONS)
            }
            if "flash" not in attentions:
                raise HardwareError(f"{name_or_path}: write a table [attention.flash]")
            host, overlap = top.table("host"), top.table("overlap")
            variation, rented = top.table("variation"), None
            if "rented_deviation" in variation:
                rented = variation.number("rented_deviation", 0, 0.2)
            return cls(
                name=top.text("name"),
                products=products,
                small_products=small,
                attentions=attentions,
                attention="flash",
                memory_bandwidth=memory.number("bandwidth_tb_per_s", 0.01, 100) * TERA,
                memory_efficiency=memory.number("efficiency", 0.01, 1),
                memory_size=int(memory.number("size_gib", 1, 10_000) * GIB),
                kernel_seconds=top.number("kernel_us", 0, 1000) * MICRO,
                operation_seconds=host.number("operation_us", 0, 1000) * MICRO,
                overlap_slowdown=overlap.number("slowdown", 0, 2),
                variation=variation.number("deviation", 0, 0.2),
                rented_variation=rented,
                share_in_training=share,
            )

    def rented(self) -> Self:
        """Return the device as clouds rent it out.

        Raises:
            HardwareError: it is not known by how much these differ.
        """
        if self.rented_variation is None:
            raise HardwareError(
                f"{self.name}: it is not known by how much rented ones differ; write "
                "rented_deviation, as 0.06, into the table [variation]"
            )
        return replace(self, variation=self.rented_variation)

    def with_attention(self, kernel: str) -> Self:
        """Return the device with another attention kernel.

        Raises:
            HardwareError: its rate is not known.
        """
        if kernel not in self.attentions:
            raise HardwareError(
                f"{self.name} has no rate for attention by {kernel!r}; there are "
                f"{', '.join(self.attentions)}"
            )
        return replace(self, attention=kernel)


@dataclass(frozen=True)
class Host:
    """The memory of one machine, which its devices share, and the way from it to each of them."""

    name: str
    memory_bandwidth: float
    """Bytes/s that steps of optimizers reach."""
    copy_bandwidth: float
    """Bytes/s between the memory and one device, each way."""

    @classmethod
    def read(cls, name_or_path: str | Path) -> Self:
        """Return the host of this name in `hardware/`, or of the TOML file at this path."""
        with reading("host", name_or_path) as top:
            memory, copies = (
                table.number("bandwidth_gb_per_s", 0.1, 1e5) * table.number("efficiency", 0.01, 1)
                for table in (top.table("memory"), top.table("copies"))
            )
            return cls(top.text("name"), memory * GIGA, copies * GIGA)


@dataclass(frozen=True)
class Link:
    """What one rank can send while it receives as much."""

    bandwidth: float
    """By the data sheet, bytes/s in one direction."""
    efficiency: Curve
    """The share of it that large collectives reach, by the ranks of the group."""
    latency: float
    """Seconds that a hop takes beyond what NCCL's own latencies have."""


@dataclass(frozen=True)
class Fabric:
    """Links between ranks, and the library that runs collectives over them."""

    name: str
    library: str
    """`nccl`, or `gloo` where all ranks share the one link `within`."""
    generation: str
    """Which column of NCCL's tables holds: `ampere`, `hopper` or `blackwell`."""
    ranks_a_node: int
    within: Link
    between: Link | None
    """`None` if there is one node."""
    whole_nodes: Curve
    """The share of `between` that remains for rings that take all ranks of their nodes, by the
    bytes that belong to each rank."""
    switch_bandwidth: float
    """Bytes/s that an all-reduce of a whole node gets through where the switch adds; 0 where it
    does not."""

    @classmethod
    def read(cls, name_or_path: str | Path) -> Self:
        """Return the fabric of this name in `hardware/`, or of the TOML file at this path."""
        with reading("fabric", name_or_path) as top:
            library = top.text("library", ("nccl", "gloo"))
            is_nccl = library == "nccl"
            generations = ("ampere", "hopper", "blackwell")
            within = top.table("within")
            switch = 0.0
            if "switch_all_reduce_gb_per_s" in within:
                switch = within.number("switch_all_reduce_gb_per_s", 0.01, 1e5) * GIGA
            between, whole_nodes = None, Curve(((1.0, 1.0),))
            if "between" in top:
                table = top.table("between")
                whole_nodes = table.curve("whole_nodes_by_mib_a_rank", 2**20)
                between = _link(table)
            return cls(
                name=top.text("name"),
                library=library,
                generation=top.text("generation", generations) if is_nccl else "",
                ranks_a_node=int(top.number("ranks_a_node", 1, 1e6)),
                within=_link(within),
                between=between,
                whole_nodes=whole_nodes,
                switch_bandwidth=switch,
            )


def _link(table: TomlTable) -> Link:
    return Link(
        bandwidth=table.number("bandwidth_gb_per_s", 0.001, 1e5) * GIGA,
        efficiency=table.curve("efficiency_by_ranks"),
        latency=table.number("latency_us", 0, 1e5) * MICRO,
    )
