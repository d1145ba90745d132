"""Schedules of ranks that may run different units, and agree by messages on what is gathered."""
