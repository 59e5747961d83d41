"""FedU²: uniform representations (FUR) and an even aggregation (EUA) (Liao et al., CVPR 2024).

    L_k = L_SSL + 0.01 · [FUR(z₁) + FUR(z₂)]

The paper defines FUR as unbalanced transport from a batch to a spherical Gaussian; those equations are not
available to us, and the released code does not use its transport. What stands here is what that code runs:
sliced transport on the sphere (see `atoll.functional.sphere_sliced_uniformity`). The code adds rotation
prediction (the term ``rotation_term``), and lets small clients train more epochs, so that all take about as
many steps. The server aggregates by `EUA`, with the rate of the code's main script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from atoll.aggregation.eua import EUA
from atoll.functional import sphere_sliced_uniformity
from atoll.methods.method import Method
from atoll.objectives.align_uniform import VIEWS
from atoll.objectives.simclr import SimCLR
from atoll.parts import Batch, Forward, Local, Passes, Setting, Term, require_positive

MOST_EPOCHS = 10  # that a small client trains in a round to keep step


@dataclass(frozen=True)
class FUR(Term):
    """The flexible uniform regulariser as released: FUR(z₁) + FUR(z₂) on normalised embeddings.

    Attributes:
        projections: directions at each tangent point.
        equal_steps: a client trains min(⌊(⌊n_max/N⌋ + 1)·E / batches_k⌋, 10) epochs instead of E, where the
            server knows the clients' sizes.
    """

    name: ClassVar[str] = "fur"
    source: ClassVar[str] = "Liao et al. 2024 (FedU²), released code"
    weight: float = 0.01
    projections: int = 6
    equal_steps: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "projections")

    def epochs(self, setting: Setting, client: int, cohort: Sequence[int], round: int) -> int | None:
        """More epochs for small clients."""
        if not self.equal_steps or not setting.sizes:
            return None
        train = setting.train
        most_steps = (max(setting.sizes) // train.batch_size + 1) * train.epochs
        batches, rest = divmod(setting.sizes[client], train.batch_size)
        if rest > 1 and not train.drop_last:  # a rest of one image makes no batch
            batches += 1
        return min(most_steps // max(batches, 1), MOST_EPOCHS)

    def forwards(self) -> Sequence[Forward]:
        """Both views through the local networks."""
        return VIEWS

    def start(self, local: Local) -> None:
        """Where samples of the sphere are drawn from."""
        local.of(self).draws = local.stream("fur")

    def loss(self, local: Local, batch: Batch, passes: Passes) -> Tensor:
        """The sum over both views."""
        draws = local.of(self).draws
        one, two = (sphere_sliced_uniformity(passes[view].z, draws, self.projections) for view in VIEWS)
        return one + two


METHOD = Method(
    objective=SimCLR(temperature=0.07, variant="zero_self"),
    terms=(FUR(equal_steps=True),),
    aggregation=EUA(server_lr=8.0, weights="batches"),
    title="FedU²",
    paper="Liao et al., Rethinking the Representation in Federated Unsupervised Learning, CVPR 2024",
    family="Federated self-supervised methods",
)
