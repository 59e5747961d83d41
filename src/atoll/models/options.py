"""The recipe's ``[model]`` section, and the encoders that it can select."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from atoll.core.config import Options
from atoll.core.errors import UserError, warn
from atoll.core.given import PREFIX, Given
from atoll.core.imports import search
from atoll.core.schema import AtLeast, AtMost, Count, OneOf, OneOfOr, Width
from atoll.models.adapters import LORA_TARGETS
from atoll.models.cnn import FedCACNN, FedQuadCNN
from atoll.models.encoder import Encoder
from atoll.models.external import build_external, is_external, is_own_code
from atoll.models.resnet import RESNETS, STEMS, narrow_resnet, resnet
from atoll.models.vit import HEAD_WIDTH, MAEDecoder, ViT


@dataclass(frozen=True)
class ModelOptions(Options, section="model"):
    """The recipe's ``[model]`` section: the encoder and its heads.

    The papers' heads, ``hidden`` → ``dim``, with BatchNorm before each ReLU unless the table says otherwise:

    ========================  ==========================================================================
    SSD, FedU²                projector (2048,) → 512
    SimCLR of Dec-SSL         projector (512,) → 512
    SimCLR of L-DAWA, Barlow  projector () → 128, one linear layer
    Barlow Twins              projector (8192, 8192) → 8192, no bias
    BYOL, SimSiam of EasyFL   projector (4096,) → 2048; predictor (4096,)
    SimSiam of Dec-SSL        projector (2048, 2048) → 512, final norm plain; predictor (512,)
    MoCo v1; v2               projector () → 128; (512,) → 128, no norm
    FedX                      projector (256,) → 256, predictor (256,), both without norm
    Orchestra                 projector (512,) → 512, no bias, final norm plain
    MOON                      projector (512,) → 256, no norm
    SSD, Table 4              no projector
    ========================  ==========================================================================

    Attributes:
        encoder: ``"resnet18"``, ``"resnet34"``, ``"resnet50"``, ``"resnet-narrow"``, ``"fedquad-cnn"``,
            ``"fedca-cnn"`` or ``"vit-tiny"``; ``"timm:NAME"``, ``"hf:NAME"`` (Hugging Face's transformers), or
            ``"module:attribute"``, a class or function of your code that returns a module.
        stem: A ResNet's first layer: ``"cifar"`` (3×3, stride 1), ``"strided"`` (3×3, stride 2: four times as
            fast) or ``"standard"`` (7×7, stride 2, then a max-pool).
        width: Channels of the narrow ResNet's first stage (by default 16), or width of the ViT's tokens (by default
            192).
        depth: Number of blocks of the ViT; by default 12.
        patch: Side of the ViT's patches in pixels; by default 2.
        decoder_depth: Number of blocks of the masked autoencoder's decoder; by default 4.
        weights: Pretrained weights from which the encoder starts: a file (safetensors, or a state dict saved with
            ``torch.save``), ``"timm:NAME"``, ``"hf:NAME"`` or ``"torchvision:NAME"``. A file may name its tensors
            as any of these libraries does.
        weights_least: Minimum share of the encoder's weights that ``weights`` must provide.
        freeze: Patterns over the names of weights, such as ``"encoder.layer1.*"``, that are neither trained nor
            sent. With adapters, the default is the whole encoder except its adapters.
        lora_rank: Rank r of low-rank adapters (LoRA, through peft) in the encoder; by default, it has no adapters.
        lora_alpha: α of the adapters, whose output is multiplied by α / r; by default r.
        lora_targets: Patterns over the names of the encoder's layers that get an adapter; by default the
            attention's projections, by their names in timm and Hugging Face.
        init: ``"random"``, or ``"torchvision"`` to start a ResNet-18, -34 or -50 from its ImageNet weights;
            deprecated, use ``weights = "torchvision:resnet18"``.
        projector: ``"mlp"``, or ``"none"`` to use the representation as the embedding.
        projector_hidden: Widths of the projector's hidden layers.
        projector_dim: Width of the embedding; by default the encoder's width.
        projector_norm: Apply BatchNorm before every ReLU of the projector.
        projector_final_norm: BatchNorm after the last layer: ``"none"``, ``"affine"`` or ``"plain"`` (no γ, β).
        projector_bias: Use a bias in the projector's linear layers.
        predictor_hidden: Widths of the predictor's hidden layers; its output is as wide as the embedding.
        predictor_norm: Apply BatchNorm before every ReLU of the predictor.

    Raises:
        UserError: A value is unknown, or the chosen encoder does not have an option.
    """

    encoder: Annotated[str, OneOfOr(ENCODERS, OTHERS)] = "resnet18"
    stem: Annotated[str, OneOf(STEMS)] = "cifar"
    width: Width | None = None
    depth: Count | None = None
    patch: Count | None = None
    decoder_depth: Count | None = None
    weights: str | None = None
    weights_least: Annotated[float, AtLeast(0), AtMost(1)] = 0.5
    freeze: tuple[str, ...] = ()
    lora_rank: Count | None = None
    lora_alpha: Count | None = None
    lora_targets: tuple[str, ...] = LORA_TARGETS
    init: Literal["random", "torchvision"] = "random"
    projector: Literal["mlp", "none"] = "mlp"
    projector_hidden: tuple[Width, ...] = (2048,)
    projector_dim: Width | None = None
    projector_norm: bool = True
    projector_final_norm: Literal["none", "affine", "plain"] = "none"
    projector_bias: bool = True
    predictor_hidden: tuple[Width, ...] = (512,)
    predictor_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        reads = kind_of(self.encoder).reads
        for field in fields(self):
            if field.name in ENCODER_OPTIONS - reads and getattr(self, field.name) != field.default:
                having = sorted(name for name, kind in ENCODERS.items() if field.name in kind.reads)
                default = "" if field.default is None else f" to its default, {field.default!r}"
                raise UserError(
                    f"model.{field.name} does not apply to {self.encoder!r}; reset it{default} "
                    f"(--set model.{field.name}=), or choose model.encoder from {', '.join(having)}"
                )
        if self.init != "random":
            warn(
                f"model.init is now model.weights = 'torchvision:{self.encoder}'; it will be removed in 0.3",
                DeprecationWarning,
            )
        if self.encoder == "vit-tiny" and self.width is not None and self.width % HEAD_WIDTH:
            raise UserError(
                f"model.width is {self.width}; for a ViT, choose a multiple of {HEAD_WIDTH}, the width of a head"
            )


@dataclass(frozen=True)
class EncoderKind:
    """How to build one kind of encoder, and which options it reads.

    Attributes:
        build: Function (options, channels, image size) → newly initialised encoder.
        reads: Names of the encoder options that it reads; other encoder options are refused.
        smallest: Minimum side of the images in pixels.
    """

    build: Callable[[ModelOptions, int, int], Encoder]
    reads: frozenset[str]
    smallest: int = 4


def _resnet(options: ModelOptions, channels: int, image_size: int) -> Encoder:
    return resnet(options.encoder, options.stem, channels, options.init)


def _narrow(options: ModelOptions, channels: int, image_size: int) -> Encoder:
    return narrow_resnet(options.stem, options.width or 16, channels)


def _vit(options: ModelOptions, channels: int, image_size: int) -> Encoder:
    return ViT(channels, image_size, options.patch or 2, options.width or 192, options.depth or 12)


def _external(options: ModelOptions, channels: int, image_size: int) -> Encoder:
    return build_external(options.encoder, channels, image_size)


_EXTERNAL = EncoderKind(_external, frozenset(), smallest=1)
_RESNET = EncoderKind(_resnet, frozenset({"stem", "init"}))
OTHERS = "timm:NAME, hf:NAME or module:attribute, such as torchvision.models:resnet101"
ENCODERS = {
    **dict.fromkeys(RESNETS, _RESNET),
    "resnet-narrow": EncoderKind(_narrow, frozenset({"stem", "width"})),
    "fedquad-cnn": EncoderKind(lambda options, channels, image_size: FedQuadCNN(channels), frozenset()),
    "fedca-cnn": EncoderKind(
        lambda options, channels, image_size: FedCACNN(channels), frozenset(), smallest=16
    ),
    "vit-tiny": EncoderKind(_vit, frozenset({"width", "depth", "patch", "decoder_depth"})),
}
ENCODER_OPTIONS = frozenset[str]().union(*(kind.reads for kind in ENCODERS.values()))


def kind_of(encoder: str) -> EncoderKind:
    """How to build the encoder of this name."""
    return _EXTERNAL if is_external(encoder) else ENCODERS[encoder]


def build_encoder(options: ModelOptions, channels: int, image_size: int) -> Encoder:
    """Build an encoder with new initial weights from torch's default generator, which the caller seeds.

    Args:
        options: The recipe's ``[model]`` section.
        channels: Number of channels of the images.
        image_size: Side of the images in pixels.

    Raises:
        UserError: The images do not fit the encoder, or torchvision's weights are not available.

    Example:
        >>> import torch
        >>> from atoll.models import ModelOptions, build_encoder
        >>> encoder = build_encoder(ModelOptions(encoder="resnet-narrow"), channels=1, image_size=8)
        >>> encoder(torch.zeros(4, 1, 8, 8)).shape
        torch.Size([4, 128])
    """
    kind = kind_of(options.encoder)
    if image_size < kind.smallest:
        raise UserError(
            f"{options.encoder!r} needs images of side {kind.smallest} or more, and these have {image_size}; "
            "enlarge them or choose another model.encoder"
        )
    encoder = kind.build(options, channels, image_size)
    if is_external(options.encoder):
        return encoder
    # The encoder's architecture does not depend on the initial weights or the decoder.
    shaping = kind.reads - {"init", "decoder_depth"}
    encoder.spec = {
        "encoder": options.encoder,
        "channels": channels,
        "image_size": image_size,
        **{name: getattr(options, name) for name in sorted(shaping)},
    }
    return encoder


def rebuild_encoder(spec: dict[str, Any], given: Given | None = None) -> Encoder:
    """Build a newly initialised encoder of the architecture that an encoder's ``spec`` describes.

    Args:
        spec: The attribute of an encoder.
        given: The object that the encoder was given as, if it was.

    Raises:
        MissingEncoderError: The object, or the library of the encoder, is missing.

    Example:
        >>> from atoll.models import ModelOptions, build_encoder, rebuild_encoder
        >>> encoder = build_encoder(ModelOptions(encoder="resnet-narrow"), channels=1, image_size=8)
        >>> rebuild_encoder(encoder.spec).dim == encoder.dim
        True
    """
    if is_external(spec["encoder"]):
        own = spec["encoder"].startswith(PREFIX) or is_own_code(spec["encoder"])
        name = given if given is not None and own else spec["encoder"]
        search([name] if is_own_code(name) else [], (), keep=True)  # the file may come from elsewhere
        return build_external(name, spec["channels"], spec["image_size"], spec.get("config"))
    options = {name: value for name, value in spec.items() if name not in ("channels", "image_size")}
    return build_encoder(ModelOptions(**options), spec["channels"], spec["image_size"])


def build_mae_decoder(options: ModelOptions, encoder: Encoder) -> MAEDecoder:
    """Build the masked autoencoder's decoder for an encoder.

    Raises:
        UserError: The encoder is not a vision transformer, so there are no patches to mask.

    Example:
        >>> import torch
        >>> from atoll.models import ModelOptions, build_encoder, build_mae_decoder
        >>> options = ModelOptions(encoder="vit-tiny", width=64, depth=1, patch=4)
        >>> build_mae_decoder(options, build_encoder(options, channels=1, image_size=8)).__class__.__name__
        'MAEDecoder'
    """
    if not isinstance(encoder, ViT):
        raise UserError(
            f"a masked autoencoder needs patches, and model.encoder is {options.encoder!r}; "
            "set model.encoder = 'vit-tiny'"
        )
    return MAEDecoder(encoder, options.decoder_depth or 4)
