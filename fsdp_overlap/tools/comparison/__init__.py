"""Compares two runs of a training program: what they compute, and how fast."""
