"""The command-line program `fsdp-overlap`. Needs the extra: pip install 'fsdp_overlap[cli]'."""
