"""What a step costs on hardware that is not here: seconds of operations and of collectives.

Nothing here imports the rest of the library. ``docs/scale.md`` has the formulas and their sources.
"""
