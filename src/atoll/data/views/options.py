"""What an augmented view is made of: the settings, the papers' presets, and a recipe's changes to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from atoll.core.errors import UserError, did_you_mean
from atoll.data.views.ops import FILTERS

Range = tuple[float, float]

_Rule = tuple[Callable[[Any], bool], str]

_PROBABILITY: _Rule = (lambda p: 0 <= p <= 1, "a probability in [0, 1]")
_STRENGTH: _Rule = (lambda strength: 0 <= strength < math.inf, "0 or more")
_RANGE: _Rule = (
    lambda ends: len(ends) == 2 and 0 < ends[0] <= ends[1] < math.inf,
    "two numbers, 0 < low <= high",
)

_RULES: dict[str, _Rule] = {
    "crop_scale": (
        lambda share: share is None or (_RANGE[0](share) and share[1] <= 1),
        "two numbers, 0 < low <= high <= 1",
    ),
    "crop_ratio": _RANGE,
    "interpolation": (lambda kind: kind in FILTERS, " or ".join(map(repr, FILTERS))),
    "pad_crop": (lambda pixels: pixels >= 0, "0 or more"),
    "flip": _PROBABILITY,
    "jitter": _PROBABILITY,
    "brightness": _STRENGTH,
    "contrast": _STRENGTH,
    "saturation": _STRENGTH,
    "hue": (lambda turn: 0 <= turn <= 0.5, "between 0 and 0.5"),
    "grayscale": _PROBABILITY,
    "blur": _PROBABILITY,
    "blur_sigma": _RANGE,
    "blur_kernel": (
        lambda size: size == 0 or (size > 0 and size % 2 == 1),
        "0 (a tenth of the image) or an odd number",
    ),
    "solarize": _PROBABILITY,
    "mean": (
        lambda values: len(values) > 0 and all(map(math.isfinite, values)),
        "a number, or one for each channel",
    ),
    "std": (
        lambda values: len(values) > 0 and all(0 < value < math.inf for value in values),
        "a positive number, or one for each channel",
    ),
}


@dataclass(frozen=True)
class ViewSettings:
    """Every parameter of a view, in the order in which the operations act. The defaults do nothing.

    Attributes:
        crop_scale: share of the image's area that a random resized crop covers; None for no such crop.
        crop_ratio: width over height of that crop, log-uniform.
        interpolation: ``"bilinear"`` or ``"bicubic"``, both antialiased.
        pad_crop: pad by this many reflected pixels, then crop back to the same size at random.
        flip: probability of a horizontal flip.
        jitter: probability of colour jitter; its four steps come in a random order for every image.
        brightness: factor drawn from [max(0, 1 − b), 1 + b].
        contrast: as brightness.
        saturation: as brightness; does nothing to images of one channel.
        hue: turn drawn from [−hue, hue], at most 1/2; does nothing to images of one channel.
        grayscale: probability of losing all colour; does nothing to images of one channel.
        blur: probability of a Gaussian blur.
        blur_sigma: its standard deviation in pixels, uniform.
        blur_kernel: its kernel's size, odd; 0 takes a tenth of the image as SimCLR does, and at least 3.
        solarize: probability of inverting the values that reach the threshold.
        solarize_threshold: that threshold, on [0, 1].
        mean: subtracted at the end; one value, or one for each channel.
        std: divided by at the end; one value, or one for each channel.
    """

    crop_scale: Range | None = None
    crop_ratio: Range = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    pad_crop: int = 0
    flip: float = 0.0
    jitter: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    grayscale: float = 0.0
    blur: float = 0.0
    blur_sigma: Range = (0.1, 2.0)
    blur_kernel: int = 0
    solarize: float = 0.0
    solarize_threshold: float = 128 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            UserError: naming the setting and what it may be.
        """
        for name, (holds, rule) in _RULES.items():
            _require(holds(getattr(self, name)), name, getattr(self, name), rule)


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise UserError(f"views.{name} is {value!r}; it must be {rule}")


_CIFAR_MEAN = (0.4914, 0.4822, 0.4465)

# SimCLR on CIFAR-10 (Chen et al. 2020, appendix B.9): crop, flip, and colour distortion at half strength, the
# grayscale being part of that; no blur at 32×32.
_SIMCLR = ViewSettings(
    crop_scale=(0.08, 1.0),
    flip=0.5,
    jitter=0.8,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
    grayscale=0.2,
)
# The same at full colour strength, on values in [0, 1]: EasyFL's, and after it SSD's.
_STRONG = replace(_SIMCLR, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2)
# One view of Orchestra; the other blurs less often and solarizes.
_ORCHESTRA = replace(
    _SIMCLR,
    crop_scale=(0.5, 1.0),
    interpolation="bicubic",
    saturation=0.2,
    blur=0.5,
    blur_kernel=3,
    mean=(0.5,),
    std=(0.5,),
)

PRESETS: dict[str, ViewSettings] = {
    "none": ViewSettings(),
    "simclr": _SIMCLR,
    # SimCLR on ImageNet: full strength, and a blur over a tenth of the image.
    "simclr-imagenet": replace(_STRONG, blur=0.5),
    "easyfl": _STRONG,
    "ssd": _STRONG,
    "fedu2": replace(_STRONG, crop_scale=(0.2, 1.0)),
    "dec-ssl": replace(_SIMCLR, mean=_CIFAR_MEAN, std=(0.2023, 0.1994, 0.2010)),
    # Pillow's Gaussian blur, which its code calls, has no cut-off: three standard deviations to each side do.
    "l-dawa": replace(
        _SIMCLR,
        crop_scale=(0.2, 1.0),
        blur=0.5,
        blur_kernel=13,
        mean=(0.491, 0.482, 0.446),
        std=(0.247, 0.243, 0.261),
    ),
    "orchestra": _ORCHESTRA,
    "orchestra-second": replace(_ORCHESTRA, blur=0.1, solarize=0.2),
    # Crop after padding, and flip: its colour jitter has strength 0.
    "fedx": ViewSettings(
        pad_crop=4,
        flip=0.5,
        mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
        std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
    ),
    # The text names SimCLR's four, crop, colour distortion, flip and blur, and no numbers: SimCLR's.
    "fedca": replace(_STRONG, blur=0.5),
    "mae": ViewSettings(mean=(0.5,), std=(0.5,)),
    # Fine-tuning in SSD's protocol.
    "finetune": ViewSettings(crop_scale=(0.64, 1.0), crop_ratio=(1.0, 1.0), flip=0.5),
    # Ours: a mirrored digit is another sign or none, and a small crop of a 9 may be a 0.
    "digits": ViewSettings(
        crop_scale=(0.5, 1.0), crop_ratio=(0.8, 1.25), pad_crop=1, jitter=0.8, brightness=0.4, contrast=0.4
    ),
}


@dataclass(frozen=True)
class ViewOptions:
    """The ``[views]`` section of a recipe: a preset, and what differs from it. None: as the preset says.

    The fields are those of `ViewSettings`, which says what each one does; ``size`` is the side of the views,
    and None keeps that of the stored images.
    """

    preset: str = "simclr"
    size: int | None = None
    crop_scale: Range | None = None
    crop_ratio: Range | None = None
    interpolation: str | None = None
    pad_crop: int | None = None
    flip: float | None = None
    jitter: float | None = None
    brightness: float | None = None
    contrast: float | None = None
    saturation: float | None = None
    hue: float | None = None
    grayscale: float | None = None
    blur: float | None = None
    blur_sigma: Range | None = None
    blur_kernel: int | None = None
    solarize: float | None = None
    solarize_threshold: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what means nothing, before any image is read.

        Raises:
            UserError: an unknown preset, or a value out of its range.
        """
        if self.preset not in PRESETS:
            raise UserError(f"views.preset {self.preset!r} is unknown; {did_you_mean(self.preset, PRESETS)}")
        _require(self.size is None or self.size > 0, "size", self.size, "a positive number of pixels")
        for each in fields(self):
            if isinstance(getattr(self, each.name), list):  # TOML has lists where these are tuples
                object.__setattr__(self, each.name, tuple(getattr(self, each.name)))
        self.settings()

    def settings(self) -> ViewSettings:
        """The preset with this section's changes."""
        changes = {each.name: getattr(self, each.name) for each in fields(ViewSettings)}
        return replace(
            PRESETS[self.preset], **{name: value for name, value in changes.items() if value is not None}
        )
