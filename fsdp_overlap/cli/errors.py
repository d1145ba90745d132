"""The error for invalid arguments and files."""


class BadInput(ValueError):  # noqa: N818 (not a fault of the program)
    """Reported as one line on stderr with exit code 2, before anything is started or written."""
