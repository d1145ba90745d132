"""Sharded tensors, and the flat buffers that whole parameters lie in."""

import fsdp_overlap.tensor.dcp
import fsdp_overlap.tensor.ops  # noqa: F401  (gives RaggedDTensor its ops)
