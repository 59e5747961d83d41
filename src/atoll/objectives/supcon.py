"""Supervised contrastive learning: views of one class are each other's positives (Khosla et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective, Passes, Setting
from atoll.core.schema import Positive
from atoll.functional import supcon
from atoll.objectives.cross_entropy import CLASSIFIER, label_loss
from atoll.objectives.spaces import classifying, linear_head


@dataclass(frozen=True)
class SupCon(Objective):
    """L_out over the 2N embeddings of a batch; with ``cross_entropy``, a classifier is trained too.

    Attributes:
        temperature: τ.
        base_temperature: τ_b, a fixed scale of the loss.
        cross_entropy: Add the cross-entropy of a linear classifier on h (of the first view). The papers that
            report SupCon's accuracy do not say where its classifier comes from; the alternative is a linear probe.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "supcon"
    source: ClassVar[str] = "Khosla et al. 2020, Eq. 2"
    least_loss: ClassVar[float] = 0.0
    needs_labels: ClassVar[bool] = True
    temperature: Positive = 0.07
    base_temperature: Positive = 0.07
    cross_entropy: bool = False

    def classifier(self) -> tuple[str, ...] | None:
        """Names of the networks from images to logits, if a classifier is trained."""
        return classifying("h", CLASSIFIER) if self.cross_entropy else None

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the classifier, if there is one."""
        return linear_head(setting, CLASSIFIER, "h", setting.num_classes) if self.cross_entropy else {}

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Contrastive loss, plus the cross-entropy if enabled."""
        assert batch.labels is not None  # noqa: S101  (methods that need labels are refused without labels)
        z = torch.cat([passes[view].z for view in VIEWS])
        contrast = supcon(z, batch.labels.repeat(2), self.temperature, self.base_temperature)
        return contrast + label_loss(context, passes[VIEWS[0]].h, batch) if self.cross_entropy else contrast
