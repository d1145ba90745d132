"""Write the tensors of a checkpoint to one ordinary file."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_overlap.checkpoint import CheckpointError, SafeFileSystemReader, read_metadata
from fsdp_overlap.tools.cli.output import BadInput, check_writable, writing


def export(checkpoint: Path, out: Path, prefix: str | None) -> int:
    """Write the tensors of `checkpoint` whose names begin with `prefix` and a dot to `out`, under
    the rest of their names. Without `prefix`: those under "model", or all if the checkpoint is of a
    bare state dict. `out` becomes a safetensors file, or one that `torch.load(weights_only=True)`
    reads. Return how many tensors there are. If this cannot be done, raises BadInput and writes
    nothing."""
    if out.exists():
        raise BadInput(f"{out} exists; give a new file")
    if out.suffix not in (".pt", ".pth", ".safetensors"):
        raise BadInput(f"{out}: use a name that ends in .pt, .pth or .safetensors")
    check_writable(out.parent)
    try:
        metadata = read_metadata(checkpoint)
        names = _names(metadata, prefix, checkpoint)
        items = metadata.state_dict_metadata
        tensors = {
            name: torch.empty(item.size, dtype=item.properties.dtype)
            for name, item in items.items()
            if name in names and isinstance(item, TensorStorageMetadata)
        }
        if not tensors:
            raise BadInput(f"{checkpoint} holds no tensors under {prefix!r}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tensors, storage_reader=SafeFileSystemReader(checkpoint), no_dist=True)
    except CheckpointError as error:
        raise BadInput(str(error)) from None
    except CheckpointException as failed:
        raise BadInput(str(next(iter(failed.failures.values()))[0])) from None
    with writing(out.parent) as new:
        _write({names[name]: tensor for name, tensor in tensors.items()}, new / out.name)
    return len(tensors)


def _names(metadata: Metadata, prefix: str | None, checkpoint: Path) -> dict[str, str]:
    """Return what to call each item that is asked for, by its name in the checkpoint."""
    items = metadata.state_dict_metadata
    # Where each lay in the state dict that was saved, whose keys may have dots.
    paths = {name: (metadata.planner_data or {}).get(name, (name,)) for name in items}
    if prefix is None:
        is_nested = any(path[0] == "model" and len(path) > 1 for path in paths.values())
        bare = {name: name for name, path in paths.items() if len(path) == 1}
        if not is_nested and any(isinstance(items[name], TensorStorageMetadata) for name in bare):
            return bare
        prefix = "model"
    named = {n: n.removeprefix(f"{prefix}.") for n in items if n.startswith(f"{prefix}.")}
    if not named:
        found = sorted({str(path[0]) for path in paths.values()})
        raise BadInput(
            f"{checkpoint} holds nothing under {prefix!r}; --prefix can be one of "
            f"{', '.join(found[:20])}"
        )
    return named


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    if path.suffix != ".safetensors":
        with path.open("wb") as file:
            try:
                torch.save(tensors, file)
            except RuntimeError as error:
                # torch says what it could not write, and the system why.
                raise error.__context__ or error from None
        return
    from safetensors import SafetensorError  # only few users need it
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
