"""Batched image operations with separate parameters for every image.

Each operation applies torchvision's per-image tensor transform to a whole batch: it uses the same formulas and the
same clamping to [0, 1] after every step, so for equal parameters the results agree up to float rounding. Images are
float32, (N, C, H, W), in [0, 1]. A function whose name ends in an underscore changes its images in place, as in
PyTorch.

Cropping, resizing, flipping, shifting and blurring are linear and separable: each pixel of a row of the result is a
weighted sum of few source pixels, its taps, and so is each pixel of a column. `separable` applies any of them with
one weighted sum of taps for each axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.core.errors import UserError, did_you_mean

BLENDS = ("brightness", "contrast", "saturation")
CPU_PART = 3 << 15  # number of values whose hue a CPU rotates at a time
LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601 weights of R, G and B, as torchvision and Pillow use them


def _triangle(x: Tensor) -> Tensor:
    return (1 - x).clamp_(min=0)


def _cubic(x: Tensor) -> Tensor:
    # Keys' cubic with a = −1/2, as in Pillow and in PyTorch's antialiased resize.
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


FILTERS = {"bilinear": (_triangle, 1), "bicubic": (_cubic, 2)}  # and how many source pixels it extends


@dataclass(frozen=True)
class Taps:
    """The source pixels whose weighted sum is a pixel of the result, along one axis of every image.

    Attributes:
        pixels: (N, S, K), positions of the K source pixels of each of S pixels.
        weights: (N, S, K), their weights.
    """

    pixels: Tensor
    weights: Tensor

    def __getitem__(self, images: slice) -> Taps:
        return Taps(self.pixels[images], self.weights[images])

    def choose(self, which: Tensor, start: Tensor) -> Taps:
        """Give each of M images the taps of one of these N, and move its pixels by its ``start``.

        Shape:
            which, start: (M,); result: (M, S, K).
        """
        pixels = self.pixels.index_select(0, which).add_(start[:, None, None])
        return Taps(pixels, self.weights.index_select(0, which))


def resize_taps(extent: Tensor, positions: Tensor, largest: int, interpolation: str = "bilinear") -> Taps:
    """Taps of the antialiased resampling of one axis of crops, counted from each crop's first source pixel.

    A crop of extent E is resized to S pixels, of which the result has pixels ``positions[i]``. Positions in reverse
    order are therefore a flip, and shifted positions a shift. Output pixel p has its centre at (p + 1/2)·E/S. If
    this reduces the size, the filter is stretched by E/S (antialiasing, as in Pillow and in
    ``torch.nn.functional.interpolate``).

    Args:
        extent: Number of source pixels of each crop.
        positions: The output pixels to compute, each in 0 … S−1.
        largest: The largest extent, or an upper bound of it.
        interpolation: ``"bilinear"`` or ``"bicubic"``.

    Shape:
        extent: (N,); positions: (N, S); result: (N, S, K). Weights sum to 1.

    Raises:
        UserError: The interpolation is unknown.
    """
    if interpolation not in FILTERS:
        raise UserError(
            f"views.interpolation {interpolation!r} is unknown; {did_you_mean(interpolation, FILTERS)}"
        )
    weigh, radius = FILTERS[interpolation]
    size = positions.shape[-1]
    extent = extent[:, None, None]
    scale = extent / size
    stretch = scale.clamp(min=1)
    # Pixels are named by their centres here, which lie at half-integers.
    centre = (positions[..., None] + 0.5) * scale
    first = centre.sub(stretch, alpha=radius).sub_(0.5).ceil_().add_(0.5)
    # An open interval of length d contains at most ⌈d⌉ centres.
    taps = math.ceil(2 * radius * max(1.0, largest / size))
    pixels = first + torch.arange(taps, device=extent.device)
    weights = weigh(pixels.sub(centre).abs_().div_(stretch))
    # The crop's border ends the image: what is beyond has no weight.
    weights.mul_((pixels > 0) & (pixels < extent))
    pixels = pixels.clamp_(min=0).minimum(extent - 1).long()
    return Taps(pixels, weights.div_(weights.sum(-1, keepdim=True)))


def blur_taps(sigma: Tensor, kernel: int, size: int) -> Taps:
    """Taps of the Gaussian blur of one axis, with reflected borders.

    Args:
        sigma: Standard deviation of each image's blur, in pixels.
        kernel: Width of the kernel in pixels, odd.
        size: Number of pixels of the axis.

    Shape:
        sigma: (N,).

    Raises:
        ValueError: The kernel is even, or extends beyond the reflected image.
    """
    radius = kernel // 2
    if kernel % 2 == 0 or radius >= size:
        raise ValueError(
            f"a blur kernel must be odd and less than twice the image: kernel {kernel}, size {size}"
        )
    offset = torch.arange(-radius, radius + 1, device=sigma.device)
    weights = torch.exp(-0.5 * (offset / sigma[:, None]) ** 2)
    weights = weights / weights.sum(1, keepdim=True)
    pixels = reflect(torch.arange(size, device=sigma.device)[:, None] + offset, size)
    shape = (len(sigma), size, kernel)
    return Taps(pixels.expand(shape), weights[:, None].expand(shape))


def reflect(positions: Tensor, size: int) -> Tensor:
    """Reflect positions into 0 … size−1 at the centres of the border pixels, as the padding mode ``"reflect"``."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()


def separable(images: Tensor, rows: Taps, columns: Taps) -> Tensor:
    """Resample each channel of each image along both axes.

    Args:
        images: The images, of any type.
        rows: Taps of the vertical axis.
        columns: Taps of the horizontal axis.

    Shape:
        images: (N, C, H, W); taps: of S rows and of T columns; result: float32 (N, C, S, T).
    """
    return separable_turned(turned(images), torch.arange(len(images), device=images.device), rows, columns)


def turned(images: Tensor) -> Tensor:
    """Copy images with each column contiguous in memory, as `separable_turned` needs them: float32 (N, W, C, H)."""
    return images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)


def separable_turned(images: Tensor, which: Tensor, rows: Taps, columns: Taps) -> Tensor:
    """`separable` for M views of N images, which `turned` copies once for all views.

    Args:
        images: The images as `turned` returns them.
        which: The image of each view.
        rows: Taps of each view's vertical axis.
        columns: Taps of its horizontal axis.

    Shape:
        images: (N, W, C, H); which: (M,); taps: of S rows and of T columns; result: float32 (M, C, S, T).
    """
    n, width, channels, height = images.shape
    pixels = (width * which)[:, None, None] + columns.pixels
    across = _sums(images.view(n * width, channels * height), pixels, columns.weights)
    # Each axis is resampled as one of whole rows in memory.
    across = across.view(*pixels.shape[:2], channels, height).permute(0, 2, 3, 1).contiguous()
    first = torch.arange(0, len(which) * channels * height, height, device=images.device)
    pixels = first.view(-1, channels, 1, 1) + rows.pixels[:, None]
    return _sums(across.flatten(0, 2), pixels, rows.weights[:, None].expand_as(pixels))


def _sums(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of K rows of a table, (R, L) for rows and weights (…, K): (…, L)."""
    summed = F.embedding_bag(
        rows.flatten(0, -2), table, mode="sum", per_sample_weights=weights.flatten(0, -2)
    )
    return summed.view(*rows.shape[:-1], table.shape[1])


def luma(images: Tensor) -> Tensor:
    """Grey value of every pixel: the luma of three channels, the mean of any other number of channels.

    Args:
        images: The images.

    Shape:
        images: (N, C, H, W); result: (N, 1, H, W).
    """
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.unbind(1)
    grey = red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return grey.unsqueeze(1)


def grayscale_(images: Tensor) -> Tensor:
    """Replace every channel by the grey value. Images with other than three channels are not changed."""
    return images.copy_(luma(images)) if images.shape[1] == 3 else images


def blend_weights(factors: Tensor, steps: Tensor) -> Tensor:
    """Weights for `blend_` that adjust the brightness, contrast or saturation of images as torchvision does.

    Args:
        factors: Factors of the steps; 1 does not change an image.
        steps: The steps, as positions in `BLENDS`.

    Shape:
        factors, steps: (…); result: (3, …).
    """
    greys = [(1 - factors) * (steps == BLENDS.index(name)) for name in ("saturation", "contrast")]
    return torch.stack([factors, *greys])


def blend_(images: Tensor, own: Tensor, grey: Tensor, mean: Tensor) -> Tensor:
    """Replace each value x by own·x + grey·g + mean·ḡ, with the pixel's grey value g and the image's mean ḡ of g.

    Brightness, contrast and saturation are three choices of the weights (see `blend_weights`), so one pass suffices
    for a batch whose images take different ones of these steps.

    Args:
        images: The images.
        own: Weight of each image's own values.
        grey: Weight of the grey values. It has no effect on images with other than three channels.
        mean: Weight of their mean.

    Shape:
        images: (N, C, H, W); own, grey, mean: (N,).
    """
    own, grey, mean = (each.view(-1, 1, 1, 1) for each in (own, grey, mean))
    values = luma(images)
    average = values.mean((2, 3), keepdim=True)
    if images.shape[1] != 3:
        own, grey = own + grey, torch.zeros_like(grey)
    rest = values.mul_(grey).add_(average.mul_(mean))
    return torch.addcmul(rest, images, own, out=images).clamp_(0, 1)


def adjust_hue_(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue by a fraction of the colour circle, −1/2 … 1/2. Only images of three channels are changed.

    With V and v the largest and smallest channel, c = V − v, and the hue h in sextants (0 ≤ h < 6), the colour with
    hue h is v + c·t, where t is clamp(|h − 3| − 1), clamp(2 − |h − 2|), clamp(2 − |h − 4|) for R, G, B and clamp is
    to [0, 1]. This equals RGB → HSV → RGB without computing the saturation, which does not change.

    Args:
        images: The images.
        shift: Fraction of the colour circle for each image, (N,).
    """
    if images.shape[1] == 3:
        # Of all steps, this one has the most operations, so on a CPU its eight planes are to fit in a core's cache.
        values = math.prod(images.shape[1:])
        part = max(1, CPU_PART // values if images.device.type == "cpu" else len(images))
        for start in range(0, len(images), part):
            _rotate_hue_(images[start : start + part], shift[start : start + part])
    return images


def _rotate_hue_(images: Tensor, shift: Tensor) -> None:
    red, green, blue = images.unbind(1)
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = high - low
    # The hue times c, in sextants. Interpolation with weights 0 and 1 selects exactly, and is several times as fast
    # as `where` on a CPU.
    chosen = torch.empty_like(high)
    hue = red.sub(green).add_(chroma, alpha=4)
    hue.lerp_(blue.sub(red).add_(chroma, alpha=2), torch.eq(high, green, out=chosen))
    hue.lerp_(green.sub(blue), torch.eq(high, red, out=chosen))
    # A grey pixel has no hue: its colour term is c·t = 0. One turn more keeps the sum positive.
    turns = torch.addcdiv(shift.view(-1, 1, 1) + 1, hue, chroma.clamp(min=1e-12), value=1 / 6, out=hue)
    hue = turns.frac_().mul_(6)
    torch.sub(hue, 3, out=red).abs_().sub_(1)
    torch.sub(2, torch.sub(hue, 2, out=green).abs_(), out=green)
    torch.sub(2, torch.sub(hue, 4, out=blue).abs_(), out=blue)
    torch.addcmul(low.unsqueeze(1), images.clamp_(0, 1), chroma.unsqueeze(1), out=images)


def solarize_(images: Tensor, threshold: float) -> Tensor:
    """Invert all values at or above the threshold."""
    return images.copy_(torch.where(images >= threshold, 1 - images, images))


def rotate90(images: Tensor, quarter_turns: Tensor) -> Tensor:
    """Rotate each image counter-clockwise by a multiple of 90°, the pretext task of RotNet.

    Args:
        images: Square images of any dtype, on any device.
        quarter_turns: Number of quarter turns of each image, modulo 4.

    Shape:
        images: (N, C, S, S); quarter_turns: (N,) int; result: as images.

    Raises:
        ValueError: The images are not square, or there is not one number of turns per image.

    Reference:
        Gidaris, Singh, Komodakis: Unsupervised Representation Learning by Predicting Image Rotations, 2018.

    Example:
        >>> import torch
        >>> from atoll.data.views.views import rotate90
        >>> rotate90(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([1]))  # a quarter turn, anticlockwise
        tensor([[[[2, 4],
                  [1, 3]]]])
    """
    if images.ndim != 4 or images.shape[2] != images.shape[3] or quarter_turns.shape != images.shape[:1]:
        raise ValueError(
            "rotate90 needs square images (N, C, S, S) and one number of turns for each, (N,); got "
            f"{tuple(images.shape)} and {tuple(quarter_turns.shape)}"
        )
    turned = images.clone()
    for turns in (1, 2, 3):
        chosen = (quarter_turns % 4 == turns).nonzero().squeeze(1).to(images.device)
        turned[chosen] = torch.rot90(images[chosen], turns, (2, 3))
    return turned
