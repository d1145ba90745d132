"""Where files that earlier versions have pickled find :class:`RaggedShard`."""

from fsdp_overlap.tensor.ragged_dtensor import RaggedShard as RaggedShard
