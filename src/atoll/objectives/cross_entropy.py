"""Cross-entropy: supervised learning, with which the papers compare methods without labels."""

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
    """Cross-entropy of the classifier's logits for a batch.

    Args:
        context: The client's context, whose networks include the classifier.
        outputs: Representations or embeddings of the batch's samples.
        batch: The batch, with labels.

    Shape:
        outputs: (N, d). Output: scalar.
    """
    assert batch.labels is not None  # noqa: S101  (methods that need labels are refused without labels)
    return F.cross_entropy(context.networks[CLASSIFIER](outputs), batch.labels)


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """L = −log softmax(W f(x) + b)_y.

    Attributes:
        augment: Train on augmented views instead of images without augmentation.
        on: Input of the linear classifier: the representation ``"h"`` or the embedding ``"z"`` (MOON).
    """

    name: ClassVar[str] = "cross_entropy"
    source: ClassVar[str] = "McMahan et al. 2017; Dec-SSL Section 2.1"
    replays: ClassVar[bool] = True
    least_loss: ClassVar[float] = 0.0
    needs_labels: ClassVar[bool] = True
    augment: bool = False
    on: Space = "h"

    def embeds(self) -> bool:
        """Whether the classifier reads the embedding z."""
        return self.on == "z"

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the linear classifier."""
        return linear_head(setting, CLASSIFIER, self.on, setting.num_classes)

    def classifier(self) -> tuple[str, ...]:
        """Names of the networks from images to logits, which the loss trains."""
        return classifying(self.on, CLASSIFIER)

    def forwards(self) -> Sequence[Forward]:
        """Pass one image of each sample through the local networks."""
        return (Forward("view1" if self.augment else "image"),)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean cross-entropy over the batch."""
        (forward,) = self.forwards()
        return label_loss(context, read(self.on, passes[forward]), batch)
