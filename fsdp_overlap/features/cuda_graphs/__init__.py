"""Steps captured in CUDA graphs: Note [captured steps]."""
