"""Autoencoder: reconstruct the image from its representation (FedAE, a baseline of FedCA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from atoll.components.base import Batch, ClientContext, Forward, Objective, Passes, Setting
from atoll.models.cnn import build_decoder

IMAGE = Forward("image")


@dataclass(frozen=True)
class Autoencoder(Objective):
    """L = mean of (x − dec(f(x)))² over all pixels, on images without augmentation.

    FedCA does not specify the decoder; this one mirrors FedCA's CNN (see `atoll.models.cnn.ConvDecoder`).
    """

    name: ClassVar[str] = "autoencoder"
    source: ClassVar[str] = "FedCA (a baseline)"
    replays: ClassVar[bool] = True
    least_loss: ClassVar[float] = 0.0

    def embeds(self) -> bool:
        """Return False: the decoder reads the representation, and there is no projector."""
        return False

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the decoder."""
        channels, size, _ = setting.image_shape
        return {"decoder": build_decoder(setting.encoder_dim, channels, size)}

    def forwards(self) -> Sequence[Forward]:
        """Pass images without augmentation through the local encoder."""
        return (IMAGE,)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean squared error between the reconstruction and the image."""
        return F.mse_loss(passes[IMAGE].head("decoder"), batch.images["image"])
