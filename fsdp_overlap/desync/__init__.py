"""Checks that ranks issue the same collectives, and exchange of their errors. Units and param
groups are known here only by their labels and signatures."""
