"""Optimizers and gradient clipping that work on the flat ranges behind sharded parameters.

torch's own work as well; these do the same with fewer kernels and collectives.
"""

from fsdp_overlap.optim.adamw import AdamW
from fsdp_overlap.optim.clipping import clip_grad_norm_
from fsdp_overlap.optim.muon import Muon

__all__ = ["AdamW", "Muon", "clip_grad_norm_"]
