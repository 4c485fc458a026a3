"""What a model that was given can be wrong about."""


class ModelError(ValueError):
    """A model's folder that cannot be used, or a kind of model that cannot be made: the message names the remedy."""
