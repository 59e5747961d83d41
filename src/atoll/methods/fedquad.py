"""FedQuad: federated stochastic quadruplet learning (Göksu and Pugeault, 2025).

    L_k = CE(x_a) + β · mean {[d(a, p) − d(a, n₁) + m₁]₊ + [d(a, p) − d(a, n₂) + m₂]₊}         (Eqs. 3 and 5)

Each sample of a client is an anchor a; p is another sample of its class, and n₁ and n₂ are samples of two
different other classes, drawn once for each client ("offline"; option ``redraw``). d is the Euclidean distance of
embeddings that are not normalised; Algorithm 1 squares it (option ``power``). FedAvg averages the weights. The
classifier reads anchors only; without it (option ``cross_entropy``) this is the ablation of Table V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from atoll.functional import fedquad
from atoll.methods.method import Method
from atoll.objectives.metric_learning import MetricLearning


@dataclass(frozen=True)
class FedQuad(MetricLearning):
    """FedQuad's loss; on a client with two classes, both negatives belong to the other class.

    Attributes:
        cross_entropy: Whether a linear classifier learns from the anchors; false is the ablation of Table V.
        margins: (m₁, m₂).
        power: 1 for distances (Eq. 5), 2 for squared distances (Algorithm 1).
    """

    name: ClassVar[str] = "fedquad"
    source: ClassVar[str] = "FedQuad Eqs. 3-5"
    beta: float = 0.5
    cross_entropy: bool = True
    margins: tuple[float, float] = (1.0, 0.5)
    power: Literal[1, 2] = 1

    def distances(self, a: Tensor, p: Tensor, negatives: Sequence[Tensor], classes: int) -> Tensor:
        """Quadruplet loss (Eq. 5)."""
        n1, n2 = negatives
        return fedquad(a, p, n1, n2, self.margins, self.power)


METHOD = Method(
    objective=FedQuad(),
    title="FedQuad",
    paper="Göksu and Pugeault, FedQuad: Federated Stochastic Quadruplet Learning, 2025",
    family="Supervised methods",
)
