"""The shift of each client's images, applied when the images are read.

A shift depends only on the client's number k and the number of clients K; the noise of an image also depends on its
position among the client's images. Each site of a real federation can therefore apply its own shift: the
coordinator sends k and K, and the site's images are shifted as in a simulation over the same folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from atoll.core.rng import numpy_stream, stream
from atoll.data.images import ImageSet, Pixels, Shape
from atoll.data.shifts.corruptions import CORRUPTIONS
from atoll.data.shifts.options import ShiftOptions
from atoll.data.shifts.styles import STYLES

SHIFTED = "shifted as client"  # the column of shifted images that names the client

_DATA_SEED = 0  # for choices that are the same in all runs on the data
_STYLES = tuple(STYLES)


@dataclass(frozen=True)
class Shift:
    """The shifts of a recipe, for K clients.

    Attributes:
        options: The recipe's ``[shift]`` section.
        clients: Number of clients K.
        seed: Seed of the noise.
        purpose: Name of the images, so that the noise of training and of test images differs.

    Example:
        >>> from atoll.data.shifts.options import ShiftOptions
        >>> from atoll.data.shifts.shift import Shift
        >>> shift = Shift(ShiftOptions(kinds=("rotation", "style")), clients=5, seed=0)
        >>> shift.describe(1)
        'rotated by 72°, sketch'
    """

    options: ShiftOptions
    clients: int
    seed: int
    purpose: str = "train"

    def angle(self, client: int) -> float:
        """Angle of a client's images in degrees, counter-clockwise."""
        return 360 * client / self.clients

    def style(self, client: int) -> str:
        """Style of a client's images."""
        return _STYLES[client % len(_STYLES)]

    def corruption(self, client: int) -> str:
        """Corruption of a client's images."""
        return self.options.corruptions[client % len(self.options.corruptions)]

    def describe(self, client: int) -> str:
        """Describe the shift of a client; empty if there is none."""
        words = {
            "rotation": f"rotated by {self.angle(client):g}°",
            "style": self.style(client),
            "corruption": f"{self.corruption(client)} {self.options.severity}",
        }
        return ", ".join(words[kind] for kind in self.options.kinds)

    def apply(self, pixels: Tensor, client: int, places: Sequence[int]) -> Tensor:
        """Shift images of one client.

        Rotation is about the centre, bilinear, without a change of size; pixels from outside the image are black.

        Args:
            pixels: The images.
            client: The client.
            places: Position of each image among the client's images; its noise depends on it.

        Shape:
            - pixels: uint8 (n, C, S, S); output: as pixels
        """
        for kind in self.options.kinds:
            if kind == "rotation":
                pixels = _rotated(pixels, self.angle(client))
                continue
            images = pixels.float().div_(255)
            if kind == "style":
                images = STYLES[self.style(client)](images)
            else:
                generators = [stream(self.seed, "shift", self.purpose, client, place) for place in places]
                images = CORRUPTIONS[self.corruption(client)](images, self.options.severity, generators)
            pixels = images.mul(255).round_().to(torch.uint8)
        return pixels


@dataclass(frozen=True)
class ShiftedPixels:
    """Pixels that are shifted when they are gathered, each by its client; images without a client are unchanged.

    Attributes:
        base: The pixels of the source.
        owners: Client of each image, (N,) int64; −1 for none.
        places: Position of each image among its client's images, (N,) int64.
        shift: The shifts.
    """

    base: Pixels
    owners: Tensor
    places: Tensor
    shift: Shift

    @property
    def shape(self) -> Shape:
        """Shape (N, C, H, W)."""
        return self.base.shape

    def __len__(self) -> int:
        return len(self.base)

    def gather(self, indices: Tensor) -> Tensor:
        """See `atoll.data.images.Pixels.gather`."""
        pixels = self.base.gather(indices)
        owners = self.owners.index_select(0, indices)
        for client in torch.unique(owners).tolist():
            if client >= 0:
                chosen = (owners == client).nonzero().squeeze(1)
                places = self.places.index_select(0, indices.index_select(0, chosen)).tolist()
                pixels[chosen] = self.shift.apply(pixels.index_select(0, chosen), client, places)
        return pixels


def shifted(images: ImageSet, clients: Sequence[Tensor], shift: Shift) -> ImageSet:
    """Apply to each image the shift of its client, and record the client in the column `SHIFTED`.

    The set keeps its fingerprint, which identifies the images of the source.

    Args:
        images: The images of the source.
        clients: Indices of each client's images.
        shift: The shifts.
    """
    owners = torch.full((len(images),), -1)
    places = torch.zeros(len(images), dtype=torch.int64)
    for client, indices in enumerate(clients):
        owners[indices] = client
        places[indices] = torch.arange(len(indices))
    columns = {**images.columns, SHIFTED: owners}
    return replace(images, images=ShiftedPixels(images.images, owners, places, shift), columns=columns)


def _rotated(pixels: Tensor, angle: float) -> Tensor:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as V

    rotated: Tensor = V.rotate(pixels, angle, InterpolationMode.BILINEAR)
    return rotated


def shifted_held_out(images: ImageSet, sizes: Sequence[int], shift: Shift, purpose: str) -> ImageSet:
    """Apply to each held-out image the shift of a client that is drawn for it.

    All clients that hold images get equally many held-out images, up to one. Neither the clients nor the noise
    depend on the run's seed, so all runs with the same number of clients are evaluated on the same images.

    Args:
        images: The held-out images.
        sizes: Number of training images of each client.
        shift: The shifts of the training images.
        purpose: Name of the images.
    """
    holders = np.flatnonzero(np.asarray(sizes))
    turns = holders[np.arange(len(images)) % len(holders)]
    owners = numpy_stream(_DATA_SEED, "shift", purpose).permutation(turns)
    clients = [torch.from_numpy(np.flatnonzero(owners == client)) for client in range(len(sizes))]
    return shifted(images, clients, replace(shift, seed=_DATA_SEED, purpose=purpose))
