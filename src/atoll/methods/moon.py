"""MOON: move embeddings towards the global model's and away from the client's last model's (Li et al., CVPR 2021).

    L_k = CE + μ · (−log e^{cos(z, z_g)/τ} / (e^{cos(z, z_g)/τ} + e^{cos(z, z_p)/τ}))          (Eqs. 3-4)

z is the embedding of the model under training, z_g that of the downloaded model, and z_p that of the client's model
at the end of its last round; the last two are frozen, in evaluation mode. A client retains its last model. In its
first round it has none, and z_p = z_g makes the term the constant ln 2. The classifier reads z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from atoll.components.base import Batch, ClientContext, Forward, Passes, Term
from atoll.core.schema import Positive
from atoll.core.tree import Tree
from atoll.functional import model_contrast
from atoll.methods.method import Method
from atoll.objectives.cross_entropy import CrossEntropy


@dataclass(frozen=True)
class MOON(Term):
    """The model contrast; ``weight`` is μ (5 for CIFAR-10, 1 for CIFAR-100).

    Attributes:
        weight: μ.
        temperature: τ.
        augment: Read an augmented view instead of the image without augmentation, for self-supervised objectives.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "moon"
    source: ClassVar[str] = "Li et al. 2021 (MOON), Eqs. 3-4"
    needs_steps: ClassVar[bool] = True
    least_loss: ClassVar[float] = 0.0
    keeps: ClassVar[tuple[str, ...]] = ("its model as it left the last round",)
    temperature: Positive = 0.5
    augment: bool = False

    def forwards(self) -> Sequence[Forward]:
        """Pass the same images through the local, the downloaded and the client's last networks."""
        images = "view1" if self.augment else "image"
        return tuple(Forward(images, network) for network in ("local", "global", "previous"))

    def start(self, context: ClientContext) -> None:
        """Load the downloaded and the client's last model as frozen copies."""
        kept = context.of(self).retained
        context.frozen("global", context.received)
        context.frozen("previous", context.received if kept is None else kept)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Model-contrastive loss."""
        z, z_global, z_previous = (passes[forward].z for forward in self.forwards())
        return model_contrast(z, z_global, z_previous, self.temperature)

    def keep(self, context: ClientContext) -> Tree:
        """Retain the trained model."""
        state = context.networks.state_dict()
        return {name: state[name].detach() for name in state if name not in context.fixed}


METHOD = Method(
    objective=CrossEntropy(on="z"),
    terms=(MOON(weight=5.0),),
    title="MOON",
    paper="Li et al., Model-Contrastive Federated Learning, CVPR 2021",
    family="Supervised methods",
)
