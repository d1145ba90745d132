"""Parameters of which each rank has rows, as in FSDP2: the layout ``PerTensor()``."""
