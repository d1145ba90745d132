"""``torch.distributed.checkpoint`` for files that strangers may have written or disks damaged.

A sharded model's checkpoints are torch's own: plain ``torch.distributed.checkpoint`` saves and
loads them. Its reader runs the code that a checkpoint's pickles ask for, though;
:class:`SafeFileSystemReader` runs none.
"""

from fsdp_overlap.checkpoint.errors import CheckpointError
from fsdp_overlap.checkpoint.metadata import read_metadata
from fsdp_overlap.checkpoint.reader import SafeFileSystemReader
from fsdp_overlap.checkpoint.writer import SafeFileSystemWriter

__all__ = ["CheckpointError", "SafeFileSystemReader", "SafeFileSystemWriter", "read_metadata"]
