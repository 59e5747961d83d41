"""Messages about the images of a source when they are read: warnings, and the refusal of corrupt images."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch

from atoll.core.errors import UserError, warn
from atoll.core.files import hash_bytes
from atoll.core.text import few
from atoll.data.cache import Opened
from atoll.data.decode import Values
from atoll.data.decode_workers import is_streamed
from atoll.data.images import ImageSet
from atoll.data.options import DataOptions
from atoll.data.records import UNLABELLED, Listing

DARK = 16  # brightest value of a 12-bit image in a window of 16 bits


def warn_of_marks(listing: Listing) -> None:
    """Warn if marks of unlabelled images count as a class; −1 and one other label may be two real classes."""
    mark = str(UNLABELLED)
    if listing.labels is not None and mark in listing.classes and len(listing.classes) > 2:
        marked = (listing.labels == listing.classes.index(mark)).sum()
        warn(
            f"{marked} of {len(listing)} images have the label {UNLABELLED}, which counts as a class of its own; "
            "if it marks unlabelled images, train with data.labels = false and evaluate on the labelled images"
        )


def two_forms(classes: Iterable[str]) -> str:
    """A sentence on two classes whose names are one name in two forms of Unicode; nothing without such."""
    seen: dict[str, str] = {}
    for name in classes:
        other = seen.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            return (
                f"the classes {other!a} and {name!a} count as two, but are one name in two forms of Unicode "
                "(macOS writes another one than other systems); rename one as the other"
            )
    return ""


def warn_of_classes(train: ImageSet, test: ImageSet | None, limit: int | None) -> None:
    """Warn of names that look alike, of training images of one class, and of test classes without a training image.

    Any encoder names the one class, and no protocol can name the other.
    A real site may well lack classes, and is not warned. If at most `limit` training images were drawn, a class may
    have none of them, and is warned of only if the source has no training image of it either.
    """
    if train.labels is None:
        return
    if twins := two_forms(dict.fromkeys([*train.classes, *(test.classes if test else [])])):
        warn(twins)
    if len(train.labels) and bool((train.labels == train.labels[0]).all()):
        warn(
            f"all training images are of one class, {train.classes[train.labels[0]]!r}, so no accuracy says "
            "anything of the encoder; if it is no class, set data.labels = false"
        )
    if test is None or test.labels is None:
        return
    strange = test.labels[~torch.isin(test.labels, train.labels)]
    if limit is not None:  # classes that only the test split has are numbered last
        strange = strange[strange >= len(train.classes)]
    if len(strange):
        names = few(repr(test.classes[label]) for label in torch.unique(strange).tolist())
        warn(
            f"{len(strange)} of {len(test)} test images are of classes without a training image: {names}; "
            f"the training classes are called {few(map(repr, train.classes))}"
        )


def warn_of_copies(train: ImageSet, test: ImageSet) -> None:
    """Warn of test images that are also training images, pixel by pixel; streamed images are not compared."""
    if is_streamed(train.images) or is_streamed(test.images):
        return
    seen = set(_hashes(train))
    copies = [row for row, each in enumerate(_hashes(test)) if each in seen]
    if copies:
        warn(
            f"{len(copies)} of {len(test)} test images are also training images, pixel by pixel (such as the test "
            f"images {few(map(str, copies))}); an accuracy on them says little about new images"
        )


def _hashes(images: ImageSet) -> Iterator[str]:
    for rows in torch.split(torch.arange(len(images)), 1024):
        for pixels in images.images.gather(rows).numpy():
            yield hash_bytes(pixels.tobytes())


def warn_of_values(splits: Sequence[Opened], options: DataOptions) -> None:
    """Warn of the values of images with more than 8 bits, unless the recipe's window contains them."""
    found_values = [opened.values for opened in splits if opened.values is not None]
    brightest = max(opened.brightest for opened in splits)
    if not found_values:
        if brightest <= DARK:
            warn(
                f"{options.path}: the largest value of all images is {brightest} of 255, so they are nearly black; "
                "scale them (colour of 16 bits to 0 to 65535, because its upper 8 bits are read; such TIFF files "
                "by data.window = 'per-image')"
            )
        return
    values = reduce(Values.joined, found_values)
    low, high = options.window_low, options.window_high
    # Values that fill the default window leave nothing to set, except for scans, which do not use it.
    says = options.decoding.says_window or ((values.low, values.high) == (low, high) and not values.scans)
    if options.window == "per-image" or (says and low <= values.low and values.high <= high):
        return
    found = f"{options.path}: images of more than 8 bits hold values from {values.low:g} to {values.high:g}"
    if values.scans and not says:
        words = "each DICOM file's own window is used, or its range; to map all alike"
    else:
        at_most = f", so they become nearly black (at most {brightest} of 255)"
        dark = at_most if brightest <= DARK else ""
        words = f"{low:g} becomes black and {high:g} white{dark}; to use their range"
    warn(f"{found}; {words}, set data.window_low = {values.low:g} and data.window_high = {values.high:g}")


def refuse_or_warn_of_corrupt(
    opened: Sequence[Opened], listings: Sequence[Listing], options: DataOptions
) -> None:
    """Refuse the corrupt images of all splits, or warn that they are skipped."""
    named = [
        f"{listing.records.describe(row)} ({why})"
        for split, listing in zip(opened, listings, strict=True)
        for row, why in split.corrupt.items()
    ]
    if not named:
        return
    some = few(named)
    share = f"{len(named)} of {sum(map(len, listings))} images"
    count = f"{share} cannot be decoded: {some}"
    if options.on_corrupt == "refuse":
        raise UserError(f"{count}; repair or remove them, or set data.on_corrupt = 'skip'")
    if any(len(split.corrupt) == len(listing) for split, listing in zip(opened, listings, strict=True)):
        raise UserError(f"{count}; none is left{' of a split' if len(listings) > 1 else ''}")
    warn(f"skipped {share}, which cannot be decoded: {some}")
