"""ViT-Tiny as a masked autoencoder (MAE) for small images.

References:
    Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, https://arxiv.org/abs/2010.11929.
    He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022, https://arxiv.org/abs/2111.06377.
    Wang et al., "Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?"
    (Dec-SSL), ICLR 2023, https://arxiv.org/abs/2210.10947: the sizes used here.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.core.errors import UserError
from atoll.models.encoder import Encoder

HEAD_WIDTH = 64  # 192 / 3 heads in ViT-Tiny; the same for all token widths


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images into square patches, row by row, each flattened as (channel, row, column).

    Args:
        images: A batch of images.
        patch: Side of a patch.

    Shape:
        - Input: (N, C, H, W), H and W multiples of ``patch``
        - Output: (N, H·W / patch², C · patch²)

    Raises:
        ValueError: The images do not divide into patches.

    Example:
        >>> import torch
        >>> from atoll.models import patchify
        >>> patchify(torch.arange(16.0).reshape(1, 1, 4, 4), patch=2)[0, 0]  # the patch at the top left
        tensor([0., 1., 4., 5.])
    """
    if images.ndim != 4 or patch < 1 or images.shape[2] % patch or images.shape[3] % patch:
        shape = tuple(images.shape)
        raise ValueError(
            f"expected images (N, C, H, W) with sides that are multiples of {patch}, got {shape}"
        )
    return nn.functional.unfold(images, patch, stride=patch).transpose(1, 2)


def unpatchify(patches: Tensor, patch: int, image_size: int) -> Tensor:
    """Assemble square images from patches: the inverse of `patchify`.

    Args:
        patches: The patches of each image.
        patch: Side of a patch.
        image_size: Side of the images.

    Shape:
        - Input: (N, image_size² / patch², C · patch²)
        - Output: (N, C, image_size, image_size)

    Example:
        >>> import torch
        >>> from atoll.models import patchify, unpatchify
        >>> images = torch.rand(2, 3, 4, 4)
        >>> torch.equal(unpatchify(patchify(images, patch=2), patch=2, image_size=4), images)
        True
    """
    return nn.functional.fold(patches.transpose(1, 2), image_size, patch, stride=patch)


def visible_patches(patches: int, ratio: float) -> int:
    """Number of an image's patches that a mask leaves visible.

    Args:
        patches: Number of patches in an image.
        ratio: Share of the patches to mask.

    Example:
        >>> from atoll.models.vit import visible_patches
        >>> visible_patches(256, ratio=0.75)
        64
    """
    return patches - round(ratio * patches)


def random_masking(
    n: int, patches: int, generator: torch.Generator, ratio: float = 0.75
) -> tuple[Tensor, Tensor]:
    """Draw the visible patches of ``n`` images, independently for each image.

    Args:
        n: Number of images.
        patches: Number of patches in an image.
        generator: Source of the random draws; a CPU generator for a model on any device.
        ratio: Share of the patches to mask.

    Returns:
        ``keep``, the indices of the visible patches, and ``mask``, 1 for each masked patch; both on the CPU.

    Raises:
        UserError: The ratio leaves no patch visible, or masks none.

    Shape:
        - keep: (n, visible) integers, visible as by `visible_patches`
        - mask: (n, patches)

    Example:
        >>> import torch
        >>> from atoll.models import random_masking
        >>> keep, mask = random_masking(n=2, patches=16, generator=torch.Generator().manual_seed(0))
        >>> keep.shape, mask.sum(dim=1)
        (torch.Size([2, 4]), tensor([12., 12.]))
    """
    visible = visible_patches(patches, ratio)
    if not 0 < visible < patches:
        raise UserError(f"a mask ratio of {ratio} over {patches} patches leaves {visible} visible; change it")
    order = torch.rand(n, patches, generator=generator).argsort(dim=1, stable=True)
    keep = order[:, :visible]
    return keep, torch.ones(n, patches).scatter_(1, keep, 0.0)


def resample_positions(positions: Tensor, count: int) -> Tensor | None:
    """Interpolate a ViT's position embeddings to another number of patches; tokens before the grid are kept.

    Args:
        positions: The embeddings: a square grid, after the class token if there is one.
        count: Number of tokens of the result.

    Shape:
        - positions: (1, P + G², D). Output: (1, P + G'², D), or None if the P differ.

    Reference:
        ``timm.layers.resample_abs_pos_embed``: bicubic with antialiasing.
    """
    before, after = math.isqrt(positions.shape[1]), math.isqrt(count)
    first = positions.shape[1] - before**2
    if first != count - after**2:
        return None
    grid = positions[:, first:].float().reshape(1, before, before, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(after, after), mode="bicubic", antialias=True)
    resampled = grid.permute(0, 2, 3, 1).reshape(1, after**2, -1).to(positions.dtype)
    return torch.cat([positions[:, :first], resampled], dim=1)


def resample_patches(weight: Tensor, side: int) -> Tensor:
    """Convert a patch embedding to another patch size, so that resized patches get nearly the same embedding.

    Args:
        weight: The weight of a convolution whose kernel is a patch.
        side: Side of the new patches.

    Shape:
        - weight: (D, C, P, P). Output: (D, C, side, side).

    Reference:
        ``timm.layers.resample_patch_embed``; Beyer et al., FlexiViT, CVPR 2023, Eq. 5: the pseudo-inverse of the
        resizing (bicubic, antialiased).
    """
    old = weight.shape[-1]
    basis = torch.eye(old**2).reshape(old**2, 1, old, old)
    resize = F.interpolate(basis, size=(side, side), mode="bicubic", antialias=True).reshape(old**2, side**2)
    fitted: Tensor = weight.float().flatten(2) @ torch.linalg.pinv(resize).T
    return fitted.reshape(*weight.shape[:2], side, side).to(weight.dtype)


class Block(nn.Module):
    """Transformer block with the norms first (Dosovitskiy et al., Eq. 2 and 3), with torchvision's names.

    Args:
        width: Width of a token.

    Shape:
        - x: (N, T, width). Output: as x.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, width // HEAD_WIDTH, batch_first=True)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        wider, narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (wider, narrower):
            nn.init.xavier_uniform_(layer.weight)
            # In place of nn.init.normal_, which imports PyTorch's compiler for the masked autoencoder's "meta"
            # encoder.
            layer.bias.data.copy_(torch.randn(len(layer.bias)).mul_(1e-6))
        self.mlp = nn.Sequential(OrderedDict({"0": wider, "1": nn.GELU(), "3": narrower}))

    def forward(self, x: Tensor) -> Tensor:
        """Let the tokens of each image attend to each other, then transform each token separately."""
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


def _blocks(width: int, depth: int) -> nn.Sequential:
    # nn.TransformerEncoder copies one block, so all of its blocks would start with the same weights.
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def _embedding(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))


class ViT(Encoder):
    """Vision transformer; the representation is the class token after the last norm.

    Args:
        channels: Channels of the images.
        image_size: Side of the images, a multiple of ``patch``.
        patch: Side of a patch.
        width: Width of a token, a multiple of 64; there is one attention head per 64 dimensions.
        depth: Number of blocks.

    Raises:
        UserError: The images do not divide into patches.
    """

    def __init__(
        self, channels: int, image_size: int, patch: int = 2, width: int = 192, depth: int = 12
    ) -> None:
        super().__init__(dim=width)
        if image_size % patch:
            raise UserError(
                f"images of side {image_size} do not divide into patches of side {patch}; change model.patch"
            )
        self.patch = patch
        self.patches = (image_size // patch) ** 2
        self.embed = nn.Linear(channels * patch**2, width)
        self.cls_token = _embedding(1, 1, width)
        self.positions = _embedding(1, 1 + self.patches, width)
        self.blocks = _blocks(width, depth)
        self.norm = nn.LayerNorm(width)

    def tokens(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Compute the class token and the patch tokens after the last norm.

        Args:
            images: A batch of square images. If their size is not the network's, position embeddings are
                interpolated.
            keep: Indices of the visible patches of each image; all patches by default.

        Shape:
            - images: (N, channels, image_size, image_size)
            - keep: (N, V) integers
            - Output: (N, 1 + V, width), V = all patches by default
        """
        patches = self.embed(patchify(images, self.patch))
        positions: Tensor = self.positions
        if patches.shape[1] != self.patches:
            resampled = resample_positions(positions, 1 + patches.shape[1])
            assert resampled is not None  # noqa: S101  (both have one class token)
            positions = resampled
        x = patches + positions[:, 1:]
        if keep is not None:
            x = x.gather(1, keep.unsqueeze(-1).expand(-1, -1, self.dim))
        # `len` would be a constant, and an exported program would accept only batches of that size.
        first = (self.cls_token + positions[:, :1]).expand(x.shape[0], -1, -1)
        out: Tensor = self.norm(self.blocks(torch.cat([first, x], dim=1)))
        return out

    def forward(self, images: Tensor) -> Tensor:
        """Compute the class token without masking any patch."""
        return self.tokens(images)[:, 0]

    def forward_masked(self, images: Tensor, keep: Tensor) -> Tensor:
        """Compute the tokens of the visible patches, the input of `MAEDecoder`; see `tokens`."""
        return self.tokens(images, keep)


class MAEDecoder(nn.Module):
    """Decoder of the masked autoencoder: inserts mask tokens and predicts the pixels of every patch.

    Args:
        encoder: The encoder whose tokens it decodes; it defines width, patches and channels.
        depth: Number of blocks.

    Shape:
        - tokens: (N, 1 + V, width), from `ViT.forward_masked`
        - keep: (N, V) integers, as passed to `ViT.forward_masked`
        - Output: (N, patches, channels · patch²), to compare with `patchify`
    """

    def __init__(self, encoder: ViT, depth: int = 4) -> None:
        super().__init__()
        self.mask_token = _embedding(1, 1, encoder.dim)
        self.positions = _embedding(1, 1 + encoder.patches, encoder.dim)
        self.blocks = _blocks(encoder.dim, depth)
        self.head = nn.Linear(encoder.dim, encoder.embed.in_features)

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """Predict the pixels of every patch."""
        n, patches = len(tokens), self.positions.shape[1] - 1
        hidden = self.mask_token.expand(n, patches, -1).to(tokens.dtype)
        x = hidden.scatter(1, keep.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]), tokens[:, 1:])
        out: Tensor = self.head(self.blocks(torch.cat([tokens[:, :1], x], dim=1) + self.positions)[:, 1:])
        return out
