"""SimCLR: contrast each image's two views with all others of the batch (Chen et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from atoll.functional import nt_xent, one_sided_nt_xent
from atoll.objectives.align_uniform import VIEWS
from atoll.parts import Batch, Forward, Local, Objective, Passes, require_positive


@dataclass(frozen=True)
class SimCLR(Objective):
    """NT-Xent over the 2N embeddings of a batch.

    Attributes:
        temperature: τ.
        one_sided: L-DAWA's released variant, whose denominator keeps the anchor itself.
    """

    name: ClassVar[str] = "simclr"
    source: ClassVar[str] = "Chen et al. 2020, Eq. 1"
    temperature: float = 0.5
    one_sided: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "temperature")

    def forwards(self) -> Sequence[Forward]:
        """Both views through the local networks."""
        return VIEWS

    def loss(self, local: Local, batch: Batch, passes: Passes) -> Tensor:
        """NT-Xent."""
        contrast = one_sided_nt_xent if self.one_sided else nt_xent
        z1, z2 = (passes[view].z for view in VIEWS)
        return contrast(z1, z2, self.temperature)
