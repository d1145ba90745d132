"""What ranks tell each other beside their collectives: whether they issue the same ones, and what
went wrong. Units and param groups are known here only by their labels and signatures."""
