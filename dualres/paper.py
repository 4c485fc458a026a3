"""What the paper prints, to be compared with what we compute. Nothing is computed from it."""

from typing import NamedTuple


class PrintedCounts(NamedTuple):
    """One row of a parameter table, as printed."""

    scale: str  # our config
    residual: str  # our config
    counts: tuple[str, ...]  # one per column


DENSE_COLUMNS = ("total excl. vocabulary", "total incl. vocabulary")  # in millions
DENSE_COUNTS = (
    PrintedCounts("0.1b", "standard", ("98.325", "182.211")),
    PrintedCounts("0.1b", "attnres-block", ("98.336", "182.222")),
    PrintedCounts("0.1b", "attnres-full", ("98.346", "182.232")),
    PrintedCounts("0.1b", "dar-block", ("98.449", "182.335")),
    PrintedCounts("0.1b", "dar-full", ("98.571", "182.457")),
    PrintedCounts("0.1b", "mhc-4", ("100.292", "184.178")),
    PrintedCounts("0.3b", "standard", ("304.129", "438.347")),
    PrintedCounts("0.3b", "attnres-block", ("304.151", "438.368")),
    PrintedCounts("0.3b", "attnres-full", ("304.170", "438.388")),
    PrintedCounts("0.3b", "dar-block", ("304.377", "438.595")),
    PrintedCounts("0.3b", "dar-full", ("304.621", "438.839")),
    PrintedCounts("0.3b", "mhc-4", ("308.062", "442.280")),
    PrintedCounts("0.5b", "standard", ("491.572", "659.345")),
    PrintedCounts("0.5b", "attnres-block", ("491.599", "659.372")),
    PrintedCounts("0.5b", "attnres-full", ("491.624", "659.396")),
    PrintedCounts("0.5b", "dar-block", ("491.882", "659.655")),
    PrintedCounts("0.5b", "dar-full", ("492.187", "659.959")),
    PrintedCounts("0.5b", "mhc-4", ("496.489", "664.261")),
    PrintedCounts("1b", "standard", ("1,069.631", "1,338.067")),
    PrintedCounts("1b", "attnres-block", ("1,069.674", "1,338.110")),
    PrintedCounts("1b", "dar-block", ("1,070.127", "1,338.563")),
)

MOE_COLUMNS = (*DENSE_COLUMNS, "active excl. vocabulary", "active incl. vocabulary")  # in billions
MOE_COUNTS = (
    PrintedCounts("moe-7b", "standard", ("6.949", "7.217", "1.136", "1.404")),
    PrintedCounts("moe-7b", "attnres-block", ("6.949", "7.217", "1.136", "1.404")),
    PrintedCounts("moe-7b", "dar-block", ("6.949", "7.218", "1.136", "1.405")),
)

MOE_DAR_OVER_ATTNRES = "0.363"  # millions; "DAR adds approximately 0.363M total and active parameters"
