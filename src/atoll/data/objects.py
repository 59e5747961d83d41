"""Images that Python code gives: datasets, arrays, or a dict of these by client."""

from __future__ import annotations

import hashlib
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.given import Given
from atoll.core.imports import describe_error, import_attribute
from atoll.data.decode import Encoded
from atoll.data.items import image_bytes, to_image, to_label
from atoll.data.options import DataOptions
from atoll.data.records import UNLABELLED, ItemRecords, Listing, encode, refuse_twins

_DIGITS = 12  # of a fingerprint
# Names in items that are dicts, as those of Hugging Face.
_IMAGE, _LABEL = ("image", "img", "pixel_values"), ("label", "labels", "fine_label")
Sample = tuple[Encoded, Any]


def give_data(source: Any, test: Any = None) -> Given:
    """Name images that Python code gives, with a fingerprint of their pixels, labels and clients.

    Every image is read once, and must give the same pixels each time: a dataset with a random transform would have
    another fingerprint each time.

    Args:
        source: A dataset with a length whose items are images, (image, label) or, as Hugging Face's, dicts with
            ``"image"`` and perhaps ``"label"``; an array of images, or (images, labels); or a dict from names of
            clients to any of these.
        test: The test images, in the same forms; None if a part of ``source`` is to be held out.

    Returns:
        The name, which carries the `Listing` of each; None for no test images.

    Raises:
        UserError: ``source`` is none of these, contains no images, or has labels for only some images.

    Example:
        >>> import numpy as np
        >>> from atoll.data.objects import give_data
        >>> images = np.zeros((3, 8, 8), np.uint8)
        >>> train, test = give_data({"north": images, "south": (images, [0, 1, 1])[0]}).value
        >>> train.column_values["client"], len(train), test
        (['north', 'south'], 6, None)
    """
    if source is None:
        raise UserError("test_data is given without data; give the training images, too, as data=…")
    train = _Source("data", source)
    if test is None:
        content, listing = _read(train)
        return Given.named(train.name, content[:_DIGITS], (listing, None))
    held = _Source("test_data", test)
    content, listing = _read(train.named_as(held))
    of_test, held_listing = _read(held.named_as(train))
    both = hashlib.blake2b((content + of_test).encode(), digest_size=16).hexdigest()
    return Given.named(train.name, both[:_DIGITS], (listing, held_listing))


def _read(source: _Source) -> tuple[str, Listing]:
    """Read the images that a parameter got; return their fingerprint and their listing."""
    role, parts = source.role, source.parts
    digest, labels, owners = hashlib.blake2b(digest_size=16), [], []
    for owner, part in enumerate(parts):
        for row in range(part.size):
            image, label = part.read(row)
            labels.append(label)
            owners.append(owner)
            digest.update(image_bytes(image) + repr((label, owner)).encode())
    if not labels:
        raise UserError(f"{role} holds no images")
    if all(label == UNLABELLED for label in labels):
        warnings.warn(
            f"all labels of {role} are {UNLABELLED}, so the images count as unlabelled", stacklevel=4
        )
        labels = [None] * len(labels)
    known = [label is not None for label in labels]
    if any(known) and not all(known):
        raise UserError(f"{role} has labels for some images and none for others; give all of them, or none")
    columns: dict[str, Any] = {}
    if source.by_client:
        digest.update(repr(source.clients).encode())
        columns = {"columns": {"client": np.array(owners)}, "column_values": {"client": source.clients}}
    codes, classes = _classes(labels, owners, parts) if all(known) else (None, [])
    if codes is not None and any(part.classes != parts[0].classes for part in parts):
        digest.update(codes.astype("<i8").tobytes())  # the meaning of the numbers at each client matters, too
    content = digest.hexdigest()
    joined = _Joined(tuple(parts), tuple(accumulate(part.size for part in parts)))
    records = ItemRecords(len(labels), joined, f"the given {source.name}", content)
    return content, Listing(records, codes, classes, **columns)


def read_given(options: DataOptions) -> tuple[Listing, Listing | None]:
    """Return the images that a run was given as an object.

    Raises:
        UserError: Only their name is known in this process.
    """
    if not isinstance(options.path, Given):
        raise UserError(
            f"the images {options.path!r} were given to their run as an object, which a file does not hold; "
            "pass them again as data=… (to evaluate, or to simulate with resume=True, which returns a run with "
            "them), or choose a data.source that a recipe can name"
        )
    train, test = options.path.value
    return train, test


def read_own(name: str) -> Listing:
    """Import and read the images of ``data.source``, ``module:attribute``, in the forms that `give_data` takes.

    Raises:
        UserError: They cannot be imported, or are not images.
    """
    found, role = import_attribute(name, "data.source"), f"data.source = {name!r}"
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        try:
            found = found()
        except Exception as error:  # the user's code may raise any exception
            raise UserError(
                f"{role} is called without arguments and fails: {describe_error(error)}"
            ) from error
    return _read(_Source(role, found))[1]


@dataclass(frozen=True)
class _Part:
    """Images of one client, or all.

    Attributes:
        size: Number of images.
        sample: Returns the image and the label of a row; None for no label.
        whose: The user's name for the source, for messages.
        classes: Names of the classes by label, if the source has them.
    """

    size: int
    sample: Callable[[int], Sample]
    whose: str
    classes: tuple[str, ...] = ()

    def read(self, row: int) -> Sample:
        """Read a sample.

        Raises:
            UserError: The sample cannot be read, or is not an image with a label.
        """
        try:
            return self.sample(row)
        except UserError as error:
            raise UserError(f"{self.whose}[{row}]: {error}") from None
        except Exception as error:  # the user's dataset may raise any exception
            raise UserError(f"{self.whose}[{row}] cannot be read: {describe_error(error)}") from error


class _Source:
    """The value of a parameter: one part, or one part for each client."""

    def __init__(self, role: str, given: Any) -> None:
        self.role = role
        # A dict of splits has the names of columns.
        self.by_client = isinstance(given, Mapping) and not hasattr(given, "column_names")
        self.name = "dict" if self.by_client else type(given).__name__
        if self.by_client and {*_LABEL} & {*given} and {*_IMAGE, "images"} & {*given}:
            raise UserError(
                f"{role} has the keys {', '.join(map(repr, given))}; a dict names clients, so give images and "
                "labels as a pair (images, labels)"
            )
        sources = given if self.by_client else {"": given}
        if not sources:
            raise UserError(f"{role} is an empty dict; give a dataset for each client")
        self.clients = clients = [str(name) for name in sources]
        if len(set(clients)) < len(clients):
            twin = next(name for name in clients if clients.count(name) > 1)
            raise UserError(f"two clients of {role} are called {twin!r}; give each a name of its own")
        if {"train", "test"} <= set(clients):
            warnings.warn(
                f"{role} has clients called 'train' and 'test'; if they are splits, give the test images as "
                "test_data",
                stacklevel=4,
            )
        self.parts = [
            _part(f"{role}[{name!r}]" if name else role, part)
            for name, part in zip(clients, sources.values(), strict=True)
        ]

    def named_as(self, other: _Source) -> _Source:
        """Take the names of the classes of the other images, if these have none: their numbers mean the same."""
        names = {part.classes for part in other.parts}
        if len(names) == 1 and not any(part.classes for part in self.parts):
            self.parts = [replace(part, classes=next(iter(names))) for part in self.parts]
        return self


@dataclass(frozen=True)
class _Joined:
    """Reader of an image among several parts, given the number of images up to the end of each part."""

    parts: tuple[_Part, ...]
    ends: tuple[int, ...]

    def __call__(self, row: int) -> Encoded:
        number = bisect_right(self.ends, row)
        part = self.parts[number]
        return part.read(row - self.ends[number] + part.size)[0]


@dataclass(frozen=True)
class _Items:
    """Samples of a dataset with items."""

    dataset: Any

    def __call__(self, row: int) -> Sample:
        item = self.dataset[row]
        if isinstance(item, Mapping):
            image, label = _columns(item)
            return to_image(item[image]), None if label is None else to_label(item[label])
        if isinstance(item, tuple | list):
            return to_image(item[0]), to_label(item[1]) if len(item) > 1 else None
        return to_image(item), None


@dataclass(frozen=True)
class _Arrays:
    """Samples of an array of images, with or without labels."""

    images: np.ndarray[Any, Any] | Tensor
    labels: Sequence[Any] | None

    def __call__(self, row: int) -> Sample:
        return to_image(self.images[row]), None if self.labels is None else to_label(self.labels[row])


def _part(whose: str, source: Any) -> _Part:
    if isinstance(source, tuple) and len(source) == 2 and _is_array(source[0]):
        images, labels = source
        if labels is None:
            return _part(whose, images)
        unordered = isinstance(labels, Mapping | Set | str) or getattr(labels, "shape", None) == ()
        if unordered or not isinstance(labels, Iterable):
            raise UserError(
                f"{whose} has a {type(labels).__name__} as labels; give a list or an array, one for each image"
            )
        labels = list(labels)  # a pandas Series is indexed by its index's values, not by position
        if len(images) != len(labels):
            raise UserError(f"{whose} has {len(images)} images and {len(labels)} labels; give one for each")
        return _Part(len(images), _Arrays(images, labels), whose)
    # Not two samples, which have an image, a label and perhaps more.
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], list) and len(source[0]) > 3:
        raise UserError(
            f"the images of {whose} are a list; give one array, or pairs: list(zip(images, labels))"
        )
    if _is_array(source):
        return _Part(len(source), _Arrays(source, None), whose)
    if isinstance(source, str | PathLike):
        raise UserError(
            f"{whose} is {str(source)!r}; a path goes into the recipe (data.source, data.path), and images here"
        )
    splits = getattr(source, "column_names", None)
    if isinstance(splits, Mapping):  # Hugging Face's dict of all splits
        one = f"{whose}[{next(iter(splits))!r}]"
        raise UserError(
            f"{whose} has the splits {', '.join(map(str, splits))}; give one, such as {one}, and the test images "
            "as test_data"
        )
    if isinstance(source, type):
        raise UserError(f"{whose} is the class {source.__name__}; give an object of it, {source.__name__}(…)")
    if hasattr(source, "iloc"):  # of a DataFrame, an item is a column
        raise UserError(
            f"{whose} is a {type(source).__name__}; give its rows as a list of images and labels, "
            "list(zip(frame[…], frame[…])), or the path of a CSV file in the recipe"
        )
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise UserError(
            f"{whose} is a {type(source).__name__}; give a dataset with a length and items (image, label), an "
            "array of images, (images, labels), or a dict of these by client"
        )
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return _hugging_face(whose, source)
    if isinstance(source, list | tuple) and source and hasattr(source[0], "__len__"):
        _refuse_parts(whose, source)
    classes = getattr(source, "classes", ())
    named = classes if isinstance(classes, list | tuple) else ()
    return _Part(len(source), _Items(source), whose, tuple(map(str, named)))


def _refuse_parts(whose: str, source: Sequence[Any]) -> None:
    """Refuse a list of datasets or of arrays of many images, whose items are no samples."""
    if _is_array(source[0]) and source[0].ndim > 3:
        raise UserError(f"{whose} is no pair of two arrays; give images and labels as (images, labels)")
    if not isinstance(source[0], np.ndarray | Tensor | Mapping | Sequence):
        raise UserError(f"{whose} holds several datasets; give a dict from clients' names to them")


def _hugging_face(whose: str, source: Any) -> _Part:
    try:
        _, label = _columns(source.column_names)
    except UserError as error:
        raise UserError(f"{whose}: {error}") from None
    names = getattr(source.features[label], "names", None) if label else None
    return _Part(len(source), _Items(source), whose, tuple(names or ()))


def _columns(names: Collection[str]) -> tuple[str, str | None]:
    """The names of an item's image and of its label, if it has one."""
    image = next((name for name in _IMAGE if name in names), None)
    if image is None:
        raise UserError(
            f"it has the columns {', '.join(map(str, names))}, and none of them is called 'image'"
        )
    return image, next((name for name in _LABEL if name in names), None)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def _classes(labels: list[Any], owners: list[int], parts: list[_Part]) -> tuple[Any, list[str]]:
    """Codes and names of the classes; if parts number their classes differently, classes are matched by name."""
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
