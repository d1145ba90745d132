"""Parameters and gradients that travel in few bits."""
