"""The convolutional networks of FedQuad and FedCA, and the decoder of the federated autoencoder."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from atoll.models.encoder import Encoder


def _conv_block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class FedQuadCNN(Encoder):
    """Three convolutions and a linear layer to a 128-d embedding that is not normalised.

    The paper states the last width (256) and leaves the first two open; this implementation uses 64 and 128.

    Args:
        channels: Channels of the images.

    Shape:
        - Input: (N, channels, H, W)
        - Output: (N, 128)

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
        """Apply the linear layer to the pooled features."""
        out: Tensor = self.fc(self.features(images))
        return out


class FedCACNN(Encoder):
    """Five convolutions to a 2048-d representation.

    The paper says only "5-layer CNN" and "2048-dimension". This implementation has 3×3 convolutions with BatchNorm
    and ReLU, widths 64, 128, 256, 512, 512, a max-pool after each of the first four, and 2×2 maps at the
    end, so that 512 · 2 · 2 = 2048 for images with a side of 16 or more.

    Args:
        channels: Channels of the images.

    Shape:
        - Input: (N, channels, H, W)
        - Output: (N, 2048)

    Reference:
        Zhang et al., "Federated Unsupervised Representation Learning" (FedCA), https://arxiv.org/abs/2010.08982.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(dim=2048)
        layers: list[nn.Module] = []
        for before, after in pairwise([channels, 64, 128, 256, 512]):
            layers += [_conv_block(before, after), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers, _conv_block(512, 512), nn.AdaptiveAvgPool2d(2), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        """Compute the last feature maps, flattened."""
        out: Tensor = self.features(images)
        return out


class ConvDecoder(nn.Module):
    """Decoder from representations to images: mirrors `FedCACNN` with transposed convolutions of stride 2.

    FedCA compares with a federated autoencoder and does not specify its decoder. In this implementation, a linear
    layer produces 512 maps with a sixteenth of the image's side (rounded up), and four transposed convolutions
    produce the image. The last one has neither norm nor activation, because images may be normalised. Pixels beyond
    the image's size are cropped.

    Args:
        dim: Width of a representation.
        channels: Channels of the images.
        image_size: Side of the images.

    Shape:
        - Input: (N, dim)
        - Output: (N, channels, image_size, image_size)
    """

    def __init__(self, dim: int, channels: int, image_size: int) -> None:
        super().__init__()
        self.image_size = image_size
        start = -(-image_size // 16)
        layers: list[nn.Module] = [nn.Linear(dim, 512 * start**2), nn.Unflatten(1, (512, start, start))]
        for before, after in pairwise([512, 256, 128, 64]):
            layers += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1), nn.BatchNorm2d(after)]
            layers += [nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(64, channels, 4, stride=2, padding=1))

    def forward(self, h: Tensor) -> Tensor:
        """Decode representations into images."""
        out: Tensor = self.layers(h)
        return out[..., : self.image_size, : self.image_size]


def build_decoder(dim: int, channels: int, image_size: int) -> ConvDecoder:
    """Build the autoencoder's decoder for representations of width ``dim``.

    Example:
        >>> import torch
        >>> from atoll.models import build_decoder
        >>> build_decoder(dim=16, channels=1, image_size=8)(torch.zeros(4, 16)).shape
        torch.Size([4, 1, 8, 8])
    """
    return ConvDecoder(dim, channels, image_size)
