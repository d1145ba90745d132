"""What ranks tell each other beside their collectives: whether they issue the same ones, and what
went wrong. It knows units and buckets by label and signature alone."""
