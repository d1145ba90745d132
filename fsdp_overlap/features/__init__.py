"""Features, which a plain training step never enters. They import the core; it imports none."""
