"""Rotation prediction: predict by how many quarter turns an image was rotated (Gidaris et al. 2018; FedPR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.components.base import Batch, ClientContext, Component, Forward, Objective, Passes, Setting, Term
from atoll.core.devices import upload
from atoll.objectives.spaces import Space, linear_head, read

TURNS = 4


@dataclass(frozen=True)
class RotationTask(Component):
    """L = cross-entropy of a linear layer's four logits with the rotation as class; shared by objective and term.

    Attributes:
        every: Rotate each image by all of 0°, 90°, 180° and 270°, in one batch (RotNet); False: by one of them,
            drawn for each image (Orchestra's code).
        images_of: The images that are rotated: the first view, which other losses read too, a separate third view
            (Orchestra's code), or images without augmentation.
        on: Input of the linear layer: the representation ``"h"`` or the embedding ``"z"`` (Orchestra).
    """

    replays: ClassVar[bool] = True
    every: bool = True
    images_of: Literal["view1", "view3", "image"] = "view1"
    on: Space = "h"

    @property
    def least_loss(self) -> float:
        """Return 0, the least cross-entropy."""
        return 0.0

    def embeds(self) -> bool:
        """Whether the linear layer reads the embedding z."""
        return self.on == "z"

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the linear layer."""
        return linear_head(setting, "rotation_head", self.on, TURNS)

    def images(self) -> Sequence[str]:
        """Name the images that are rotated."""
        return (self.images_of,)

    def forwards(self) -> Sequence[Forward]:
        """Pass the rotated images through the local networks."""
        return (Forward(self.name),)

    def start(self, context: ClientContext) -> None:
        """Open the random stream of the rotations."""
        context.of(self).draws = context.stream(self.name)

    def inputs(self, context: ClientContext, batch: Batch) -> dict[str, Tensor]:
        """Rotate the images, and store the number of quarter turns."""
        scope, images = context.of(self), batch.images[self.images_of]
        n = len(images)
        turned = torch.cat([images.rot90(turns, (2, 3)) for turns in range(TURNS)])
        if self.every:
            scope.turns = torch.arange(TURNS, device=images.device).repeat_interleave(n)
            return {self.name: turned}
        drawn = torch.randint(TURNS, (n,), generator=scope.draws)
        scope.turns = upload(drawn, images.device)
        return {self.name: turned[upload(drawn * n + torch.arange(n), images.device)]}

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Cross-entropy of the predicted rotation; ln 4 for uniform predictions."""
        logits = context.networks["rotation_head"](read(self.on, passes[Forward(self.name)]))
        scope = context.of(self)
        return F.cross_entropy(logits, context.from_host(lambda: scope.turns))


@dataclass(frozen=True)
class Rotation(RotationTask, Objective):
    """Rotation prediction as the objective (FedPR, a baseline of FedCA)."""

    name: ClassVar[str] = "rotation"
    source: ClassVar[str] = "Gidaris et al. 2018, Section 3"


@dataclass(frozen=True)
class RotationTerm(RotationTask, Term):
    """Rotation prediction as an additional term against collapse (the released FedU²; Orchestra)."""

    name: ClassVar[str] = "rotation_term"
    source: ClassVar[str] = "Lubana et al. 2022 (Orchestra); the released code of FedU²"
