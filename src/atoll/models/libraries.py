"""Networks of timm and Hugging Face, built with their configurations; published weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atoll.core.errors import UserError, did_you_mean
from atoll.core.extras import require
from atoll.core.text import first_line, plural

TIMM, HUGGING_FACE, TORCHVISION = "timm:", "hf:", "torchvision:"
# Where timm's models, and others, describe their input:
_CONFIGURATIONS = "pretrained_cfg", "default_cfg", "data_config"


class MissingEncoderError(UserError):
    """The library, the object or the code from which an encoder is built is missing."""


@dataclass(frozen=True)
class InputConfig:
    """The input that a network's own configuration describes; None for values that it does not contain.

    Attributes:
        size: Side of the images in pixels.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """

    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def for_channels(self, channels: int) -> InputConfig:
        """Return the same; if the images have another number of channels, with one averaged mean and std."""
        mean, std = (
            values if values is None or len(values) == channels else (sum(values) / len(values),)
            for values in (self.mean, self.std)
        )
        return InputConfig(self.size, mean, std)


def read_config(config: Mapping[str, Any]) -> InputConfig:
    """Read timm's form of a configuration: ``input_size`` (C, H, W), ``mean``, ``std``."""
    shape, mean, std = config.get("input_size"), config.get("mean"), config.get("std")
    return InputConfig(
        int(shape[-1]) if shape else None,
        tuple(map(float, mean)) if mean else None,
        tuple(map(float, std)) if std else None,
    )


def configured_input(source: Any) -> InputConfig | None:
    """Read a module's or factory's description of its input; None if it has none.

    Raises:
        UserError: The description does not have timm's form.
    """
    for attribute in _CONFIGURATIONS:
        config = getattr(source, attribute, None)
        if config is None:
            continue
        try:
            return read_config(config if isinstance(config, Mapping) else config.to_dict())
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"the encoder's {attribute} is {config!r}; it must be in timm's form, such as "
                '{"input_size": (3, 224, 224), "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}'
            ) from error
    return None


# timm


def _timm() -> Any:
    return require("timm", "timm", "the encoder timm:…", MissingEncoderError)


def _timm_config(name: str) -> Any:
    timm, known = _timm(), name.removeprefix(TIMM)
    if not timm.is_model(known):
        raise UserError(
            f"model.encoder = {name!r}: timm has no such model; {did_you_mean(known, timm.list_models())}"
        )
    try:
        return timm.models.get_pretrained_cfg(known)
    except RuntimeError as error:
        raise UserError(f"model.encoder = {name!r}: {first_line(error)}; leave the tag out") from None


def timm_input(name: str) -> InputConfig:
    """Read the configuration of the input of ``timm:NAME``."""
    return read_config(_timm_config(name).to_dict())


def timm_model(name: str, channels: int, size: int) -> nn.Module:
    """Build ``timm:NAME`` without its classifier."""
    config = _timm_config(name)
    sized = {"img_size": size} if config.fixed_input_size else {}
    create = partial(
        _timm().create_model, name.removeprefix(TIMM), pretrained=False, num_classes=0, in_chans=channels
    )
    try:
        try:  # a ViT interpolates its position embeddings for images of other sizes, such as local crops
            model: nn.Module = create(**sized, dynamic_img_size=True)
        except TypeError:
            model = create(**sized)
    except Exception as error:  # timm's models assert, or raise what their layers raise
        raise UserError(
            f"model.encoder = {name!r} cannot be built for images of side {size} with "
            f"{plural(channels, 'channel')} ({first_line(error)}); its own size is "
            f"{read_config(config.to_dict()).size}: set data.image_size"
        ) from error
    return model


def timm_weights(name: str) -> dict[str, Tensor]:
    """Download the pretrained weights of ``timm:NAME``, or read them from its cache."""
    _timm_config(name)
    model: nn.Module = _timm().create_model(name.removeprefix(TIMM), pretrained=True)
    return model.state_dict()


# Hugging Face


def _transformers() -> Any:
    return require("transformers", "hf", "the encoder hf:…", MissingEncoderError)


def _is_kind(known: str) -> bool:
    """Whether a name is a kind of model (``vit``), which has no files of its own, neither here nor on the hub."""
    return known in _transformers().CONFIG_MAPPING and not Path(known).is_dir()


def _hugging_face_config(name: str) -> Any:
    """The configuration of a folder, of a kind of model (``vit``), or of a name on the hub."""
    transformers, known = _transformers(), name.removeprefix(HUGGING_FACE)
    if _is_kind(known):
        return transformers.AutoConfig.for_model(known)
    try:
        return transformers.AutoConfig.from_pretrained(known)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.encoder = {name!r}: no folder and no name that transformers can read ({first_line(error)}); "
            "give a folder with config.json, a model's name on the hub, or a kind such as hf:vit"
        ) from None


def hugging_face_model(
    name: str, channels: int, size: int, config: Mapping[str, Any] | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Build ``hf:NAME``; return it with the entry of an encoder's ``spec`` that holds its configuration."""
    transformers = _transformers()
    if config is not None:
        given = {key: value for key, value in config.items() if key != "model_type"}
        made = transformers.AutoConfig.for_model(config["model_type"], **given)
    else:
        made = _hugging_face_config(name)
    try:
        made.num_channels = channels
        if hasattr(made, "image_size"):  # some have one for each axis
            axes = made.image_size if isinstance(made.image_size, list | tuple) else None
            made.image_size = size if axes is None else [size] * len(axes)
        model: nn.Module = transformers.AutoModel.from_config(made)
    except Exception as error:  # transformers' models raise what their layers raise
        raise UserError(
            f"model.encoder = {name!r} cannot be built for images of side {size} with "
            f"{plural(channels, 'channel')}: {first_line(error)}"
        ) from error
    return model, {"config": made.to_diff_dict()}


def hugging_face_input(name: str) -> InputConfig:
    """Read the configuration of the input of ``hf:NAME``; a kind of model has no mean and std."""
    size, known = getattr(_hugging_face_config(name), "image_size", None), name.removeprefix(HUGGING_FACE)
    size = size[-1] if isinstance(size, list | tuple) and size else size
    processor: dict[str, Any] = {}
    if not _is_kind(known):
        with suppress(ImportError, OSError, ValueError):
            from transformers.image_processing_base import ImageProcessingMixin

            processor = ImageProcessingMixin.get_image_processor_dict(known)[0]
    mean, std = processor.get("image_mean"), processor.get("image_std")
    return InputConfig(
        int(size) if isinstance(size, int) else None,
        tuple(map(float, mean)) if mean else None,
        tuple(map(float, std)) if std else None,
    )


def hugging_face_weights(name: str) -> dict[str, Tensor]:
    """Download the pretrained weights of ``hf:NAME``, or read them from a folder."""
    model: nn.Module = _transformers().AutoModel.from_pretrained(name.removeprefix(HUGGING_FACE))
    return model.state_dict()


# torchvision


def torchvision_weights(name: str) -> dict[str, Tensor]:
    """Download the pretrained weights of ``torchvision:NAME``, or read them from torch's cache."""
    import torchvision  # takes most of a second

    weights = torchvision.models.get_model_weights(name.removeprefix(TORCHVISION)).DEFAULT
    state: dict[str, Tensor] = weights.get_state_dict(progress=False)
    return state
