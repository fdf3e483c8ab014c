"""The one error of this package."""


class SplitError(ValueError):
    """A sequence cannot be cut as asked; the message names the flag and the way out."""
