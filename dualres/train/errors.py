"""What stops a run."""


class TrainError(RuntimeError):
    """A run that cannot start or go on: the message names the cause, what is safe, and the remedy."""
