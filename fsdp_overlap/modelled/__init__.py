"""A device that is modelled on the host: shows by the order of streams and events what would go
wrong on a real one."""

from fsdp_overlap.modelled.device import Issued, ModelledDevice, compare_issued
from fsdp_overlap.modelled.findings import Finding, Sync
from fsdp_overlap.modelled.torch_module import active, running

__all__ = [
    "Finding",
    "Issued",
    "ModelledDevice",
    "Sync",
    "active",
    "compare_issued",
    "running",
]
