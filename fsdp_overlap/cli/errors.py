"""The error for what a person asked for and cannot have."""


class BadInput(ValueError):
    """Reported as one line on stderr with exit code 2, before anything is started or written."""
