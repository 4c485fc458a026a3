"""Write gates: how much of a branch's output each stream receives, and how that relates to the stream's rescue."""
# B batch  T tokens  J streams  L layers

from typing import Any

from torch import Tensor

from dualres.analyze.taps import Site, TokenMeans, Watcher
from dualres.residual.pathway import Pathway


class WriteGates(Watcher):
    """Mean β (mHC: H_post) of every branch and stream, over the last `last` tokens of each sequence."""

    def __init__(self, last: int | None = None):
        self.last = last or 0  # 0: all
        self.gates = TokenMeans()  # by branch (J,)

    def on_read(self, site: Site, pathway: Pathway, before: Any, after: Any) -> None:
        weights = pathway.write_weights(after)
        if weights is not None:
            self.gates.add(site.branch, weights[..., -self.last :].flatten(1))

    def arrays(self) -> dict[str, Tensor]:
        """The means (2L,J) and, for two streams, the gaps g_n = E[β_n¹ − β_n⁰] of the MLP of each layer n (L,)."""
        if not self.gates:
            return {}
        means = self.gates.stacked()
        gaps = {"write_gaps": means[1::2, 1] - means[1::2, 0]} if means.shape[1] == 2 else {}
        return {"write_gates": means, **gaps}


def association(write: Tensor, rescue: Tensor) -> tuple[float, float, float]:
    """How rescue gaps d depend on write gaps g over layers. (L,), (L,) -> slope, intercept, correlation

    d ≈ slope · g + intercept by least squares, and Pearson's r; NaN if g or d does not vary.
    """
    g, d = write.double() - write.double().mean(), rescue.double() - rescue.double().mean()
    slope = (g @ d) / (g @ g)
    intercept = rescue.double().mean() - slope * write.double().mean()
    correlation = (g @ d) / ((g @ g).sqrt() * (d @ d).sqrt())
    return float(slope), float(intercept), float(correlation)
