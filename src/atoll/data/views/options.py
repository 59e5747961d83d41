"""What an augmented view is made of: the settings, the papers' presets, and a recipe's changes to them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated

from atoll.core.config import Options
from atoll.core.errors import UserError
from atoll.core.schema import Above, AtLeast, AtMost, Count, MinLength, OneOf, Positive, Rising
from atoll.data.views.ops import FILTERS

Range = Annotated[tuple[Positive, Positive], Rising()]
ShareRange = Annotated[tuple[Positive, Annotated[float, Above(0), AtMost(1)]], Rising()]
Probability = Annotated[float, AtLeast(0), AtMost(1, "a probability")]
Strength = Annotated[float, AtLeast(0)]
Turn = Annotated[float, AtLeast(0), AtMost(0.5)]
PixelCount = Annotated[int, AtLeast(0)]
Interpolation = Annotated[str, OneOf(FILTERS)]
Means = Annotated[tuple[float, ...], MinLength(1)]
Deviations = Annotated[tuple[Positive, ...], MinLength(1)]


@dataclass(frozen=True)
class ViewSettings(Options, section="views"):
    """Every parameter of a view, in the order in which the operations act. The defaults do nothing.

    `ViewOptions` says what each one does; ``crop_scale`` None is no such crop.
    """

    crop_scale: ShareRange | None = None
    crop_ratio: Range = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    pad_crop: PixelCount = 0
    flip: Probability = 0.0
    jitter: Probability = 0.0
    brightness: Strength = 0.0
    contrast: Strength = 0.0
    saturation: Strength = 0.0
    hue: Turn = 0.0
    grayscale: Probability = 0.0
    blur: Probability = 0.0
    blur_sigma: Range = (0.1, 2.0)
    blur_kernel: PixelCount = 0
    solarize: Probability = 0.0
    solarize_threshold: float = 128 / 255
    mean: Means = (0.0,)
    std: Deviations = (1.0,)

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            UserError: Naming the setting and what it may be.
        """
        super().__post_init__()
        if self.blur_kernel and self.blur_kernel % 2 == 0:
            raise UserError(
                f"views.blur_kernel is {self.blur_kernel}; it must be 0 (a tenth of the image) or an odd number"
            )


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
class ViewOptions(Options, section="views"):
    """The ``[views]`` section of a recipe: a preset, and what differs from it. None: as the preset says.

    Attributes:
        preset: A preset's name.
        size: Side of the views in pixels; none: that of the stored images.
        crop_scale: Share of the image's area that a random resized crop covers: low and high.
        crop_ratio: Width over height of that crop, log-uniform.
        interpolation: ``"bilinear"`` or ``"bicubic"``, both antialiased.
        pad_crop: Pad by this many reflected pixels, then crop back to the same size at random.
        flip: Probability of a horizontal flip.
        jitter: Probability of colour jitter; its four steps come in a random order for every image.
        brightness: b: the factor is drawn from [max(0, 1 − b), 1 + b].
        contrast: As brightness.
        saturation: As brightness; does nothing to images of one channel.
        hue: Turn drawn from [−hue, hue], at most 1/2; does nothing to images of one channel.
        grayscale: Probability of losing all colour; does nothing to images of one channel.
        blur: Probability of a Gaussian blur.
        blur_sigma: Its standard deviation in pixels, uniform.
        blur_kernel: Its kernel's size, odd; 0 takes a tenth of the image as SimCLR does, and at least 3.
        solarize: Probability of inverting the values that reach the threshold.
        solarize_threshold: That threshold, on [0, 1].
        mean: Subtracted at the end; one value, or one for each channel.
        std: Divided by at the end; one value, or one for each channel.
    """

    preset: Annotated[str, OneOf(PRESETS)] = "simclr"
    size: Count | None = None
    crop_scale: ShareRange | None = None
    crop_ratio: Range | None = None
    interpolation: Interpolation | None = None
    pad_crop: PixelCount | None = None
    flip: Probability | None = None
    jitter: Probability | None = None
    brightness: Strength | None = None
    contrast: Strength | None = None
    saturation: Strength | None = None
    hue: Turn | None = None
    grayscale: Probability | None = None
    blur: Probability | None = None
    blur_sigma: Range | None = None
    blur_kernel: PixelCount | None = None
    solarize: Probability | None = None
    solarize_threshold: float | None = None
    mean: Means | None = None
    std: Deviations | None = None

    def __post_init__(self) -> None:
        """Refuse what means nothing, before any image is read.

        Raises:
            UserError: An unknown preset, or a value out of its range.
        """
        super().__post_init__()
        self.settings()

    def settings(self) -> ViewSettings:
        """The preset with this section's changes."""
        changes = {each.name: getattr(self, each.name) for each in fields(ViewSettings)}
        return replace(
            PRESETS[self.preset], **{name: value for name, value in changes.items() if value is not None}
        )
