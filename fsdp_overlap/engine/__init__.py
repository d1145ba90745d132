"""Units, param groups, hooks and comm streams, which execute the schedule."""
