"""A device that is emulated on the host. From the order of streams and events, it shows what could
go wrong on a real one."""

from fsdp_overlap.tools.emulator.device import (
    EmulatedDevice,
    IssuedCollective,
    Operation,
    OperatorCall,
    Timing,
    compare_issued,
)
from fsdp_overlap.tools.emulator.findings import Finding, FoundAccess, Sync
from fsdp_overlap.tools.emulator.graphs import CUDAGraph, graph
from fsdp_overlap.tools.emulator.ranks import fake_ranks
from fsdp_overlap.tools.emulator.torch_module import (
    Event,
    Stream,
    active,
    current_stream,
    running,
    stream,
)

__all__ = [
    "CUDAGraph",
    "EmulatedDevice",
    "Event",
    "Finding",
    "FoundAccess",
    "IssuedCollective",
    "Operation",
    "OperatorCall",
    "Stream",
    "Sync",
    "Timing",
    "active",
    "compare_issued",
    "current_stream",
    "fake_ranks",
    "graph",
    "running",
    "stream",
]
