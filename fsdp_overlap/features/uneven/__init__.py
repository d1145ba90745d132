"""Ranks that run different units, or different numbers of forwards: Note [negotiation]."""
