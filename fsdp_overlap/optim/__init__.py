"""Optimizers and gradient clipping that work on the flat ranges behind sharded parameters.

torch's AdamW and ``clip_grad_norm_`` also work on sharded parameters. The ones here give the same
results with fewer kernels and collectives. torch's Muon does not work on sharded parameters.
"""

from fsdp_overlap.optim.adamw import AdamW
from fsdp_overlap.optim.clipping import clip_grad_norm_
from fsdp_overlap.optim.layer_wise import LayerWise
from fsdp_overlap.optim.muon import Muon
from fsdp_overlap.optim.overlapped_steps import OverlapPolicy

__all__ = ["AdamW", "LayerWise", "Muon", "OverlapPolicy", "clip_grad_norm_"]
