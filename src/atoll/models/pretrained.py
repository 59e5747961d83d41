"""Pretrained weights: their sources, and how they are fitted to an encoder with other names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.text import few, first_line
from atoll.models.encoder import Encoder
from atoll.models.files import input_of, read_weights
from atoll.models.libraries import (
    HUGGING_FACE,
    TIMM,
    TORCHVISION,
    InputConfig,
    hugging_face_input,
    hugging_face_weights,
    timm_input,
    timm_weights,
    torchvision_weights,
)
from atoll.models.names import common_names
from atoll.models.vit import resample_patches, resample_positions

IMAGENET = InputConfig(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
IMAGENET_CLASSES = (1000, 21841, 21843)
_HEADS = ("fc.weight", "head.weight", "classifier.weight", "classifier.1.weight")
_SHOWN = 4


@dataclass(frozen=True)
class Fit:
    """Which weights of a source fit an encoder.

    Attributes:
        source: File or name of the weights.
        loaded: Names of the encoder's tensors that the source provided.
        missing: Names of the encoder's other tensors.
        share: Share of the encoder's trained weights that the source provided.
        unused: Names of the source's tensors that the encoder does not have: those of a classifier's head, or of
            the deeper blocks of a larger architecture.
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    share: float
    unused: tuple[str, ...]

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.missing)
        return (
            f"{len(self.loaded)} of {total} tensors, {100 * self.share:.3g} % of the weights, came from "
            f"{self.source}{_named('missing', self.missing)}{_named('not used:', self.unused)}"
        )


def load_pretrained(encoder: Encoder, source: str, least: float = 0.5) -> Fit:
    """Initialise an encoder, in place, from pretrained weights.

    Tensor names of timm, torchvision, Hugging Face and DINOv2 are converted to a common form. A ViT's position
    embeddings are interpolated to the encoder's number of patches, and its patch embedding is fitted to the
    patches' size, as in timm (bicubic, antialiased). For images of one channel, the first layer's weights are
    summed over the channels.

    Args:
        encoder: The encoder.
        source: A file (safetensors, or a state dict of torch.save), ``timm:NAME``, ``hf:NAME`` or
            ``torchvision:NAME``.
        least: Minimum share of the encoder's trained weights that the source must provide.

    Raises:
        UserError: The weights cannot be read or downloaded, or provide less than ``least``.

    Example:
        >>> import torch, torchvision
        >>> from atoll.models import ModelOptions, build_encoder
        >>> from atoll.models.pretrained import load_pretrained
        >>> torch.save(torchvision.models.resnet18().state_dict(), "theirs.pth")
        >>> encoder = build_encoder(ModelOptions(encoder="resnet18", stem="standard"), channels=3, image_size=32)
        >>> print(load_pretrained(encoder, "theirs.pth"))
        120 of 120 tensors, 100 % of the weights, came from theirs.pth; not used: fc.weight, fc.bias
    """
    state = _read(source)
    fitted = fit(encoder.library_state(), state)
    target = encoder.library_state()
    trained = {name for name, _ in encoder.named_parameters()}
    prefix = "" if target.keys() == encoder.state_dict().keys() else "model."
    weights = {name: tensor.numel() for name, tensor in target.items() if prefix + name in trained}
    share = sum(weights.get(name, 0) for name in fitted) / max(sum(weights.values()), 1)
    used = {common for name in fitted for common in common_names(name)}
    found = Fit(
        source,
        tuple(name for name in target if name in fitted),
        tuple(name for name in target if name not in fitted),
        share,
        tuple(name for name in state if name not in fitted and used.isdisjoint(common_names(name))),
    )
    if share < least:
        raise UserError(
            f"model.weights fits the encoder too little: {found} (it has {', '.join(sorted(state)[:_SHOWN])}, …); "
            "choose weights of this architecture, or accept them with "
            f"model.weights_least = {math.floor(100 * share) / 100}"
        )
    with torch.no_grad():
        for name, tensor in fitted.items():
            target[name].copy_(tensor)
    return found


def fit(target: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Find the tensors of a state dict, with any library's names, that fit a network.

    Args:
        target: The network's state.
        state: The state to take from.

    Returns:
        For each name of ``target`` that was found, the tensor in the shape of ``target``.
    """
    offered = _pieces(state)
    found: dict[str, Tensor] = {}
    for name, wanted in target.items():
        if name in state and state[name].shape == wanted.shape:
            found[name] = state[name]
            continue
        common = common_names(name)
        parts = [offered[one] for one in common if one in offered]
        if len(parts) < len(common):
            continue
        tensor = _reshaped(common[0], torch.cat(parts) if len(parts) > 1 else parts[0], wanted)
        if tensor is not None:
            found[name] = tensor
    return found


def _named(what: str, names: tuple[str, ...]) -> str:
    """A clause that shows a few of some names; empty if there are none."""
    return f"; {what} {few(names, _SHOWN)}" if names else ""


def weights_input(source: str, guess: bool = True) -> InputConfig:
    """Size, mean and std of the images with which weights were trained, as far as the source specifies them.

    A file that Atoll wrote contains them. A classifier with ImageNet's number of classes, or DINOv2's names, imply
    ImageNet's statistics.

    Args:
        source: As for `load_pretrained`.
        guess: Whether to infer ImageNet's statistics from the classes or names of a file that does not contain any.
    """
    if source.startswith(TIMM):
        return timm_input(source)
    if source.startswith(HUGGING_FACE):
        return hugging_face_input(source)
    if source.startswith(TORCHVISION):
        return IMAGENET
    about = input_of(Path(source))
    if "mean" in about:
        return InputConfig(about.get("image_size"), tuple(about["mean"]), tuple(about["std"]))
    if not guess:
        return InputConfig()
    shapes = _shapes(Path(source))
    heads = [shape[0] for name, shape in shapes.items() if name.endswith(_HEADS) and len(shape) > 1]
    dino = any(name.endswith("mask_token") for name in shapes)
    return IMAGENET if dino or any(count in IMAGENET_CLASSES for count in heads) else InputConfig()


def _pieces(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their common names, without ambiguous names, which two tensors would share."""
    pieces: dict[str, Tensor] = {}
    shared: set[str] = set()
    for name, tensor in state.items():
        common = common_names(name)
        if len(common) == 3 and tensor.ndim == 0:
            continue  # the counter of a BatchNorm after an attention's joint projection, as in LeViT
        parts = tensor.chunk(3) if len(common) == 3 else (tensor,)
        shared |= pieces.keys() & common
        pieces.update(zip(common, parts, strict=True))
    return {name: tensor for name, tensor in pieces.items() if name not in shared}


def _reshaped(name: str, tensor: Tensor, wanted: Tensor) -> Tensor | None:
    """The tensor converted to the wanted shape; None if that is impossible."""
    if tensor.shape == wanted.shape:
        return tensor
    if name == "pos_embed" and tensor.ndim == wanted.ndim == 3 and tensor.shape[-1] == wanted.shape[-1]:
        return resample_positions(tensor, wanted.shape[1])
    if name == "patch_embed.proj.weight":
        return _patch_weights(tensor, wanted)
    if tensor.ndim == wanted.ndim == 4 and wanted.shape[1] == 1 and tensor.shape[1] == 3:
        summed = tensor.sum(1, keepdim=True)
        return summed if summed.shape == wanted.shape else None
    return None


def _patch_weights(tensor: Tensor, wanted: Tensor) -> Tensor | None:
    """A patch embedding converted to other patches, to grey images, or to a linear layer, as in Atoll's ViT."""
    if tensor.ndim != 4:
        return None
    channels, side = wanted.shape[1], wanted.shape[-1]
    if wanted.ndim == 2:  # channels · side²
        channels = tensor.shape[1]
        side = math.isqrt(wanted.shape[1] // channels)
        if channels * side**2 != wanted.shape[1]:
            channels, side = 1, math.isqrt(wanted.shape[1])
    if channels == 1 and tensor.shape[1] == 3:
        tensor = tensor.sum(1, keepdim=True)
    if tensor.shape[-1] != side:
        tensor = resample_patches(tensor, side)
    return tensor.reshape(wanted.shape) if tensor.numel() == wanted.numel() else None


def _read(source: str) -> dict[str, Tensor]:
    readers: dict[str, Callable[[str], dict[str, Tensor]]] = {
        TIMM: timm_weights,
        HUGGING_FACE: hugging_face_weights,
        TORCHVISION: torchvision_weights,
    }
    for prefix, reader in readers.items():
        if source.startswith(prefix):
            try:
                return reader(source)
            except UserError:
                raise
            except Exception as error:  # a hub's client may raise any exception
                raise UserError(
                    f"model.weights = {source!r} could not be downloaded ({first_line(error)}); connect once, or "
                    "give a file of these weights"
                ) from error
    return read_weights(Path(source))


def _shapes(path: Path) -> dict[str, Any]:
    """Shapes of the tensors in a file, without reading a safetensors file's values."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {name: tensor.shape for name, tensor in read_weights(path).items()}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (safetensors.SafetensorError, OSError):
        return {}  # reading the weights will say what is wrong
