"""Datasets by name: scikit-learn's digits, the Hugging Face hub, torchvision's datasets."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from atoll.core.errors import UserError, did_you_mean
from atoll.core.extras import require
from atoll.core.files import cache_folder, content_digest, data_folder, hash_bytes
from atoll.core.text import first_line
from atoll.data.decode import Encoded
from atoll.data.options import DataOptions, held_out_names
from atoll.data.parquet import encoded
from atoll.data.records import UNLABELLED, ItemRecords, Listing, Rows, encode
from atoll.data.tables import choose_columns, table_listing


def read_digits() -> Listing:
    """Load 1,797 handwritten digits, 8×8 pixels in 17 levels of grey, scaled to 0..255.

    Reference:
        Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998 (test part).
    """
    rows = _digits()
    levels = np.rint(rows[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = rows[:, 64].astype(np.int64)
    content = hash_bytes(levels.tobytes() + labels.astype("<i8").tobytes())
    records = ItemRecords(len(levels), _Opened(levels), "digits", content)
    return Listing(records, labels, [str(digit) for digit in range(10)])


@cache
def _digits() -> np.ndarray[Any, np.dtype[np.float64]]:
    """The 64 levels and the digit of each image, (1797, 65)."""
    library = find_spec("sklearn")
    if library is not None and library.origin is not None:
        # Its loader takes most of a second to import, in each process.
        path = Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


class _Opened:
    """Reader of arrays as images; a class, because closures cannot be pickled for worker processes."""

    def __init__(self, arrays: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.arrays = arrays

    def __call__(self, row: int) -> Encoded:
        return Image.fromarray(self.arrays[row])


def read_hub(options: DataOptions, download: bool = True) -> tuple[Listing, Listing | None]:
    """Load a dataset from the Hugging Face hub with the ``datasets`` library, unless nothing may be downloaded."""
    if not download:
        raise UserError(f"the hub dataset {options.path!r} is downloaded on first use")
    datasets = require("datasets", "hub", "data.source = 'hub'")
    try:
        splits = datasets.load_dataset(options.path, options.hub_config)
    except Exception as error:  # the library raises a dozen types, including those of network libraries
        raise UserError(
            f"cannot load the hub dataset {options.path!r}: {first_line(error)}; "
            "check its name and, unless it was downloaded before, the network"
        ) from error
    test_split = next(
        (name for name in held_out_names(options.test_split) if name in splits), options.test_split
    )
    for name in (options.train_split, test_split):
        if name is not None and name not in splits:
            raise UserError(
                f"the hub dataset {options.path!r} has no split {name!r}; {did_you_mean(name, splits)}"
            )
    train = _hub_listing(splits[options.train_split], options.train_split, options)
    return train, None if test_split is None else _hub_listing(
        splits[test_split], test_split, options, test=True
    )


def _hub_listing(dataset: Any, split: str, options: DataOptions, test: bool = False) -> Listing:
    table = dataset.data.table
    where = f"{options.path}:{split}"
    columns = choose_columns(table.schema, options, where, test)
    item = _TableImage(dataset.data, columns.image)
    digest = hashlib.blake2b(digest_size=16)
    for row in range(table.num_rows):
        data = item(row)
        digest.update(len(data).to_bytes(8, "little") + data)
    records = ItemRecords(table.num_rows, item, where, digest.hexdigest())
    listing = table_listing(records, table, columns, options, where, test)
    for name, codes in {"": listing.labels, **listing.columns}.items():
        if codes is not None:
            digest.update(name.encode() + codes.astype("<i8").tobytes())
    return replace(listing, records=replace(records, content=digest.hexdigest()))


class _TableImage:
    """Reader of images in a column of the library's table, which is mapped from its cache and pickled as a path."""

    def __init__(self, table: Any, column: str) -> None:
        self.table = table
        self.column = column

    def __call__(self, row: int) -> bytes:
        return encoded(self.table.column(self.column)[row].as_py(), Path())


def read_torchvision(options: DataOptions, download: bool = True) -> tuple[Listing, Listing | None]:
    """Load a ``torchvision.datasets`` class from ``ATOLL_DATA`` or the cache; if allowed, download it there."""
    import torchvision.datasets

    offered = {name: getattr(torchvision.datasets, name) for name in torchvision.datasets.__all__}
    base = torchvision.datasets.VisionDataset
    known = {name: kind for name, kind in offered.items() if inspect.isclass(kind) and issubclass(kind, base)}
    if options.path not in known:
        raise UserError(
            f"torchvision has no dataset {options.path!r}; {did_you_mean(str(options.path), known)}"
        )
    kind = known[options.path]
    parameters = _parameters(kind)
    if "train" in parameters:  # if there is also `split`, it selects classes, as in EMNIST
        choice = {"split": options.train_split} if "split" in parameters else {}
        train, test = (_torchvision(kind, {**choice, "train": train}, download) for train in (True, False))
        return train, test
    if "split" in parameters:
        train = _torchvision(kind, {"split": options.train_split}, download)
        return train, _test_split(kind, options.test_split, download)
    return _torchvision(kind, {}, download), None


def _parameters(kind: type) -> set[str]:
    """Names of the parameters of a class, and of those that it passes on to its base."""
    found: set[str] = set()
    for one in kind.__mro__:
        if make := vars(one).get("__init__"):
            own = inspect.signature(make).parameters
            found |= own.keys()
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in own.values()):
                break
    return found


def _test_split(kind: type, name: str | None, download: bool) -> Listing:
    try:
        return _torchvision(kind, {"split": name or "test"}, download)
    except UserError:
        if name is None:
            with contextlib.suppress(UserError):
                return _torchvision(kind, {"split": "val"}, download)
        raise


def _torchvision(kind: type, split: dict[str, Any], download: bool) -> Listing:
    parameters = _parameters(kind)
    locations: list[dict[str, Any]] = [{"root": cache_folder() / "torchvision", "download": download}]
    if folder := data_folder():
        locations.insert(0, {"root": folder, "download": False})
    failure: Exception | None = None
    for location in locations:
        try:
            dataset = kind(**split, **{name: value for name, value in location.items() if name in parameters})
            break
        except (OSError, RuntimeError, ValueError, ImportError, TypeError) as error:
            failure = error
    else:
        raise UserError(
            f"cannot load torchvision's {kind.__name__}: {first_line(failure)}; "
            "it is downloaded on first use, so check the network, or put a copy under ATOLL_DATA"
        ) from failure
    name = " ".join([kind.__name__, *(f"{key}={value}" for key, value in split.items())])
    targets = _targets(dataset)
    labels, classes = encode(targets)
    if hasattr(dataset, "classes") and targets.min(initial=0) >= 0:
        labels, classes = targets, [", ".join(c) if isinstance(c, tuple) else str(c) for c in dataset.classes]
    # Torchvision checks the hashes of archives, which identify the pixels, but not those of unpacked files.
    content = hashlib.blake2b(
        f"{name}\0{len(dataset)}\0".encode() + labels.astype("<i8").tobytes(), digest_size=16
    )
    if files := _files(dataset):
        content.update(content_digest([("", path) for path in files]).encode())
    records = ItemRecords(len(dataset), _First(dataset), name, content.hexdigest())
    if (targets == UNLABELLED).all():
        return Listing(records)
    return Listing(records, labels, classes)


class _First:
    """Reader of the image of an (image, label) pair."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, row: int) -> Encoded:
        image: Image.Image = self.dataset[row][0]
        return image


def _files(dataset: Any) -> list[Path]:
    """The files of a dataset's images, if it lists them; [] if it holds the images themselves."""
    for name in ("samples", "_samples", "_image_files", "_images"):
        listed = getattr(dataset, name, None)
        if isinstance(listed, list) and listed:
            files = [one[0] if isinstance(one, tuple) else one for one in listed]
            if isinstance(files[0], str | Path):
                return [Path(file) for file in files]
    return []


def _targets(dataset: Any) -> Rows:
    """All labels: from the attribute that most datasets have, otherwise one image at a time."""
    stored: Sequence[Any] | None = next(
        (getattr(dataset, name) for name in ("targets", "labels", "_labels") if hasattr(dataset, name)), None
    )
    try:
        values = np.asarray([dataset[row][1] for row in range(len(dataset))] if stored is None else stored)
        return values.astype(np.int64).reshape(len(dataset))
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"torchvision's {type(dataset).__name__} is not a classification dataset") from error
