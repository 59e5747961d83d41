"""Training, validation and test images for the recipe's ``[data]`` section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from atoll.core.errors import UserError, warn
from atoll.core.files import data_folder, expand_home
from atoll.core.rng import numpy_stream
from atoll.core.text import clean
from atoll.data.cache import Opened, open_records
from atoll.data.csv_files import read_csv
from atoll.data.folders import read_class_folders, read_client_folders, read_plain_folder
from atoll.data.images import ImageSet
from atoll.data.named import read_digits, read_hub, read_torchvision
from atoll.data.objects import read_given, read_own
from atoll.data.options import DataOptions, is_own_data
from atoll.data.parquet import read_parquet
from atoll.data.records import Listing, Rows
from atoll.data.source_warnings import (
    refuse_or_warn_of_corrupt,
    warn_of_marks,
    warn_of_values,
)
from atoll.data.synthetic import DEFAULT_IMAGES, MOST_TEST_IMAGES, synthetic_images
from atoll.data.tar import read_tar

__all__ = ["DataOptions", "ImageSet", "Splits", "load_data"]

_DATA_SEED = 0  # of random choices that are the same for all runs on the data


@dataclass
class Splits:
    """Images of a source.

    Attributes:
        train: Training images of the clients.
        test: Test images for the evaluation of the finished encoder, if there are any.
        validation: Part of the source's training images, held out for tuning.
    """

    train: ImageSet
    test: ImageSet | None = None
    validation: ImageSet | None = None

    @property
    def held_out(self) -> tuple[str, ImageSet]:
        """The images for the evaluation: the validation split if there is one, else the test set, else all."""
        if self.validation is not None:
            return "validation", self.validation
        return ("test", self.test) if self.test is not None else ("train", self.train)


_Read = tuple[Listing, Listing | None]
_READERS: dict[str, Callable[[DataOptions], _Read]] = {  # those that download are in `read_listings`
    "digits": lambda options: (read_digits(), None),
    "parquet": lambda options: read_parquet(options, _locate(options)),
    "csv": lambda options: read_csv(options, _locate(options)),
    "folder": lambda options: read_class_folders(options, _locate_folder(options)),
    "clients": lambda options: read_client_folders(options, _locate_folder(options)),
    "object": read_given,
    "tar": lambda options: read_tar(options, _locate(options)),
    "images": lambda options: read_plain_folder(options, _locate_folder(options)),
}
_DOWNLOADS = {"hub": read_hub, "torchvision": read_torchvision}


def read_listings(options: DataOptions, download: bool = True) -> tuple[Listing, Listing | None]:
    """List a source's training and test images, without decoding them.

    Args:
        options: The source.
        download: Whether missing images may be downloaded.

    Raises:
        UserError: The source is missing or unreadable.
    """
    if options.source == "synthetic":
        raise UserError("the images of data.source = 'synthetic' are made up; choose a source that has files")
    if is_own_data(options.source):
        return read_own(options)
    reader = _DOWNLOADS.get(options.source)
    return _READERS[options.source](options) if reader is None else reader(options, download)


def why_missing(options: DataOptions) -> str:
    """Reason why a source's images are not on this machine; empty if they are. Nothing is downloaded or decoded.

    Example:
        >>> from atoll.data.sources import DataOptions, why_missing
        >>> why_missing(DataOptions(source="digits"))
        ''
    """
    if options.source == "synthetic":
        return ""
    try:
        read_listings(options, download=False)
    except UserError as error:
        return str(error)
    return ""


def load_data(options: DataOptions, seed: int) -> Splits:
    """Find, decode (once, into the cache) and split a source's images.

    Only the validation split depends on the seed. A held-out test split and the choice of `limit` images are the
    same for all seeds, so runs with different seeds use the same images for training and evaluation.

    Args:
        options: The source and how to read it.
        seed: The run's seed.

    Raises:
        UserError: The source is missing, unreadable or empty, or holds a corrupt image that may not be
            skipped.

    Example:
        >>> from atoll.data.sources import DataOptions, load_data
        >>> splits = load_data(DataOptions(source="digits"), seed=0)
        >>> len(splits.train), len(splits.test), splits.train.classes[:3]
        (1438, 359, ['0', '1', '2'])
    """
    if options.source == "synthetic":
        return _with_validation(_synthetic(options), options, seed)
    # A base may set the path, and "digits" is the default source.
    if options.path and (options.source == "digits" or is_own_data(options.source)):
        warn(
            f"data.path = {options.path!r} is not read, because data.source is {options.source!r}; set data.source "
            "to what the path holds, such as 'folder'"
        )
    train, test = read_listings(options)
    for listing in (train, test):
        if listing is not None and len(listing) == 0:
            raise UserError(
                f"a split of data.source = {options.source!r} (path {options.path!r}) holds no images"
            )
    if test is not None:
        test = test.renamed(train)
    elif options.test_fraction:
        strata = [*([] if train.labels is None else [train.labels]), *train.columns.values()]
        rest, held = _hold_out(
            len(train), strata, options.test_fraction, numpy_stream(_DATA_SEED, "test split")
        )
        train, test = train.select(rest), train.select(held)
    if options.labels:
        warn_of_marks(train)
    if options.limit is not None and options.limit < len(train):
        chosen = numpy_stream(_DATA_SEED, "limit").permutation(len(train))[: options.limit]
        train = train.select(np.sort(chosen))
    listings = [one for one in (train, test) if one is not None]
    opened = [open_records(one.records, options.decoding, options.memory_bytes) for one in listings]
    refuse_or_warn_of_corrupt(opened, listings, options)
    warn_of_values(opened, options)
    splits = Splits(
        *(_intact(one, found, options.labels) for one, found in zip(listings, opened, strict=True))
    )
    return _with_validation(splits, options, seed)


def _synthetic(options: DataOptions) -> Splits:
    count = options.limit or DEFAULT_IMAGES
    held = min(round(count * options.test_fraction), MOST_TEST_IMAGES)
    train = synthetic_images(0, count, options.decoding, options.labels)
    return Splits(train, synthetic_images(count, held, options.decoding, options.labels) if held else None)


def _with_validation(splits: Splits, options: DataOptions, seed: int) -> Splits:
    """Hold out the validation split, if the options want one."""
    images = splits.train
    if options.validation_fraction:
        known = [*([] if images.labels is None else [images.labels]), *images.columns.values()]
        strata, rng = [values.numpy() for values in known], numpy_stream(seed, "validation split")
        rest, held = _hold_out(len(images), strata, options.validation_fraction, rng, "validation_fraction")
        splits.train, splits.validation = (
            images.subset(torch.from_numpy(rest)),
            images.subset(torch.from_numpy(held)),
        )
    return splits


def _hold_out(
    size: int, strata: list[Rows], fraction: float, rng: np.random.Generator, option: str = "test_fraction"
) -> tuple[Rows, Rows]:
    """Split rows into those to keep and those to hold out, both sorted; ``option`` holds the fraction.

    Samples are ordered by strata (labels first), and randomly within a stratum; every 1/fraction-th sample is held
    out. Each class thus contributes its share, up to one image, for any number of strata. If there are more strata
    than samples to hold out, their order differs from class to class; otherwise, all samples that are held out
    could belong to one client.
    """
    held_size = round(fraction * size)
    if not 0 < held_size < size:
        raise UserError(
            f"data.{option} = {fraction} cannot be held out of {size} {'image' if size == 1 else 'images'}; set it "
            "to 0 or load more images"
        )
    shuffled = rng.permutation(size)
    stratum = np.zeros(size, dtype=np.int64)
    for position, codes in enumerate(strata):
        found, stratum = np.unique(stratum * (codes.max() + 1) + codes, return_inverse=True)
        if position and len(found) > held_size:
            strata = [*strata[:position], rng.permutation(len(found))[stratum]]
            break
    order = np.lexsort([shuffled, *reversed(strata)])
    held = np.sort(order[((np.arange(held_size) + 0.5) * size / held_size).astype(np.int64)])
    return np.setdiff1d(np.arange(size), held), held


def _intact(listing: Listing, opened: Opened, labels: bool) -> ImageSet:
    """The images of a listing without corrupt ones."""
    read = listing if labels else replace(listing, labels=None, classes=[])
    images = ImageSet(
        images=opened.pixels,
        labels=None if read.labels is None else torch.from_numpy(read.labels),
        classes=[clean(name) for name in read.classes],
        columns={name: torch.from_numpy(values) for name, values in read.columns.items()},
        column_values={
            name: [clean(value) for value in values] for name, values in read.column_values.items()
        },
        fingerprint=opened.fingerprint,
        unread=read.unread,
    )
    if not opened.corrupt:
        return images
    return images.subset(torch.from_numpy(np.setdiff1d(np.arange(len(images)), list(opened.corrupt))))


ON_DISK = ("parquet", "csv", "folder", "clients", "images", "tar")


def settled(options: DataOptions) -> DataOptions:
    """Return the same options with the absolute path of the images.

    The target of a relative path may change during a run (the run's folder may take the name), and worker processes
    resolve the path later than their parent.
    """
    if options.source not in ON_DISK:
        return options
    return replace(options, path=str(_locate(options).absolute()))


def _locate(options: DataOptions) -> Path:
    return locate(options.path or "", "data.path")


def locate(name: str, option: str) -> Path:
    """Find a file or folder in the working folder or under ``ATOLL_DATA``.

    Args:
        name: Its path.
        option: The option that named it, for the error message.

    Raises:
        UserError: It is in neither place.
    """
    try:
        name.encode()
    except UnicodeEncodeError:  # a recipe cannot contain such a path
        raise UserError(f"{option}: the name {clean(name)!r} is not valid UTF-8; rename it") from None
    path = expand_home(name)
    if path.exists():
        return path
    shared = data_folder()
    if shared and (found := shared / path).exists():
        return found
    also = f"ATOLL_DATA ({shared})" if shared else "ATOLL_DATA, which is not set"
    raise UserError(
        f"{option}: there is no file or folder {name!r} here or under {also}; "
        f"set {option}, or set ATOLL_DATA to the folder that holds it"
    )


def _locate_folder(options: DataOptions) -> Path:
    path = _locate(options)
    if not path.is_dir():
        raise UserError(
            f"data.source = {options.source!r} reads a folder, but data.path = {options.path!r} is a file"
        )
    return path
