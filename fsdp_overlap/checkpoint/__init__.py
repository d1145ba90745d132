"""Safe loading of untrusted or damaged checkpoints.

A sharded model's checkpoints are ordinary: plain ``torch.distributed.checkpoint`` (DCP) saves and
loads them. But torch's own reader runs the code that a checkpoint's pickles name;
:class:`SafeFileSystemReader` runs none.
"""

from fsdp_overlap.checkpoint.files import CheckpointError
from fsdp_overlap.checkpoint.metadata import read_metadata
from fsdp_overlap.checkpoint.planner import ShardedSavePlanner
from fsdp_overlap.checkpoint.reader import SafeFileSystemReader
from fsdp_overlap.checkpoint.stager import ShardStager
from fsdp_overlap.checkpoint.writer import SafeFileSystemWriter

__all__ = [
    "CheckpointError",
    "SafeFileSystemReader",
    "SafeFileSystemWriter",
    "ShardStager",
    "ShardedSavePlanner",
    "read_metadata",
]
