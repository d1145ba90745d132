"""A device that is modelled on the host. From the order of streams and events, it shows what could
go wrong on a real one."""

from fsdp_overlap.modelled.device import (
    Call,
    Issued,
    ModelledDevice,
    Operation,
    Timing,
    compare_issued,
)
from fsdp_overlap.modelled.findings import Finding, Sync
from fsdp_overlap.modelled.graphs import CUDAGraph, graph
from fsdp_overlap.modelled.ranks import fake_ranks
from fsdp_overlap.modelled.torch_module import (
    Event,
    Stream,
    active,
    current_stream,
    running,
    stream,
)

__all__ = [
    "CUDAGraph",
    "Call",
    "Event",
    "Finding",
    "Issued",
    "ModelledDevice",
    "Operation",
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
