"""Parameters with FSDP2's tensor extensions."""
