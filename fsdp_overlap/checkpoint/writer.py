"""A DCP writer whose checkpoints show any damage."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_overlap.checkpoint.metadata import CHECKSUM_FILE, METADATA_FILE


class SafeFileSystemWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that also writes a checksum of the metadata; entries have their own.

    What it writes is an ordinary DCP checkpoint, which any reader loads.
    """

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        checksum = Path(self.path) / CHECKSUM_FILE
        checksum.unlink(missing_ok=True)
        super().finish(metadata, results)
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        unfinished = checksum.with_suffix(".tmp")
        with unfinished.open("w") as file:
            file.write(digest + "\n")
            file.flush()
            if self.sync_files:
                os.fsync(file.fileno())
        unfinished.replace(checksum)  # half a checksum would make a good checkpoint look damaged
