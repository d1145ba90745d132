"""Writes the tensors of a checkpoint to one ordinary file."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_overlap.checkpoint import CheckpointError, SafeFileSystemReader, read_metadata
from fsdp_overlap.cli.errors import BadInput


def export(checkpoint: Path, out: Path, prefix: str) -> int:
    """Writes the tensors of `checkpoint` whose names begin with `prefix` and a dot to `out`, under
    the rest of their names. `out` becomes a safetensors file, or one that
    `torch.load(weights_only=True)` reads. Returns how many tensors there are. If this cannot be
    done, raises BadInput and writes nothing."""
    if out.exists():
        raise BadInput(f"{out} exists; give a new file")
    if out.suffix not in (".pt", ".pth", ".safetensors"):
        raise BadInput(f"{out}: use a name that ends in .pt, .pth or .safetensors")
    try:
        items = read_metadata(checkpoint).state_dict_metadata
        tensors = {
            name: torch.empty(item.size, dtype=item.properties.dtype)
            for name, item in items.items()
            if name.startswith(f"{prefix}.") and isinstance(item, TensorStorageMetadata)
        }
        if not tensors:
            found = sorted({name.split(".")[0] for name in items})
            raise BadInput(
                f"{checkpoint} holds nothing under {prefix!r}; --prefix can be one of "
                f"{', '.join(found)}"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tensors, storage_reader=SafeFileSystemReader(checkpoint), no_dist=True)
    except CheckpointError as error:
        raise BadInput(str(error)) from None
    except CheckpointException as failed:
        raise BadInput(str(next(iter(failed.failures.values()))[0])) from None
    named = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}
    unfinished = out.with_name(out.name + ".unfinished")
    out.parent.mkdir(parents=True, exist_ok=True)
    _write(named, unfinished, out.suffix == ".safetensors")
    unfinished.rename(out)
    return len(named)


def _write(tensors: dict[str, Tensor], path: Path, as_safetensors: bool) -> None:
    if as_safetensors:
        from safetensors.torch import save_file  # only few users need it

        save_file(tensors, path)
    else:
        torch.save(tensors, path)
