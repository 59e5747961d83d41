"""Images that Python code gives: datasets, arrays, or a dict of these by client."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.given import Given
from atoll.core.imports import describe_error
from atoll.data.decode import Encoded
from atoll.data.options import DataOptions
from atoll.data.records import UNLABELLED, ItemRecords, Listing, encode, refuse_twins

_DIGITS = 12  # of a fingerprint
_CHANNELS = (1, 3, 4)  # of images that Pillow opens
_IMAGE, _LABEL = (
    ("image", "img", "pixel_values"),
    ("label", "labels", "fine_label"),
)  # names in items that are dicts, as those of Hugging Face
Sample = tuple[Encoded, Any]


def give_data(source: Any) -> Given:
    """Name images that Python code gives, with a fingerprint of their pixels, labels and clients.

    Every image is read once. What it is read as must not change: a dataset whose transform draws at random has
    another fingerprint each time.

    Args:
        source: A dataset with a length whose items are images, (image, label) or, as Hugging Face's, dicts with
            ``"image"`` and perhaps ``"label"``; an array of images, or (images, labels); or a dict from names of
            clients to any of these.

    Returns:
        The name, which carries the `Listing`.

    Raises:
        UserError: It is none of these, or holds no images, or labels only for some.

    Example:
        >>> import numpy as np
        >>> from atoll.data.objects import give_data
        >>> images = np.zeros((3, 8, 8), np.uint8)
        >>> given = give_data({"north": images, "south": (images, [0, 1, 1])[0]})
        >>> given.value.column_values["client"], len(given.value)
        (['north', 'south'], 6)
    """
    by_client = isinstance(source, Mapping) and not hasattr(source, "column_names")  # as a dict of splits has
    given = source if by_client else {"": source}
    if not given:
        raise UserError("data is an empty dict; give a dataset for each client")
    clients = [str(name) for name in given]
    if len(set(clients)) < len(clients):
        twin = next(name for name in clients if clients.count(name) > 1)
        raise UserError(f"two clients of data are called {twin!r}; give each a name of its own")
    parts = [_part(name, part) for name, part in zip(clients, given.values(), strict=True)]
    digest, labels, owners = hashlib.blake2b(digest_size=16), [], []
    for owner, part in enumerate(parts):
        for row in range(part.size):
            image, label = part.read(row)
            labels.append(label)
            owners.append(owner)
            digest.update(_bytes(image) + repr((label, owner)).encode())
    if not labels:
        raise UserError("data holds no images")
    if all(label == UNLABELLED for label in labels):
        warnings.warn(f"all labels of data are {UNLABELLED}, so the images count as unlabelled", stacklevel=3)
        labels = [None] * len(labels)
    known = [label is not None for label in labels]
    if any(known) and not all(known):
        raise UserError("data has labels for some images and none for others; give all of them, or none")
    columns: dict[str, Any] = {}
    if by_client:
        digest.update(repr(clients).encode())
        columns = {"columns": {"client": np.array(owners)}, "column_values": {"client": clients}}
    codes, classes = _classes(labels, owners, parts) if all(known) else (None, [])
    if codes is not None and any(part.classes != parts[0].classes for part in parts):
        digest.update(codes.astype("<i8").tobytes())  # what the numbers mean at each client counts
    content = digest.hexdigest()
    name = "dict" if by_client else type(source).__name__
    records = ItemRecords(len(labels), _Joined(tuple(parts)), f"the given {name}", content)
    return Given.named(name, content[:_DIGITS], Listing(records, codes, classes, **columns))


def read_given(options: DataOptions) -> tuple[Listing, Listing | None]:
    """Return the images that a run was given as an object.

    Raises:
        UserError: Only their name is here.
    """
    if not isinstance(options.path, Given):
        raise UserError(
            f"the images {options.path!r} were given to their run as an object, which a file does not hold; pass "
            "them again as data=…, or choose a data.source that a recipe can name"
        )
    return options.path.value, None


@dataclass(frozen=True)
class _Part:
    """Images of one client, or all.

    Attributes:
        size: Number of images.
        sample: Returns the image and the label of a row; None for no label.
        classes: Names of the classes by label, if the source has them.
        whose: What the user calls the source, for messages.
    """

    size: int
    sample: Callable[[int], Sample]
    classes: tuple[str, ...] = ()
    whose: str = "data"

    def read(self, row: int) -> Sample:
        """Read a sample.

        Raises:
            UserError: It cannot be read, or it is no image with a label.
        """
        try:
            return self.sample(row)
        except UserError as error:
            raise UserError(f"{self.whose}[{row}]: {error}") from None
        except Exception as error:  # the user's dataset may raise any exception
            raise UserError(f"{self.whose}[{row}] cannot be read: {describe_error(error)}") from error


@dataclass(frozen=True)
class _Joined:
    """Reader of an image among several parts."""

    parts: tuple[_Part, ...]

    def __call__(self, row: int) -> Encoded:
        for part in self.parts:
            if row < part.size:
                return part.read(row)[0]
            row -= part.size
        raise IndexError(row)


@dataclass(frozen=True)
class _Items:
    """Samples of a dataset with items."""

    dataset: Any

    def __call__(self, row: int) -> Sample:
        item = self.dataset[row]
        if isinstance(item, Mapping):
            image, label = _columns(item)
            return to_image(item[image]), None if label is None else _plain(item[label])
        if isinstance(item, tuple | list):
            return to_image(item[0]), _plain(item[1]) if len(item) > 1 else None
        return to_image(item), None


@dataclass(frozen=True)
class _Arrays:
    """Samples of an array of images, with or without labels."""

    images: np.ndarray[Any, Any] | Tensor
    labels: Sequence[Any] | None

    def __call__(self, row: int) -> Sample:
        return to_image(self.images[row]), None if self.labels is None else _plain(self.labels[row])


def _part(name: str, source: Any) -> _Part:
    whose = f"data[{name!r}]" if name else "data"
    if isinstance(source, tuple) and len(source) == 2 and _is_array(source[0]):
        images, labels = source
        if labels is None:
            return _part(name, images)
        labels = list(labels)  # a pandas Series is indexed by its index's values, not by position
        if len(images) != len(labels):
            raise UserError(f"{whose} has {len(images)} images and {len(labels)} labels; give one for each")
        return _Part(len(images), _Arrays(images, labels), whose=whose)
    if _is_array(source):
        return _Part(len(source), _Arrays(source, None), whose=whose)
    if isinstance(source, str | PathLike):
        raise UserError(
            f"{whose} is {str(source)!r}; a path goes into the recipe (data.source, data.path), and images here"
        )
    splits = getattr(source, "column_names", None)
    if isinstance(splits, Mapping):  # Hugging Face's dict of all splits
        one = f"{whose}[{next(iter(splits))!r}]"
        raise UserError(f"{whose} has the splits {', '.join(map(str, splits))}; give one, such as {one}")
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise UserError(
            f"{whose} is a {type(source).__name__}; give a dataset with a length and items (image, label), an "
            "array of images, (images, labels), or a dict of these by client"
        )
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return _hugging_face(whose, source)
    classes = getattr(source, "classes", ())
    named = classes if isinstance(classes, list | tuple) else ()
    return _Part(len(source), _Items(source), tuple(map(str, named)), whose)


def _hugging_face(whose: str, source: Any) -> _Part:
    try:
        _, label = _columns(source.column_names)
    except UserError as error:
        raise UserError(f"{whose}: {error}") from None
    names = getattr(source.features[label], "names", None) if label else None
    return _Part(len(source), _Items(source), tuple(names or ()), whose)


def _columns(names: Collection[str]) -> tuple[str, str | None]:
    """The names of an item's image and of its label, if it has one."""
    image = next((name for name in _IMAGE if name in names), None)
    if image is None:
        raise UserError(
            f"it has the columns {', '.join(map(str, names))}, and none of them is called 'image'"
        )
    return image, next((name for name in _LABEL if name in names), None)


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
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray) or value.ndim not in (2, 3):
        found = (
            f"an array of shape {value.shape}"
            if isinstance(value, np.ndarray)
            else f"a {type(value).__name__}"
        )
        raise UserError(
            f"its image is {found}; give Pillow's images, or arrays (H, W), (H, W, C) or (C, H, W)"
        )
    if value.ndim == 3 and value.shape[-1] not in _CHANNELS and value.shape[0] in _CHANNELS:
        value = value.transpose(1, 2, 0)
    if 0 in value.shape:
        raise UserError(f"its image has no pixels: the shape is {value.shape}")
    if np.issubdtype(value.dtype, np.floating):
        if not (value.min() >= 0 and value.max() <= 1):  # neither holds for what is not a number
            raise UserError(
                f"its image holds numbers from {value.min():.3g} to {value.max():.3g}; give pixels of 0 "
                "to 255 as uint8 or of 0 to 1 as floats, before normalisation"
            )
        value = np.round(value * 255).astype(np.uint8)
    if value.dtype not in (np.uint8, np.uint16):
        raise UserError(f"its image holds {value.dtype}; give uint8, uint16, or floats in 0..1")
    many = value.ndim == 3 and value.shape[-1] not in _CHANNELS
    if many or (value.dtype == np.uint16 and value.ndim == 3 and value.shape[-1] != 1):
        return np.ascontiguousarray(value)
    return Image.fromarray(np.ascontiguousarray(value.squeeze(-1) if value.shape[-1:] == (1,) else value))


def _bytes(image: Encoded) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray):
        return f"{image.dtype} {image.shape} ".encode() + image.tobytes()
    shown = f"{image.mode} {image.size} ".encode() + image.tobytes()
    # What else makes the pixels that are decoded: two images may differ in it alone.
    turned = image.getexif().get(ExifTags.Base.Orientation, 1)
    return shown + bytes(image.getpalette() or ()) + (f" turned {turned}".encode() if turned != 1 else b"")


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def _plain(label: Any) -> Any:
    """A label as Python's own type.

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
            f"its label is a {type(label).__name__}; give one number or text for each "
            "image, or leave the labels out"
        )
    return plain


def _classes(labels: list[Any], owners: list[int], parts: list[_Part]) -> tuple[Any, list[str]]:
    """Codes and names of the classes; where parts name their classes differently, a class is its name."""
    names = parts[0].classes
    if all(part.classes == names for part in parts):
        if names and all(isinstance(label, int) and 0 <= label < len(names) for label in labels):
            return np.array(labels, dtype=np.int64), list(names)
        return encode(labels)
    for part in parts:
        refuse_twins(part.classes)
    return encode([_name(label, parts[owner]) for label, owner in zip(labels, owners, strict=True)])


def _name(label: Any, part: _Part) -> str:
    """The name of a class that other parts know under another number, or not at all."""
    if isinstance(label, str):
        return label
    if not 0 <= label < len(part.classes):
        raise UserError(
            f"{part.whose} has the label {label} without a name, and other clients name their classes; give all "
            "labels as names, or the same classes at each client"
        )
    name: str = part.classes[label]
    return name
