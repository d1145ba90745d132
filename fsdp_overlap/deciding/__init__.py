"""When units are gathered, released and reduced. Runs without torch: it decides, and
:class:`~fsdp_overlap.deciding.interface.Transfers` does."""
