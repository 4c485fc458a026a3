"""The paper's parameter tables compared with counts of the real modules, built on the meta device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dualres.config import paper
from dualres.config.loading import load_config
from dualres.model.accounting import parameters
from dualres.model.decoder import build_decoder
from dualres.plan.describe import page
from dualres.util.tables import table

MILLION, BILLION = 1_000_000, 1_000_000_000

# The tables count a ρ gate for every branch of DAR-Full. The first branch of a block has no live state to transport,
# so no forward pass would use its gate and we do not build it: one per layer, each with 2d weights, a bias, a scale.
WITHOUT_UNUSED_RHO = ("dar-full",)


class Comparison(NamedTuple):
    """One printed number and ours."""

    scale: str
    residual: str
    column: str
    paper: str  # as printed
    ours: int
    unbuilt: int  # parameters that the paper counts and no forward pass uses
    unit: int

    @property
    def printed(self) -> str:
        """Our count, including the unbuilt parameters, in the format of the paper's table."""
        return as_printed(self.ours + self.unbuilt, self.unit)

    @property
    def agrees(self) -> bool:
        """Equal to the last printed digit."""
        return self.printed == self.paper


def compare() -> list[Comparison]:
    """All 54 numbers of the two tables, and the difference between DAR and AttnRes stated in the text."""
    rows = []
    sparse: dict[str, int] = {}
    for printed_rows, columns, unit in (
        (paper.DENSE_COUNTS, paper.DENSE_COLUMNS, MILLION),
        (paper.MOE_COUNTS, paper.MOE_COLUMNS, BILLION),
    ):
        for row in printed_rows:
            config = load_config(row.scale, row.residual)
            count = parameters(build_decoder(config.model, config.residual, device="meta"))
            excluding = [n - count.vocabulary for n in (count.total, count.active)]
            ours = (excluding[0], count.total, excluding[1], count.active)
            # L(2d+2) ρ gates
            unbuilt = config.model.layers * (2 * config.model.width + 2) if row.residual in WITHOUT_UNUSED_RHO else 0
            for column, printed, n in zip(columns, row.counts, ours, strict=False):
                rows.append(Comparison(row.scale, row.residual, column, printed, n, unbuilt, unit))
            if printed_rows is paper.MOE_COUNTS:
                sparse[row.residual] = count.total
    difference = sparse["dar-block"] - sparse["attnres-block"]
    printed = paper.MOE_DAR_OVER_ATTNRES
    rows.append(Comparison("moe-7b", "dar-block", "more than attnres-block", printed, difference, 0, MILLION))
    return rows


def as_printed(count: int, unit: int) -> str:
    """`count` in millions or billions with the three decimals of the paper's tables, rounded exactly."""
    thousandths = (count + unit // 2000) // (unit // 1000)
    return f"{thousandths // 1000:,}.{thousandths % 1000:03d}"


def as_data(row: Comparison) -> dict[str, Any]:
    return {**row._asdict(), "printed": row.printed, "agrees": row.agrees}


def as_text(rows: Sequence[Comparison]) -> str:
    """The comparison for a terminal."""
    cells = []
    for row in rows:
        unit = "M" if row.unit == MILLION else "B"
        ours = f"{as_printed(row.ours, row.unit)}{unit}"
        unbuilt = f"{row.unbuilt:,}" if row.unbuilt else ""
        mark = ("= with those not built" if row.unbuilt else "=") if row.agrees else "DIFFERS"
        cells.append([row.scale, row.residual, row.column, f"{row.paper}{unit}", ours, unbuilt, row.ours, mark])
    header = ["scale", "residual", "count", "paper", "ours", "not built", "parameters", ""]
    return page("params.txt", table=table(header, cells), agreeing=sum(row.agrees for row in rows), numbers=len(rows))
