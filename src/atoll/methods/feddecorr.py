"""FedDecorr: keep a representation's dimensions from collapsing onto each other (Shi et al., ICLR 2023).

    L_k = L + β · (1/N) mean_{i≠j} M_ij²,    M = X̄ᵀX̄, X̄ the standardised representations      (Eq. 4)

in the scaling of the official code, to which the published β = 0.1 belongs. SSD, which compares with it, does
not say on which tensor and which views; ours are the representations of both views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.components.base import Batch, ClientContext, Forward, Passes, Term
from atoll.core.schema import MinLength
from atoll.functional import decorrelation
from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform
from atoll.objectives.spaces import Space, read

Images = Annotated[tuple[Literal["view1", "view2", "image"], ...], MinLength(1)]


@dataclass(frozen=True)
class FedDecorr(Term):
    """The mean over the named images of their decorrelation loss; ``weight`` is β.

    Attributes:
        weight: β.
        on: What is decorrelated: the representation or the embedding.
        images_of: Whose: any of ``"view1"``, ``"view2"``, ``"image"``. Beside an objective that reads images as
            they are, ``["image"]`` saves passes.
    """

    name: ClassVar[str] = "feddecorr"
    source: ClassVar[str] = "Shi et al. 2023 (FedDecorr), Eq. 4"
    weight: float = 0.1
    on: Space = "h"
    images_of: Images = ("view1", "view2")

    def embeds(self) -> bool:
        """Only on z."""
        return self.on == "z"

    def forwards(self) -> Sequence[Forward]:
        """The named images through the local networks."""
        return tuple(Forward(name) for name in self.images_of)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Off-diagonal correlations, squared."""
        return torch.stack(
            [decorrelation(read(self.on, passes[forward])) for forward in self.forwards()]
        ).mean()


METHOD = Method(
    objective=AlignUniform(),
    terms=(FedDecorr(),),
    title="FedDecorr",
    paper="Shi et al., Understanding and Mitigating Dimensional Collapse in Federated Learning, ICLR 2023",
    family="Federated self-supervised methods",
)
