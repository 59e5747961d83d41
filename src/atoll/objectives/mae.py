"""Masked autoencoder: reconstruct masked patches with a vision transformer (He et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from atoll.components.base import Batch, ClientContext, Objective, Passes, Setting
from atoll.core.schema import Above, Below
from atoll.functional import masked_reconstruction
from atoll.models import build_encoder
from atoll.models.options import build_mae_decoder
from atoll.models.vit import ViT, patchify, random_masking, visible_patches


def meta_encoder(setting: Setting) -> ViT:
    """Build an encoder without weights, for its sizes."""
    channels, size, _ = setting.image_shape
    with torch.device("meta"):
        encoder = build_encoder(setting.model, channels, size)
    assert isinstance(encoder, ViT)  # noqa: S101  (see MAE.refuse)
    return encoder


@dataclass(frozen=True)
class MAE(Objective):
    """L = mean over masked pixels of (x̂ − x)², with x̂ decoded from the visible patches alone.

    Images are not augmented, and pixels are not normalised per patch (as in Dec-SSL's code). The patch size and the
    depth of the decoder are ``model.patch`` and ``model.decoder_depth``.

    Attributes:
        mask_ratio: Share of an image's patches that is masked: at 3/4, 192 of the 256 patches of 2×2 pixels.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "mae"
    source: ClassVar[str] = "He et al. 2022, Section 3; Dec-SSL Appendix B"
    mask_ratio: Annotated[float, Above(0), Below(1)] = 0.75

    def refuse(self, setting: Setting) -> str | None:
        """Refuse encoders without patches to mask, and ratios that mask none or all of them."""
        if setting.model.encoder != "vit-tiny":
            return (
                f"{self.name!r} masks patches of a vision transformer, and model.encoder is "
                f"{setting.model.encoder!r}; set model.encoder = 'vit-tiny'"
            )
        patches = meta_encoder(setting).patches
        if not 0 < (visible := visible_patches(patches, self.mask_ratio)) < patches:
            return (
                f"options.{self.name}.mask_ratio = {self.mask_ratio} leaves {visible} of the {patches} patches of "
                "an image visible, but some must be visible and some masked; change it or model.patch"
            )
        return None

    def embeds(self) -> bool:
        """Return False: the decoder reads the patch tokens, and there is no projector."""
        return False

    @property
    def least_loss(self) -> float:
        """Return 0, the least squared error."""
        return 0.0

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the decoder for the encoder's size."""
        return {"mae_decoder": build_mae_decoder(setting.model, meta_encoder(setting))}

    def images(self) -> Sequence[str]:
        """Name the images that the loss reads: those without augmentation."""
        return ("image",)

    def start(self, context: ClientContext) -> None:
        """Open the random stream of the masks."""
        context.of(self).masks = context.stream("mae-masks")

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Return the error of the reconstruction."""
        return self.reconstruct(context, batch)[0]

    def reconstruct(self, context: ClientContext, batch: Batch) -> tuple[Tensor, Tensor]:
        """Encode the visible patches, decode all patches, and compare the masked ones with the image.

        Returns:
            The error, and the encoder's tokens of the visible patches.
        """
        encoder, decoder = context.networks["encoder"], context.networks["mae_decoder"]
        assert isinstance(encoder, ViT)  # noqa: S101  (see refuse)
        images = batch.images["image"]
        shape, draws = (len(images), encoder.patches), context.of(self).masks
        keep = context.from_host(lambda: random_masking(*shape, draws, self.mask_ratio)[0])
        mask = torch.ones(shape, device=images.device).scatter(1, keep, 0.0)
        tokens = encoder.forward_masked(images, keep)
        target = patchify(images, encoder.patch)
        return masked_reconstruction(decoder(tokens, keep), target, mask), tokens
