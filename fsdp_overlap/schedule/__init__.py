"""When units are gathered, released and reduced. It runs without torch: it decides, and
:class:`~fsdp_overlap.schedule.interface.CommOps` does."""
