"""SimCLR: contrast the two views of each image with all other views in the batch (Chen et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective, Passes
from atoll.core.schema import Positive
from atoll.functional import nt_xent, one_sided_nt_xent


@dataclass(frozen=True)
class SimCLR(Objective):
    """NT-Xent over the 2N embeddings of a batch.

    Attributes:
        temperature: τ.
        variant: ``"exact"``, or the loss of released code: ``"one_sided"`` (L-DAWA: anchors of the first view
            only, with the anchor itself in the denominator) or ``"zero_self"`` (FedU²: the anchor itself in the
            denominator with similarity 0).
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "simclr"
    source: ClassVar[str] = "Chen et al. 2020, Eq. 1"
    least_loss: ClassVar[float] = 0.0
    temperature: Positive = 0.5
    variant: Literal["exact", "one_sided", "zero_self"] = "exact"

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """NT-Xent loss of the batch."""
        z1, z2 = (passes[view].z for view in VIEWS)
        if self.variant == "one_sided":
            return one_sided_nt_xent(z1, z2, self.temperature)
        return nt_xent(z1, z2, self.temperature, zero_self=self.variant == "zero_self")
