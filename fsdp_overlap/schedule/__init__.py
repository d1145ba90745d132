"""The schedule, which decides when units are gathered, released and reduced. It runs without torch;
:class:`~fsdp_overlap.schedule.interface.CommOps` carries its decisions out."""
