"""The convolutional networks of FedQuad and FedCA, and the decoder of the federated autoencoder."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from atoll.models.encoder import Encoder


def _conv_block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class FedQuadCNN(Encoder):
    """Three convolutions and a linear layer to a 128-d embedding that is not normalised.

    The paper states the last width (256) and leaves the first two open; ours are 64 and 128.

    Reference:
        FedQuad (federated stochastic quadruplet learning), the backbone of its experiments.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(dim=128)
        self.features = nn.Sequential(
            _conv_block(channels, 64),
            nn.MaxPool2d(2),
            _conv_block(64, 128),
            nn.MaxPool2d(2),
            _conv_block(128, 256),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.fc = nn.Linear(256, self.dim)

    def forward(self, images: Tensor) -> Tensor:
        """The linear layer over the pooled features."""
        out: Tensor = self.fc(self.features(images))
        return out


class FedCACNN(Encoder):
    """Five convolutions to a 2048-d representation.

    The paper says "5-layer CNN" and "2048-dimension", no more. Our reading: 3×3 convolutions with BatchNorm
    and ReLU, widths 64, 128, 256, 512, 512, a max-pool after each of the first four, and 2×2 maps at the
    end, so that 512 · 2 · 2 = 2048 for images of any side from 16 up.

    Reference:
        Zhang et al., "Federated Unsupervised Representation Learning" (FedCA), https://arxiv.org/abs/2010.08982.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(dim=2048)
        parts: list[nn.Module] = []
        for before, after in pairwise([channels, 64, 128, 256, 512]):
            parts += [_conv_block(before, after), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*parts, _conv_block(512, 512), nn.AdaptiveAvgPool2d(2), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        """The last feature maps, flattened."""
        out: Tensor = self.features(images)
        return out


class ConvDecoder(nn.Module):
    """Representations back to images: `FedCACNN` mirrored, by transposed convolutions that double the size.

    FedCA compares with a federated autoencoder and leaves its decoder open. Ours: a linear layer gives 512
    maps of a sixteenth of the image's side (rounded up), and four transposed convolutions lead to the image.
    The last has neither norm nor activation, since images may be normalised. What sticks out is cut off.

    Shape:
        - Input: (N, dim)
        - Output: (N, channels, image_size, image_size)
    """

    def __init__(self, dim: int, channels: int, image_size: int) -> None:
        super().__init__()
        self.image_size = image_size
        start = -(-image_size // 16)
        parts: list[nn.Module] = [nn.Linear(dim, 512 * start**2), nn.Unflatten(1, (512, start, start))]
        for before, after in pairwise([512, 256, 128, 64]):
            parts += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1), nn.BatchNorm2d(after)]
            parts += [nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*parts, nn.ConvTranspose2d(64, channels, 4, stride=2, padding=1))

    def forward(self, h: Tensor) -> Tensor:
        """Images of the given size."""
        out: Tensor = self.layers(h)
        return out[..., : self.image_size, : self.image_size]


def build_decoder(dim: int, channels: int, image_size: int) -> ConvDecoder:
    """The autoencoder's decoder for representations of width ``dim``.

    Example:
        >>> import torch
        >>> from atoll.models import build_decoder
        >>> build_decoder(dim=16, channels=1, image_size=8)(torch.zeros(4, 16)).shape
        torch.Size([4, 1, 8, 8])
    """
    return ConvDecoder(dim, channels, image_size)
