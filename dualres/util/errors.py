"""Exceptions that end a command with a message instead of a traceback, and its exit code after an interruption."""

INTERRUPTED = 130  # as a shell reports a process that Ctrl-C has ended


class ConfigError(ValueError):
    """Raised for an invalid config or argument: the message names the field, the value and the remedy."""


class DataError(ValueError):
    """Raised for invalid or corrupted data: the message names the file and the remedy."""


class ModelError(ValueError):
    """Raised for a model that cannot be opened, converted or exported: the message names the folder and the remedy."""


class TrainError(RuntimeError):
    """Raised when a run cannot start or continue: the message names the cause, what is safe, and the remedy."""
