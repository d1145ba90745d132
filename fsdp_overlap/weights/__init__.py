"""Weights on their way out of a sharded model, into one, and to other ranks."""

from fsdp_overlap.weights.export import export_weights
from fsdp_overlap.weights.resharding import WeightResharder
from fsdp_overlap.weights.save import save_weights

__all__ = ["WeightResharder", "export_weights", "save_weights"]
