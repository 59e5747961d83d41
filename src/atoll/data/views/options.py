"""Options of augmented views: the settings, the papers' presets, and the recipe's ``[views]`` section."""

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
    """All parameters of a view, in the order of the operations. The defaults disable all operations.

    `ViewOptions` documents each parameter; with ``crop_scale`` None there is no random resized crop.
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
    local_scale: ShareRange = (0.05, 0.4)
    mean: Means = (0.0,)
    std: Deviations = (1.0,)

    def __post_init__(self) -> None:
        """Refuse invalid values.

        Raises:
            UserError: A value is invalid; the message names the setting and its valid values.
        """
        super().__post_init__()
        if self.blur_kernel and self.blur_kernel % 2 == 0:
            raise UserError(
                f"views.blur_kernel is {self.blur_kernel}; it must be 0 (a tenth of the image) or an odd number"
            )


_CIFAR_MEAN = (0.4914, 0.4822, 0.4465)

# SimCLR on CIFAR-10 (Chen et al. 2020, appendix B.9): crop, flip, and colour distortion at half strength, including
# grayscale; no blur at 32×32.
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
# The same at full colour strength, on values in [0, 1], as in EasyFL, from which SSD's code takes it.
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
    # SimCLR on ImageNet: full strength, and a blur with a kernel of a tenth of the image.
    "simclr-imagenet": replace(_STRONG, blur=0.5),
    "easyfl": _STRONG,
    "ssd": _STRONG,
    "fedu2": replace(_STRONG, crop_scale=(0.2, 1.0)),
    "dec-ssl": replace(_SIMCLR, mean=_CIFAR_MEAN, std=(0.2023, 0.1994, 0.2010)),
    # Its code uses Pillow's Gaussian blur, which has no cut-off; three standard deviations on each side are enough.
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
    # DINO's first view always blurs, its second seldom, and solarizes; a recipe has one preset for both.
    "dino": replace(
        _SIMCLR,
        crop_scale=(0.4, 1.0),
        interpolation="bicubic",
        saturation=0.2,
        blur=0.5,
        solarize=0.1,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
    # Crop after padding, and flip; the colour jitter of its code has strength 0.
    "fedx": ViewSettings(
        pad_crop=4,
        flip=0.5,
        mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
        std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
    ),
    # The text names SimCLR's four operations (crop, colour distortion, flip, blur) without numbers; these are
    # SimCLR's.
    "fedca": replace(_STRONG, blur=0.5),
    "mae": ViewSettings(mean=(0.5,), std=(0.5,)),
    # Fine-tuning in SSD's protocol.
    "finetune": ViewSettings(crop_scale=(0.64, 1.0), crop_ratio=(1.0, 1.0), flip=0.5),
    # Our choice: no flip, because a mirrored digit is another symbol or none, and no small crops, because a
    # small crop of a 9 may look like a 0.
    "digits": ViewSettings(
        crop_scale=(0.5, 1.0),
        crop_ratio=(0.8, 1.25),
        pad_crop=1,
        jitter=0.8,
        brightness=0.4,
        contrast=0.4,
        local_scale=(0.25, 0.5),
    ),
}


@dataclass(frozen=True)
class ViewOptions(Options, section="views"):
    """The recipe's ``[views]`` section: a preset, and changes to it. None keeps the preset's value.

    Attributes:
        preset: Name of a preset.
        size: Side of the views in pixels; by default that of the stored images.
        crop_scale: Range of the share of the image's area that a random resized crop covers.
        crop_ratio: Range of the width-to-height ratio of that crop, log-uniform.
        interpolation: ``"bilinear"`` or ``"bicubic"``, both antialiased.
        pad_crop: Pad by this many reflected pixels, then crop back to the same size at random.
        flip: Probability of a horizontal flip.
        jitter: Probability of colour jitter; its four steps are applied in a random order for each image.
        brightness: Strength b of the brightness jitter: the factor is drawn from [max(0, 1 − b), 1 + b].
        contrast: Strength of the contrast jitter, like ``brightness``.
        saturation: Strength of the saturation jitter, like ``brightness``; no effect unless images have three
            channels.
        hue: Strength of the hue jitter, at most 1/2: the hue is rotated by a share of a full turn drawn from [−hue,
            hue]; no effect unless images have three channels.
        grayscale: Probability of the conversion to grey; no effect unless images have three channels.
        blur: Probability of a Gaussian blur.
        blur_sigma: Range of the blur's standard deviation in pixels, uniform.
        blur_kernel: Side of the blur's kernel in pixels, an odd number; 0 for a tenth of the image's side as in
            SimCLR, but at least 3.
        solarize: Probability of solarization, which inverts the values that reach the threshold.
        solarize_threshold: Threshold of the solarization, for values in [0, 1].
        local_size: Side of local crops in pixels, for methods that have them; by default that of the views. Smaller
            crops cost less.
        local_scale: Range of the share of the image's area that a local crop covers; the other operations on local
            crops are those of the views.
        mean: Mean that the last step subtracts; one value, or one for each channel.
        std: Standard deviation by which the last step divides; one value, or one for each channel.
        transform: Your own transform of one image, ``module:attribute``, in place of this section's operations;
            ``size``, ``mean``, ``std`` and the local crops still apply.
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
    local_size: Count | None = None
    local_scale: ShareRange | None = None
    mean: Means | None = None
    std: Deviations | None = None
    transform: str | None = None

    def __post_init__(self) -> None:
        """Refuse invalid values before any image is read.

        Raises:
            UserError: The preset is unknown, or a value is out of range.
        """
        super().__post_init__()
        if self.transform is not None and ":" not in self.transform:
            raise UserError(
                f"views.transform = {self.transform!r} names no code; set it to module:attribute, or remove it"
            )
        self.settings()

    def settings(self) -> ViewSettings:
        """Return the preset with this section's changes."""
        changes = {each.name: getattr(self, each.name) for each in fields(ViewSettings)}
        return replace(
            PRESETS[self.preset], **{name: value for name, value in changes.items() if value is not None}
        )
