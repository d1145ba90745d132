"""The module in which files that earlier versions have pickled look for :class:`RaggedShard`."""

from fsdp_overlap.tensor.ragged_dtensor import RaggedShard as RaggedShard
