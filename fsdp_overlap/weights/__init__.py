"""Loading, export, exchange, resharding and deltas of a sharded model's weights."""

from fsdp_overlap.weights.delta_files import load_deltas, read_deltas, write_deltas
from fsdp_overlap.weights.delta_format import DeltaMessage, WeightDelta
from fsdp_overlap.weights.delta_targets import apply_deltas
from fsdp_overlap.weights.delta_transfer import DeltaTransfer
from fsdp_overlap.weights.deltas import WeightDeltas
from fsdp_overlap.weights.export import export_weights
from fsdp_overlap.weights.load import LoadedWeights, load_weights
from fsdp_overlap.weights.resharding import WeightResharder
from fsdp_overlap.weights.save import save_weights

__all__ = [
    "DeltaMessage",
    "DeltaTransfer",
    "LoadedWeights",
    "WeightDelta",
    "WeightDeltas",
    "WeightResharder",
    "apply_deltas",
    "export_weights",
    "load_deltas",
    "load_weights",
    "read_deltas",
    "save_weights",
    "write_deltas",
]
