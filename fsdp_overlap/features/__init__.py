"""What a plain training step never enters. Features import the core, and the core imports none."""
