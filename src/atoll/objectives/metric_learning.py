"""Metric learning on randomly drawn samples: triplets, quadruplets, and the base class that FedQuad shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from atoll.components.base import Batch, ClientContext, Forward, Objective, Passes, Setting
from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.functional import fedquad, quadruplet, triplet
from atoll.objectives.cross_entropy import CLASSIFIER, label_loss
from atoll.objectives.quadruplets import draw_quadruplets
from atoll.objectives.spaces import Space, classifying, linear_head, read


@dataclass(frozen=True)
class MetricLearning(Objective):
    """L = [CE(anchors)] + β · a loss on distances between anchors, positives and negatives.

    Each sample of a client is an anchor once per epoch, with the same partners in every epoch of the run
    (see `atoll.objectives.quadruplets`). Anchors and partners pass through the networks as one batch, so BatchNorm
    normalises them together. A client with a single class has no negatives, and only the cross-entropy remains.

    Attributes:
        beta: β; with 0, no partners are drawn and the objective is plain cross-entropy.
        cross_entropy: Whether a linear classifier is also trained on the anchors.
        redraw: Draw new partners at the beginning of each local epoch.
        augment: Train on augmented views instead of images without augmentation.
        on: Output on which the distances (and the classifier) are computed: the representation ``"h"`` or the
            embedding ``"z"``; neither is normalised.
    """

    replays: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True
    members: ClassVar[int] = 4  # rows of `draw_quadruplets` that the loss reads
    beta: float = 1.0
    cross_entropy: bool = False
    redraw: bool = False
    augment: bool = False
    on: Space = "h"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta == 0 and not self.cross_entropy:
            raise UserError(
                f"{self.name}.beta is 0 and {self.name}.cross_entropy is off: no loss is left; set one"
            )

    def distances(self, a: Tensor, p: Tensor, negatives: Sequence[Tensor], classes: int) -> Tensor:
        """Loss on distances; subclasses implement this.

        Args:
            a: Outputs of the anchors.
            p: Outputs of the positives.
            negatives: Outputs of the negatives, one tensor for each row of negatives.
            classes: Number of classes that the client holds, two or more.
        """
        raise NotImplementedError

    @property
    def _view(self) -> str:
        return "view1" if self.augment else "image"

    def embeds(self) -> bool:
        """Whether distances are computed on the embedding z."""
        return self.on == "z"

    def classifier(self) -> tuple[str, ...] | None:
        """Names of the networks from images to logits, if a classifier is trained."""
        return classifying(self.on, CLASSIFIER) if self.cross_entropy else None

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the classifier, if there is one."""
        return linear_head(setting, CLASSIFIER, self.on, setting.num_classes) if self.cross_entropy else {}

    def images(self) -> Sequence[str]:
        """Name the images of the anchors."""
        return (self._view,)

    def forwards(self) -> Sequence[Forward]:
        """Pass all members of the batch's tuples together; only the anchors if β is 0."""
        return (Forward(self.name if self.beta else self._view),)

    def start(self, context: ClientContext) -> None:
        """Draw partners from a stream that does not depend on the round, and open the stream of their views."""
        scope = context.of(self)
        scope.labels = context.data.labels
        scope.classes = len(torch.unique(scope.labels))
        scope.tuples = draw_quadruplets(
            scope.labels, stream(context.setting.seed, "quadruplets", context.client)
        )
        scope.draws = context.stream("quadruplets-redrawn")
        scope.views = context.stream("quadruplets-views") if self.augment else None
        scope.epoch = None

    def inputs(self, context: ClientContext, batch: Batch) -> dict[str, Tensor]:
        """Concatenate the anchors and their partners to one batch."""
        if not self.beta:
            return {}
        scope = context.of(self)
        if self.redraw and batch.epoch != scope.epoch:
            scope.tuples, scope.epoch = draw_quadruplets(scope.labels, scope.draws), batch.epoch
        anchors = batch.images[self._view]
        if scope.classes == 1:
            return {self.name: anchors}
        partners = scope.tuples[1 : self.members, batch.indices].flatten()
        return {self.name: torch.cat([anchors, context.data.pick(partners, scope.views)])}

    @property
    def least_loss(self) -> float:
        """Return 0: hinges and cross-entropies, unless β is negative."""
        return 0.0 if self.beta >= 0 else -math.inf

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Sum of the cross-entropy on the anchors, if enabled, and β times the loss on distances."""
        (forward,) = self.forwards()
        anchors, *partners = torch.split(read(self.on, passes[forward]), len(batch.indices))
        # A client with one class has no loss without cross-entropy; a constant avoids steps of weight decay alone.
        loss = label_loss(context, anchors, batch) if self.cross_entropy else anchors.new_zeros(())
        if not partners:
            return loss
        positives, *negatives = partners
        return loss + self.beta * self.distances(anchors, positives, negatives, context.of(self).classes)


@dataclass(frozen=True)
class Triplet(MetricLearning):
    """L = mean [d(a, p) − d(a, n) + m]₊ on random triplets. FedQuad specifies neither m nor the mining.

    Attributes:
        margin: m.
    """

    name: ClassVar[str] = "triplet"
    source: ClassVar[str] = "Hoffer and Ailon 2015; a baseline of FedQuad"
    members: ClassVar[int] = 3
    margin: float = 1.0

    def distances(self, a: Tensor, p: Tensor, negatives: Sequence[Tensor], classes: int) -> Tensor:
        """Triplet loss."""
        (n,) = negatives
        return triplet(a, p, n, self.margin)


@dataclass(frozen=True)
class Quadruplet(MetricLearning):
    """Chen et al.: L = mean {[g(a, p)ᵏ − g(a, n₁)ᵏ + m₁]₊ + [g(a, p)ᵏ − g(n₂, n₁)ᵏ + m₂]₊}, g Euclidean.

    The second term pushes samples of two classes apart. On a client with two classes, both negatives belong to the
    same class, and the term is omitted.

    Attributes:
        margins: (m₁, m₂), fixed; the paper adapts them to the batch when it mines hard negatives.
        power: k; 2 as in the paper's equation, 1 as in re-implementations.
        second: What n₂ is compared with: ``"n1"``, g(n₂, n₁), as in the paper, or the ``"anchor"``, g(a, n₂). The
            latter is FedQuad's loss without its classifier, which FedQuad calls "our version of QuadrupletFL".
    """

    name: ClassVar[str] = "quadruplet"
    source: ClassVar[str] = "Chen et al. 2017; a baseline of FedQuad"
    margins: tuple[float, float] = (1.0, 0.5)
    power: Literal[1, 2] = 2
    second: Literal["n1", "anchor"] = "n1"

    def distances(self, a: Tensor, p: Tensor, negatives: Sequence[Tensor], classes: int) -> Tensor:
        """Quadruplet loss."""
        n1, n2 = negatives
        if self.second == "anchor":
            return fedquad(a, p, n1, n2, self.margins, self.power)
        # A margin of −∞ is always satisfied, so its term is 0 and has no gradient.
        second = self.margins[1] if classes > 2 else -math.inf
        return quadruplet(a, p, n1, n2, (self.margins[0], second), self.power)
