"""FedDecorr: decorrelate the dimensions of representations, against dimensional collapse (Shi et al., ICLR 2023).

    L_k = L + β · (1/N) mean_{i≠j} M_ij²,    M = X̄ᵀX̄, X̄ the standardised representations      (Eq. 4)

with the scaling of the official code, to which the published β = 0.1 belongs. SSD compares with FedDecorr but does
not specify the tensor or the views; this implementation uses the representations of both views.
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
    """Mean of the decorrelation losses of the named images; ``weight`` is β.

    Attributes:
        weight: β.
        on: The output to decorrelate: the representation or the embedding.
        images_of: The images: any of ``"view1"``, ``"view2"``, ``"image"``. With an objective that reads images
            without augmentation, ``["image"]`` saves passes.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "feddecorr"
    source: ClassVar[str] = "Shi et al. 2023 (FedDecorr), Eq. 4"
    least_loss: ClassVar[float] = 0.0
    weight: float = 0.1
    on: Space = "h"
    images_of: Images = ("view1", "view2")

    def embeds(self) -> bool:
        """Whether the loss reads the embedding z."""
        return self.on == "z"

    def forwards(self) -> Sequence[Forward]:
        """Pass the named images through the local networks."""
        return tuple(Forward(name) for name in self.images_of)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean of the squared off-diagonal correlations (Eq. 4)."""
        return torch.stack(
            [decorrelation(read(self.on, passes[forward])) for forward in self.forwards()]
        ).mean()


METHOD = Method(
    objective=AlignUniform(),
    terms=(FedDecorr(),),
    title="FedDecorr",
    paper="Shi et al., Towards Understanding and Mitigating Dimensional Collapse, ICLR 2023",
    family="Federated self-supervised methods",
)
