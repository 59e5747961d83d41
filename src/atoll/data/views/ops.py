"""Batched image operations with a parameter of its own for every image.

Each operation is torchvision's per-image tensor transform, applied to a whole batch at once: the same
formulas, the same clamping to [0, 1] after every step, so that at equal parameters the two agree to float
rounding. Images are float32, (N, C, H, W), in [0, 1]. A name that ends in an underscore changes its images in
place, as in PyTorch.

Cropping, resizing, flipping, shifting and blurring are all linear and separable, so each is one small matrix
per image and axis, and `separable` applies any of them with two batched matrix products.
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
    # Keys' cubic with a = −1/2, the one that Pillow and PyTorch's antialiased resize use.
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


FILTERS = {"bilinear": _triangle, "bicubic": _cubic}


def resize_matrix(
    start: Tensor, extent: Tensor, source: int, positions: Tensor, interpolation: str = "bilinear"
) -> Tensor:
    """The antialiased resampling of one axis of every image's crop, as a matrix.

    The crop of image i covers the source pixels [start_i, start_i + extent_i); it is resized to S pixels, and
    row s of the matrix yields pixel ``positions[i, s]`` of those. So positions in reverse order are a flip,
    and shifted ones a shift. Output pixel p has its centre at start + (p + 1/2)·extent/S, and the filter is
    stretched by extent/S when that shrinks the image (the antialiasing of Pillow and of
    ``torch.nn.functional.interpolate``).

    Args:
        start: first source pixel of each crop.
        extent: source pixels of each crop.
        source: source pixels in all.
        positions: the output pixels that are wanted, each in 0 … S−1.
        interpolation: ``"bilinear"`` or ``"bicubic"``.

    Shape:
        start, extent: (N,); positions: (N, S); result: (N, S, source), rows sum to 1.

    Raises:
        UserError: the interpolation is unknown.
    """
    if interpolation not in FILTERS:
        raise UserError(
            f"views.interpolation {interpolation!r} is unknown; {did_you_mean(interpolation, FILTERS)}"
        )
    scale = (extent / positions.shape[1])[:, None]
    centre = torch.addcmul(start[:, None].float(), positions + 0.5, scale)
    pixel = torch.arange(source, device=start.device)
    distance = (pixel + 0.5 - centre[:, :, None]).abs_().div_(scale.clamp(min=1)[:, :, None])
    outside = (pixel < start[:, None]) | (pixel >= (start + extent)[:, None])
    weight = FILTERS[interpolation](distance).masked_fill_(outside[:, None], 0)
    return weight.div_(weight.sum(2, keepdim=True))


def blur_matrix(sigma: Tensor, kernel: int, size: int) -> Tensor:
    """Gaussian blur of one axis, with reflected borders, as a matrix.

    Shape:
        sigma: (N,); result: (N, size, size), rows sum to 1.

    Raises:
        ValueError: the kernel is even, or reaches further than the reflected image.
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
    spread = F.one_hot(source, size).float()  # (kernel, size, size): where each tap falls for each pixel
    return (tap @ spread.flatten(1)).view(-1, size, size)


def reflect(positions: Tensor, size: int) -> Tensor:
    """Positions folded into 0 … size−1 about the centres of the border pixels, as padding ``"reflect"``."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Each image X of each channel becomes (rows) X (columns)ᵀ.

    Shape:
        images: (N, C, H, W); rows: (N, S, H); columns: (N, T, W); result: (N, C, S, T).
    """
    n, channels, height, width = images.shape
    half = torch.bmm(images.reshape(n, channels * height, width), columns.transpose(1, 2))
    half = half.view(n, channels, height, columns.shape[1])
    # The channels share their image's matrix, so each is a product of its own; laid out with the channels
    # first, all of these are batched products that need no copy.
    result = images.new_empty(channels, n, rows.shape[1], columns.shape[1])
    for channel in range(channels):
        torch.bmm(rows, half[:, channel], out=result[channel])
    return result.transpose(0, 1)


def luma(images: Tensor) -> Tensor:
    """The grey value of every pixel.

    Shape:
        images: (N, 3, H, W); result: (N, 1, H, W).
    """
    red, green, blue = images.unbind(1)
    grey = red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return grey.unsqueeze(1)


def grayscale_(images: Tensor) -> Tensor:
    """Every channel becomes the grey value. Images of one channel stay as they are."""
    return images if images.shape[1] == 1 else images.copy_(luma(images))


def adjust_brightness_(images: Tensor, factor: Tensor) -> Tensor:
    """Images times their factors, (N,)."""
    return images.mul_(factor.view(-1, 1, 1, 1)).clamp_(0, 1)


def adjust_contrast_(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's own mean grey: factor·x + (1 − factor)·mean."""
    mean = images.mean((2, 3))
    if images.shape[1] == 3:
        mean = (mean * mean.new_tensor(LUMA)).sum(1, keepdim=True)
    rest = mean * (1 - factor)[:, None]
    return images.mul_(factor.view(-1, 1, 1, 1)).add_(rest[:, :, None, None]).clamp_(0, 1)


def adjust_saturation_(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with each pixel's grey. Images of one channel stay as they are."""
    if images.shape[1] == 1:
        return images
    factor = factor.view(-1, 1, 1, 1)
    rest = luma(images).mul_(1 - factor)
    return images.mul_(factor).add_(rest).clamp_(0, 1)


def adjust_hue_(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by a part of the colour circle, −1/2 … 1/2. Images of one channel stay as they are.

    With V and v the largest and smallest channel, c = V − v, and the hue h counted in sextants (0 ≤ h < 6),
    the colour of hue h is v + c·t, where t is clamp(|h − 3| − 1), clamp(2 − |h − 2|), clamp(2 − |h − 4|) for
    R, G, B and clamp is to [0, 1]. This is RGB → HSV → RGB without the detour over saturation, which a turn
    leaves alone.
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = high - low
    per_chroma = chroma.clamp(min=1e-12).reciprocal_()  # a grey pixel has no hue: its colour term is c·t = 0
    # Interpolation with weights 0 and 1 chooses exactly, and on a CPU several times as fast as `where`.
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
    """Invert the values that reach the threshold."""
    return images.copy_(torch.where(images >= threshold, 1 - images, images))


def rotate90(images: Tensor, quarter_turns: Tensor) -> Tensor:
    """Turn each image counter-clockwise by its own multiple of 90°, the pretext task of RotNet.

    Args:
        images: square images of any dtype, on any device.
        quarter_turns: a whole number for each image, taken modulo 4.

    Shape:
        images: (N, C, S, S); quarter_turns: (N,) int; result: as images.

    Raises:
        ValueError: the images are not square, or the turns are not one for each image.

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
            "rotate90 needs square images (N, C, S, S) and one turn for each, (N,); got "
            f"{tuple(images.shape)} and {tuple(quarter_turns.shape)}"
        )
    turned = images.clone()
    for turns in (1, 2, 3):
        chosen = (quarter_turns % 4 == turns).nonzero().squeeze(1).to(images.device)
        turned[chosen] = torch.rot90(images[chosen], turns, (2, 3))
    return turned
