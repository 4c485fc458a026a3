"""What data can be wrong about."""


class DataError(ValueError):
    """Data that cannot be used: the message names the file and the remedy."""
