"""Images of one client, or of all, in any form in which Python code gives them: a dataset, a list, arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.given import class_given
from atoll.core.imports import describe_error
from atoll.core.text import type_words
from atoll.data.decode import Encoded
from atoll.data.items import to_image, to_label

# Names in items that are dicts, as those of Hugging Face.
IMAGE, LABEL = ("image", "img", "pixel_values"), ("label", "labels", "fine_label")
LIKE_LABEL = ("label", "target", "class", "categor")  # in names of columns that may hold labels
Sample = tuple[Encoded, Any]


@dataclass(frozen=True)
class Part:
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


def part_of(whose: str, source: Any) -> Part:
    """Recognise the form of given images.

    Args:
        whose: The user's name for them, for messages.
        source: The images: a dataset with a length and items, an array, or a pair of images and labels.

    Raises:
        UserError: They have none of these forms.
    """
    if isinstance(source, tuple) and len(source) == 2 and _is_array(source[0]):
        images, labels = source
        if labels is None:
            return part_of(whose, images)
        unordered = isinstance(labels, Mapping | Set | str) or getattr(labels, "shape", None) == ()
        if unordered or not isinstance(labels, Iterable):
            raise UserError(
                f"{whose} has {type_words(labels)} as labels; give a list or an array, one for each image"
            )
        labels = list(labels)  # a pandas Series is indexed by its index's values, not by position
        if len(images) != len(labels):
            raise UserError(f"{whose} has {len(images)} images and {len(labels)} labels; give one for each")
        return Part(len(images), _Arrays(images, labels), whose)
    # Not two samples, which have an image, a label and perhaps more.
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], list) and len(source[0]) > 3:
        raise UserError(
            f"the images of {whose} are a list; give one array, or pairs: list(zip(images, labels))"
        )
    if _is_array(source):
        return Part(len(source), _Arrays(source, None), whose)
    if isinstance(source, str | PathLike):
        raise UserError(
            f"{whose} is {str(source)!r}; a path goes into the recipe (data.source, data.path), and images here"
        )
    splits = getattr(source, "column_names", None)
    if isinstance(splits, Mapping):  # Hugging Face's dict of all splits
        one = f"{whose}[{next(iter(splits))!r}]"
        raise UserError(
            f"{whose} has the splits {', '.join(map(str, splits))}; give one, such as {one}, and the test images "
            "as test_data, or in a recipe set data.test_split"
        )
    if isinstance(source, type):
        raise class_given(whose, source)
    if hasattr(source, "iloc"):  # of a DataFrame, an item is a column
        raise UserError(
            f"{whose} is {type_words(source)}; give its rows as a list of images and labels, "
            "list(zip(frame[…], frame[…])), or the path of a CSV file in the recipe"
        )
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise UserError(
            f"{whose} is {type_words(source)}; give a dataset with a length and items (image, label), an "
            "array of images, (images, labels), or a dict of these by client"
        )
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return _hugging_face(whose, source)
    if isinstance(source, list | tuple) and source and hasattr(source[0], "__len__"):
        _refuse_parts(whose, source)
    classes = getattr(source, "classes", ())
    named = classes if isinstance(classes, list | tuple) else ()
    return Part(len(source), _Items(source), whose, tuple(map(str, named)))


def _refuse_parts(whose: str, source: Sequence[Any]) -> None:
    """Refuse a list of datasets or of arrays of many images, whose items are no samples."""
    if _is_array(source[0]) and source[0].ndim > 3:
        raise UserError(f"{whose} is no pair of two arrays; give images and labels as (images, labels)")
    if not isinstance(source[0], np.ndarray | Tensor | Mapping | Sequence):
        raise UserError(f"{whose} holds several datasets; give a dict from clients' names to them")


def _hugging_face(whose: str, source: Any) -> Part:
    try:
        _, label = _columns(source.column_names)
    except UserError as error:
        raise UserError(f"{whose}: {error}") from None
    names = getattr(source.features[label], "names", None) if label else None
    return Part(len(source), _Items(source), whose, tuple(names or ()))


def _columns(names: Collection[str]) -> tuple[str, str | None]:
    """The names of an item's image and of its label, if it has one."""
    image = next((name for name in IMAGE if name in names), None)
    if image is None:
        raise UserError(
            f"it has the columns {', '.join(map(str, names))}, and none of them is called 'image'"
        )
    return image, next((name for name in LABEL if name in names), None)


def columns_like_labels(part: Part) -> list[str]:
    """Columns of an unlabelled part's items, if they are dicts, whose names are like those of labels."""
    item = part.sample.dataset[0] if isinstance(part.sample, _Items) and part.size else None
    return like_labels(map(str, item) if isinstance(item, Mapping) else ())


def like_labels(names: Iterable[str]) -> list[str]:
    """Those names of columns that are like those of labels."""
    return [name for name in names if name == "y" or any(word in name.lower() for word in LIKE_LABEL)]


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)
