"""Loading, export, exchange and resharding of a sharded model's weights."""

from fsdp_overlap.weights.export import export_weights
from fsdp_overlap.weights.load import load_weights
from fsdp_overlap.weights.resharding import WeightResharder
from fsdp_overlap.weights.save import save_weights

__all__ = ["WeightResharder", "export_weights", "load_weights", "save_weights"]
