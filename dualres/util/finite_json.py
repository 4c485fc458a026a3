"""Data without NaN and infinity, for JSON."""

import math
from typing import Any


def nonfinite_to_null(data: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, with None in nested dicts, lists and tuples."""
    if isinstance(data, dict):
        return {key: nonfinite_to_null(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [nonfinite_to_null(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
