"""AlignUniform: alignment and uniformity on the hypersphere (Wang and Isola 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective, Passes
from atoll.core.schema import Positive
from atoll.functional import alignment, uniformity


@dataclass(frozen=True)
class AlignUniform(Objective):
    """L = L_align(z, z⁺) + β · ½ (L_unif(z) + L_unif(z⁺)), the base loss of SSD (Eqs. 3 and 4).

    Attributes:
        beta: β, the weight of uniformity.
        t: Temperature of the Gaussian potential.
    """

    name: ClassVar[str] = "align_uniform"
    source: ClassVar[str] = "Wang and Isola 2020; SSD Eqs. 3-4"
    replays: ClassVar[bool] = True
    beta: float = 1.0
    t: Positive = 2.0

    @property
    def least_loss(self) -> float:
        """Return −4tβ: two points of the sphere are at most 2 apart."""
        return -4.0 * self.t * max(self.beta, 0.0)

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Sum of alignment and weighted uniformity."""
        z1, z2 = (passes[view].z for view in VIEWS)
        uniform = 0.5 * (uniformity(z1, self.t) + uniformity(z2, self.t))
        return alignment(z1, z2) + self.beta * uniform
