"""Cross-entropy: supervised learning, which the papers set beside methods without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from atoll.components.base import Batch, ClientContext, Forward, Objective, Passes, Setting
from atoll.objectives.spaces import Space, classifying, linear_head, read

CLASSIFIER = "classifier"


def label_loss(context: ClientContext, outputs: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the classifier's logits for some outputs of a batch's own samples."""
    assert batch.labels is not None  # noqa: S101  (a method that needs labels is refused without)
    return F.cross_entropy(context.networks[CLASSIFIER](outputs), batch.labels)


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """L = −log softmax(W f(x) + b)_y.

    Attributes:
        augment: learn from augmented views instead of images as they are.
        on: the linear classifier stands on the representation ``"h"`` or on the embedding ``"z"`` (MOON).
    """

    name: ClassVar[str] = "cross_entropy"
    source: ClassVar[str] = "McMahan et al. 2017; Dec-SSL Section 2.1"
    needs_labels: ClassVar[bool] = True
    augment: bool = False
    on: Space = "h"

    def embeds(self) -> bool:
        """Only where the classifier stands on z."""
        return self.on == "z"

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """The linear classifier."""
        return linear_head(setting, CLASSIFIER, self.on, setting.num_classes)

    def classifier(self) -> tuple[str, ...]:
        """What the loss trains."""
        return classifying(self.on, CLASSIFIER)

    def forwards(self) -> Sequence[Forward]:
        """One image of each sample through the local networks."""
        return (Forward("view1" if self.augment else "image"),)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """The mean over the batch."""
        (forward,) = self.forwards()
        return label_loss(context, read(self.on, passes[forward]), batch)
