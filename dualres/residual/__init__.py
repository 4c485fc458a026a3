"""Residual pathways: how a block of branches reads and writes the residual streams, one file per method family.

`pathway` is the interface. `standard`, `hyper_connections` (mHC), `attnres` and `dar` implement it; `retrieval` is the
depth attention that AttnRes and DAR share, `route` assigns key and value streams, `gate` is a token-wise gate,
`live` the streams inside a block as sums of updates. `registry` maps every method's name to its row, and
`registration` adds a method of your own. The names below are those that such a method needs.
"""

from dualres.config.validation import Bounds
from dualres.ops import Norm, Route
from dualres.ops.reference import to_accumulation_dtype
from dualres.residual.gate import Gate
from dualres.residual.pathway import History, LastState, Options, Pathway, Place
from dualres.residual.registration import register_method
from dualres.residual.registry import Method
from dualres.residual.retrieval import RetrievalOptions, RetrievalPathway, RetrievalReadout

__all__ = [
    "Bounds",
    "Gate",
    "History",
    "LastState",
    "Method",
    "Norm",
    "Options",
    "Pathway",
    "Place",
    "RetrievalOptions",
    "RetrievalPathway",
    "RetrievalReadout",
    "Route",
    "register_method",
    "to_accumulation_dtype",
]
