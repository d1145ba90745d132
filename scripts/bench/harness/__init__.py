"""What the benchmarks share; no part of the library that they measure.

- `measurement`: figures, ratios and claims, and the file that holds them; `output` prints and
  writes them, `plot` draws sweeps, `summary` puts those of many benchmarks into one table.
- `turns`, `peaks`: how time and memory are sampled.
- `processes`, `slow_link`: ranks, and the link between them.
- `link_training`, `simulated_training`, `optimizers`, `real_models`: what is trained or planned.
- `simulated_ranks`: many ranks on one device.
"""
