"""Multi-crop: small local crops beside the two views, the global crops (Caron et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective
from atoll.core.schema import Whole

LOCAL = Forward("local_crops")


@dataclass(frozen=True)
class MultiCrop(Objective):
    """An objective of global and local crops. ``views.local_size`` and ``views.local_scale`` describe local crops.

    Attributes:
        local_crops: Number of local crops of an image; 0 for the two views alone.
    """

    local_crops: Whole = 0

    @property
    def crops(self) -> tuple[Forward, ...]:
        """The passes of all crops through the local networks, global crops first."""
        return (*VIEWS, LOCAL) if self.local_crops else VIEWS

    def images(self) -> Sequence[str]:
        """Name the local crops."""
        return [f"local{number}" for number in range(1, self.local_crops + 1)]

    def inputs(self, context: ClientContext, batch: Batch) -> dict[str, Tensor]:
        """Join the local crops to one batch, as the released codes do."""
        crops = [batch.images[name] for name in self.images()]
        return {LOCAL.images: torch.cat(crops)} if crops else {}


def epochs_done(context: ClientContext, batch: Batch) -> int:
    """Number of local epochs before a batch, counted over all rounds."""
    return (context.round - 1) * context.setting.train.epochs + batch.epoch
