"""Batched image operations with separate parameters for every image.

Each operation applies torchvision's per-image tensor transform to a whole batch: it uses the same formulas and the
same clamping to [0, 1] after every step, so for equal parameters the results agree up to float rounding. Images are
float32, (N, C, H, W), in [0, 1]. A function whose name ends in an underscore changes its images in place, as in
PyTorch.

Cropping, resizing, flipping, shifting and blurring are linear and separable, so each is one small matrix per image
and axis, and `separable` applies any of them with two batched matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.core.errors import UserError, did_you_mean

LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601 weights of R, G and B, as torchvision and Pillow use them


def _triangle(x: Tensor) -> Tensor:
    return (1 - x).clamp_(min=0)


def _cubic(x: Tensor) -> Tensor:
    # Keys' cubic with a = −1/2, as in Pillow and in PyTorch's antialiased resize.
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


FILTERS = {"bilinear": _triangle, "bicubic": _cubic}


def resize_matrix(
    start: Tensor, extent: Tensor, source: int, positions: Tensor, interpolation: str = "bilinear"
) -> Tensor:
    """Matrix of the antialiased resampling of one axis of every image's crop.

    The crop of image i covers the source pixels [start_i, start_i + extent_i); it is resized to S pixels, and
    row s of the matrix computes pixel ``positions[i, s]`` of these. Positions in reverse order are therefore a
    flip, and shifted positions a shift. Output pixel p has its centre at start + (p + 1/2)·extent/S. If the crop is
    reduced in size, the filter is stretched by extent/S (the antialiasing of Pillow and of
    ``torch.nn.functional.interpolate``).

    Args:
        start: First source pixel of each crop.
        extent: Number of source pixels of each crop.
        source: Total number of source pixels.
        positions: The output pixels to compute, each in 0 … S−1.
        interpolation: ``"bilinear"`` or ``"bicubic"``.

    Shape:
        start, extent: (N,); positions: (N, S); result: (N, S, source), rows sum to 1.

    Raises:
        UserError: The interpolation is unknown.
    """
    if interpolation not in FILTERS:
        raise UserError(
            f"views.interpolation {interpolation!r} is unknown; {did_you_mean(interpolation, FILTERS)}"
        )
    scale = (extent / positions.shape[1])[:, None]
    centre = torch.addcmul(start[:, None].float(), positions + 0.5, scale)
    pixel = torch.arange(source, device=start.device)
    distance = (pixel + 0.5 - centre[:, :, None]).abs_().div_(scale.clamp(min=1)[:, :, None])
    inside = (pixel >= start[:, None]) & (pixel < (start + extent)[:, None])
    weight = FILTERS[interpolation](distance).mul_(inside[:, None])  # several times as fast as `masked_fill_`
    return weight.div_(weight.sum(2, keepdim=True))


def blur_matrix(sigma: Tensor, kernel: int, size: int) -> Tensor:
    """Matrix of the Gaussian blur of one axis, with reflected borders.

    Args:
        sigma: Standard deviation of each image's blur, in pixels.
        kernel: Width of the kernel in pixels, odd.
        size: Number of pixels of the axis.

    Shape:
        sigma: (N,); result: (N, size, size), rows sum to 1.

    Raises:
        ValueError: The kernel is even, or extends beyond the reflected image.
    """
    radius = kernel // 2
    if kernel % 2 == 0 or radius >= size:
        raise ValueError(
            f"a blur kernel must be odd and less than twice the image: kernel {kernel}, size {size}"
        )
    offset = torch.arange(-radius, radius + 1, device=sigma.device)
    tap = torch.exp(-0.5 * (offset / sigma[:, None]) ** 2)
    tap = tap / tap.sum(1, keepdim=True)
    source = reflect(torch.arange(size, device=sigma.device) + offset[:, None], size)
    spread = F.one_hot(source, size).float()  # (kernel, size, size): source pixel of each tap for each pixel
    return (tap @ spread.flatten(1)).view(-1, size, size)


def reflect(positions: Tensor, size: int) -> Tensor:
    """Reflect positions into 0 … size−1 at the centres of the border pixels, as the padding mode ``"reflect"``."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Compute (rows) X (columns)ᵀ for each channel X of each image.

    Args:
        images: The images.
        rows: Matrices of the vertical axis.
        columns: Matrices of the horizontal axis.

    Shape:
        images: (N, C, H, W); rows: (N, S, H); columns: (N, T, W); result: (N, C, S, T).
    """
    n, channels, height, width = images.shape
    half = torch.bmm(images.reshape(n, channels * height, width), columns.transpose(1, 2))
    half = half.view(n, channels, height, columns.shape[1])
    # The channels share the matrix of their image, so each channel is a separate product; with the channels as
    # the first dimension of the result, these are batched products without a copy.
    result = images.new_empty(channels, n, rows.shape[1], columns.shape[1])
    for channel in range(channels):
        torch.bmm(rows, half[:, channel], out=result[channel])
    return result.transpose(0, 1)


def luma(images: Tensor) -> Tensor:
    """Grey value of every pixel.

    Args:
        images: Colour images.

    Shape:
        images: (N, 3, H, W); result: (N, 1, H, W).
    """
    red, green, blue = images.unbind(1)
    grey = red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return grey.unsqueeze(1)


def grayscale_(images: Tensor) -> Tensor:
    """Replace every channel by the grey value. Images with other than three channels are not changed."""
    return images.copy_(luma(images)) if images.shape[1] == 3 else images


def adjust_brightness_(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply images by their factors, (N,)."""
    return images.mul_(factor.view(-1, 1, 1, 1)).clamp_(0, 1)


def adjust_contrast_(images: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with its mean grey value (the mean of all channels if they are not three)."""
    mean = images.mean((2, 3))
    if images.shape[1] == 3:
        mean = (mean * mean.new_tensor(LUMA)).sum(1, keepdim=True)
    elif images.shape[1] > 1:
        mean = mean.mean(1, keepdim=True)
    rest = mean * (1 - factor)[:, None]
    return images.mul_(factor.view(-1, 1, 1, 1)).add_(rest[:, :, None, None]).clamp_(0, 1)


def adjust_saturation_(images: Tensor, factor: Tensor) -> Tensor:
    """Blend each pixel with its grey value. Images with other than three channels are not changed."""
    if images.shape[1] != 3:
        return images
    factor = factor.view(-1, 1, 1, 1)
    rest = luma(images).mul_(1 - factor)
    return images.mul_(factor).add_(rest).clamp_(0, 1)


def adjust_hue_(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue by a fraction of the colour circle, −1/2 … 1/2. Only images of three channels are changed.

    With V and v the largest and smallest channel, c = V − v, and the hue h in sextants (0 ≤ h < 6), the colour with
    hue h is v + c·t, where t is clamp(|h − 3| − 1), clamp(2 − |h − 2|), clamp(2 − |h − 4|) for R, G, B and clamp is
    to [0, 1]. This equals RGB → HSV → RGB without computing the saturation, which does not change.

    Args:
        images: The images.
        shift: Fraction of the colour circle for each image, (N,).
    """
    if images.shape[1] != 3:
        return images
    red, green, blue = images.unbind(1)
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = high - low
    per_chroma = chroma.clamp(min=1e-12).reciprocal_()  # a grey pixel has no hue: its colour term is c·t = 0
    # Interpolation with weights 0 and 1 selects exactly, and is several times as fast as `where` on a CPU.
    chosen = torch.empty_like(high)
    hue = red.sub(green).mul_(per_chroma).add_(4)
    hue.lerp_(blue.sub(red).mul_(per_chroma).add_(2), torch.eq(high, green, out=chosen))
    hue.lerp_(green.sub(blue).mul_(per_chroma), torch.eq(high, red, out=chosen))
    turns = hue.div_(6).add_(shift.view(-1, 1, 1))
    hue = turns.sub_(turns.floor()).mul_(6)
    torch.sub(hue, 3, out=red).abs_().sub_(1)
    torch.sub(hue, 2, out=green).abs_().neg_().add_(2)
    torch.sub(hue, 4, out=blue).abs_().neg_().add_(2)
    return images.clamp_(0, 1).mul_(chroma.unsqueeze(1)).add_(low.unsqueeze(1))


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
