"""The passes of a deep model from those of a shallow one: beyond the first blocks, each adds what the last one did."""

import dataclasses
import functools
from typing import Any

from dualres.config.schema import Config
from dualres.plan.local_model import Share
from dualres.plan.passes import Passes, count_passes
from dualres.plan.run_memory import CASTING
from dualres.residual.registry import places

COUNTED = 3  # full blocks; the last two say what a longer history adds


@functools.cache
def passes_of(config: Config, share: Share, engine: str) -> Passes:
    """As `count_passes`, in the time of three blocks and the last where it is a short one."""
    lengths = [place.branches for place in places(2 * config.model.layers, config.residual)]
    short = [n for n in lengths[-1:] if n < lengths[0]]
    branches = COUNTED * lengths[0] + sum(short)
    missing = len(lengths) - COUNTED - len(short)
    # Autocast drops casts of the whole model at once.
    autocast = config.train.precision == "bf16" and engine not in CASTING
    if missing <= 0 or branches % 2 or config.model.read_eps is not None or autocast:
        return count_passes(config, share, engine)
    shallow = dataclasses.replace(config.model, layers=branches // 2)
    counted = count_passes(dataclasses.replace(config, model=shallow), share, engine)
    return counted._replace(
        blocks=_longer(counted.blocks, missing),
        forward=(*counted.forward[:COUNTED], *[counted.forward[COUNTED - 1]] * missing, *counted.forward[COUNTED:]),
        backward=_longer(counted.backward, missing),
    )


def _longer(counted: tuple[Any, ...], missing: int) -> tuple[Any, ...]:
    """`Kept` or `Back` of so many blocks more, between the full ones that were counted and a short one."""
    before, last = counted[COUNTED - 2], counted[COUNTED - 1]
    added = [last.plus(last, times).plus(before, -times) for times in range(1, missing + 1)]
    rest = [short.plus(last, missing).plus(before, -missing) for short in counted[COUNTED:]]
    return (*counted[:COUNTED], *added, *rest)
