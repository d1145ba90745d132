"""When units are gathered, released and reduced. Runs without torch: it decides, and
:class:`~fsdp_overlap.schedule.interface.CommOps` does."""
