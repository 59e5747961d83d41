"""Conversion of an item of a dataset that Python code gives: an image and a label, in any of the usual forms."""

from __future__ import annotations

import contextlib
from os import PathLike
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.text import type_words
from atoll.data.decode import Encoded

_CHANNELS = (1, 3, 4)  # of images that Pillow opens


def to_image(value: Any) -> Encoded:
    """Convert an item's image: Pillow's, an encoded file, or an array, uint8 or float in 0..1.

    Arrays are (H, W), (H, W, C) or, as torch's tensors, (C, H, W). Those with other than 1, 3 or 4 channels, and
    colour images of uint16, stay arrays.

    Raises:
        UserError: It is none of these.
    """
    if isinstance(value, Image.Image | bytes):
        return value
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if not isinstance(value, np.ndarray) or value.ndim not in (2, 3):
        found = f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else type_words(value)
        opened = " (PIL.Image.open reads a file)" if isinstance(value, str | PathLike) else ""
        raise UserError(
            f"its image is {found}; give Pillow's images{opened}, or arrays (H, W), (H, W, C) or (C, H, W)"
        )
    if value.ndim == 3 and value.shape[-1] not in _CHANNELS and value.shape[0] in _CHANNELS:
        value = value.transpose(1, 2, 0)
    if 0 in value.shape:
        raise UserError(f"its image has no pixels: the shape is {value.shape}")
    if np.issubdtype(value.dtype, np.floating):
        if not (value.min() >= 0 and value.max() <= 1):  # neither comparison holds for NaN
            numbers = f"numbers from {value.min():.8g} to {value.max():.8g}"
            raise UserError(
                f"its image holds {'NaN' if np.isnan(value.min()) else numbers}; give pixels of 0 to 255 as uint8 "
                "or of 0 to 1 as floats, before normalisation"
            )
        value = np.round(value * 255).astype(np.uint8)
    if value.dtype not in (np.uint8, np.uint16):
        raise UserError(f"its image holds {value.dtype}; give uint8, uint16, or floats in 0..1")
    many = value.ndim == 3 and value.shape[-1] not in _CHANNELS
    if many or (value.dtype == np.uint16 and value.ndim == 3 and value.shape[-1] != 1):
        return np.ascontiguousarray(value)
    return Image.fromarray(np.ascontiguousarray(value.squeeze(-1) if value.shape[-1:] == (1,) else value))


def image_bytes(image: Encoded) -> bytes:
    """The bytes that determine an image's pixels, for a fingerprint."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray):
        return f"{image.dtype} {image.shape} ".encode() + image.tobytes()
    shown = f"{image.mode} {image.size} ".encode() + image.tobytes()
    # Further properties that determine the decoded pixels: two images may differ only in these.
    turned = image.getexif().get(ExifTags.Base.Orientation, 1)
    return shown + bytes(image.getpalette() or ()) + (f" turned {turned}".encode() if turned != 1 else b"")


def to_label(label: Any) -> Any:
    """Convert an item's label to Python's own type.

    Raises:
        UserError: It is not one number or text.
    """
    plain = label
    if hasattr(label, "item"):
        with contextlib.suppress(RuntimeError, ValueError):  # it has several numbers
            plain = label.item()
    if isinstance(plain, float):
        if not plain.is_integer():
            raise UserError(f"its label is {plain:g}; a label is a class, a whole number or a text")
        plain = int(plain)
    if plain is not None and not isinstance(plain, int | float | str):
        raise UserError(
            f"its label is {type_words(label)}; give one number or text for each "
            "image, or leave the labels out"
        )
    return plain
