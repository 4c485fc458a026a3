"""Write gates: how much of a branch's output each stream receives, and how that relates to the stream's rescue."""
# B batch  T tokens  J streams  L layers

from typing import Any, NamedTuple

from torch import Tensor

from dualres.analyze.taps import Site, TokenMeans, Watcher
from dualres.residual.pathway import Pathway


class WriteGates(Watcher):
    """Mean β (mHC: H_post) of every branch and stream, over the last `last` tokens of each sequence."""

    def __init__(self, last: int | None = None):
        self.last = last or 0  # 0: all
        self.gates = TokenMeans()  # by branch (J,)

    def read(self, site: Site, pathway: Pathway, before: Any, after: Any) -> None:
        weights = pathway.write_weights(after)
        if weights is not None:
            self.gates.add(site.branch, weights[..., -self.last :].flatten(1))

    def means(self) -> Tensor | None:
        """(2L,J), None for a pathway without write gates."""
        return self.gates.stacked() if self.gates else None


class Association(NamedTuple):
    """d ≈ slope · g + intercept by least squares, and Pearson's r; NaN if g or d does not vary."""

    slope: float
    intercept: float
    correlation: float


def write_gaps(means: Tensor) -> Tensor:
    """g_n = E[β_n¹ − β_n⁰] of the MLP of each layer. (2L,2) -> (L,)"""
    return means[1::2, 1] - means[1::2, 0]


def rescue_gaps(rescue: Tensor) -> Tensor:
    """d_n = R_{n,1} − R_{n,0}. (L,2) -> (L,)"""
    return rescue[:, 1] - rescue[:, 0]


def association(write: Tensor, rescue: Tensor) -> Association:
    """Of write gaps g with rescue gaps d over layers. (L,), (L,)"""
    g, d = write.double() - write.double().mean(), rescue.double() - rescue.double().mean()
    slope = (g @ d) / (g @ g)
    intercept = rescue.double().mean() - slope * write.double().mean()
    correlation = (g @ d) / ((g @ g).sqrt() * (d @ d).sqrt())
    return Association(float(slope), float(intercept), float(correlation))
