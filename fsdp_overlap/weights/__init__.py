"""Export, exchange and resharding of a sharded model's weights."""

from fsdp_overlap.weights.export import export_weights
from fsdp_overlap.weights.resharding import WeightResharder
from fsdp_overlap.weights.save import save_weights

__all__ = ["WeightResharder", "export_weights", "save_weights"]
