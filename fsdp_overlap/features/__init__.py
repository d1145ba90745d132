"""Features, of which a plain step enters none. They import the core, and the core imports none."""
