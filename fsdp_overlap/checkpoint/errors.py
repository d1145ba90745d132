"""What is wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or asks for what no checkpoint needs."""
