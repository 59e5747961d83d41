"""Images that Python code gives: datasets, arrays, or a dict of these by client."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from atoll.core.errors import UserError, warn
from atoll.core.given import Given
from atoll.core.imports import describe_error, import_attribute
from atoll.data.decode import Encoded
from atoll.data.items import image_bytes
from atoll.data.options import DataOptions
from atoll.data.parts import IMAGE, LABEL, Part, columns_like_labels, part_of
from atoll.data.records import UNLABELLED, ItemRecords, Listing, encode, refuse_twins

_DIGITS = 12  # of a fingerprint


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
    (content, listing), (of_test, held_listing) = _read_both(train, _Source("test_data", test))
    both = hashlib.blake2b((content + of_test).encode(), digest_size=16).hexdigest()
    return Given.named(train.name, both[:_DIGITS], (listing, held_listing))


def _read_both(train: _Source, test: _Source) -> tuple[tuple[str, Listing], tuple[str, Listing]]:
    """Read training and test images; if only one of them names its classes, the names are those of both."""
    return _read(train.named_as(test)), _read(test.named_as(train))


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
        warn(f"all labels of {role} are {UNLABELLED}, so the images count as unlabelled")
        labels = [None] * len(labels)
    elif all(label is None for label in labels) and (likely := columns_like_labels(parts[0])):
        warn(
            f"{role} counts as unlabelled, because no column is called {', '.join(LABEL[:-1])} or {LABEL[-1]}; "
            f"rename the one that holds the labels, if it is {' or '.join(likely)}"
        )
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


def read_own(options: DataOptions) -> tuple[Listing, Listing | None]:
    """Import and read the images of ``data.source``, ``module:attribute``, in the forms that `give_data` takes.

    With ``data.test_split``, they are a dict from names of splits to these forms.

    Raises:
        UserError: They cannot be imported, are not images, or lack a split.
    """
    found, role = import_attribute(options.source, "data.source"), f"data.source = {options.source!r}"
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        try:
            found = found()
        except Exception as error:  # the user's code may raise any exception
            raise UserError(
                f"{role} is called without arguments and fails: {describe_error(error)}"
            ) from error
    if options.test_split is None:
        return _read(_Source(role, found))[1], None
    splits = options.train_split, options.test_split
    for split in splits:
        if not isinstance(found, Mapping) or split not in found:
            raise UserError(
                f"{role} has no split {split!r}; with data.test_split, give a dict with the keys "
                f"{splits[0]!r} and {splits[1]!r}, or leave data.test_split out"
            )
    (_, train), (_, test) = _read_both(*(_Source(f"{role}[{split!r}]", found[split]) for split in splits))
    return train, test


class _Source:
    """The value of a parameter: one part, or one part for each client."""

    def __init__(self, role: str, given: Any) -> None:
        self.role = role
        # A dict of splits has the names of columns.
        self.by_client = isinstance(given, Mapping) and not hasattr(given, "column_names")
        self.name = "dict" if self.by_client else type(given).__name__
        if self.by_client and {*LABEL} & {*given} and {*IMAGE, "images"} & {*given}:
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
            warn(
                f"{role} has clients called 'train' and 'test'; if they are splits, give the test images as "
                "test_data, or in a recipe set data.test_split"
            )
        self.parts = [
            part_of(f"{role}[{name!r}]" if name else role, part)
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

    parts: tuple[Part, ...]
    ends: tuple[int, ...]

    def __call__(self, row: int) -> Encoded:
        number = bisect_right(self.ends, row)
        part = self.parts[number]
        return part.read(row - self.ends[number] + part.size)[0]


def _classes(labels: list[Any], owners: list[int], parts: list[Part]) -> tuple[Any, list[str]]:
    """Codes and names of the classes; if parts number their classes differently, classes are matched by name."""
    names = parts[0].classes
    if all(part.classes == names for part in parts):
        if names and all(isinstance(label, int) and 0 <= label < len(names) for label in labels):
            return np.array(labels, dtype=np.int64), list(names)
        return encode(labels)
    for part in parts:
        refuse_twins(part.classes)
    return encode([_name(label, parts[owner]) for label, owner in zip(labels, owners, strict=True)])


def _name(label: Any, part: Part) -> str:
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
