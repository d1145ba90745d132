"""What ranks compare beside their collectives: whether they issue the same ones, and
their errors. Units and param groups are known here only by their labels and signatures."""
