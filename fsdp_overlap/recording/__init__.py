"""Records what training steps compute, in digests and random projections."""
