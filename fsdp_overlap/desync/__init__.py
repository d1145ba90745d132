"""What ranks tell each other beside their collectives: whether they issue the same ones, and what
went wrong. Units and buckets are known here only by their labels and signatures."""
