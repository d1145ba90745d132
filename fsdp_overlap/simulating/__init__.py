"""Predicts what training steps take at any scale, by running the real schedule on modelled time."""
