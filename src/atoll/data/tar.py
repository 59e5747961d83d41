"""Tar files in WebDataset's convention: ``KEY.jpg`` with ``KEY.cls`` or ``KEY.json``, in any number of shards.

A key is a member's name up to the first dot after its last slash. Members are found by their headers and read in
place by offset and size; nothing is extracted.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from atoll.core.errors import UserError, warn
from atoll.core.files import content_digest, refuse_special
from atoll.core.text import few, first_line
from atoll.data.decode import Encoded
from atoll.data.folders import IMAGE_SUFFIXES, SPLITS, is_image
from atoll.data.options import DataOptions, find_test, refuse_test_split
from atoll.data.records import Listing, Rows, encode

_LABELS = (".cls", ".json")
_MOST_BYTES = 2**20  # of a label's member
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


class _Place(NamedTuple):
    """The place of a member's bytes."""

    file: int
    offset: int
    size: int


@dataclass(frozen=True)
class TarRecords:
    """Images in tar files, read by offset.

    Attributes:
        files: The tar files.
        names: Names of the members.
        places: File, offset and size of each, (N, 3).
    """

    files: tuple[Path, ...]
    names: tuple[str, ...]
    places: Rows

    def __len__(self) -> int:
        return len(self.names)

    def read(self, rows: Rows) -> list[Encoded]:
        """See `atoll.data.records.Records.read`."""
        images: list[Encoded] = [b""] * len(rows)
        wanted = self.places[rows]
        for number in np.unique(wanted[:, 0]).tolist():
            with _opened(self.files[number]) as file:
                for i in np.flatnonzero(wanted[:, 0] == number).tolist():
                    images[i] = _read(file, _Place(*wanted[i].tolist()))
        return images

    def describe(self, row: int) -> str:
        """Describe a row by its member and its file."""
        return f"{self.names[row]} of {self.files[self.places[row, 0]].name}"

    def digest(self) -> str:
        """Hash of the files' bytes."""
        return content_digest([("", path) for path in self.files])


def read_tar(options: DataOptions, root: Path) -> tuple[Listing, Listing | None]:
    """Read the training and test splits at `root`: a tar file, or a folder of them.

    A shard belongs to the split that is a word of its name (``train-000000.tar``) or the folder that it is in
    (``train/000000.tar``). If no name in the folder is that of a split, all shards are for training.

    Raises:
        UserError: There are no shards, a shard is damaged or belongs to both splits, or labels are missing.
    """
    if root.is_file():
        refuse_test_split(root, options.test_split)
        return _listing([root], options), None
    found = sorted([*root.glob("*.tar"), *root.glob("*/*.tar")])
    if not found:
        raise UserError(f"{root} holds no .tar files")

    def of_split(split: str) -> list[Path]:
        return [path for path in found if split in _words(path, root)]

    train = of_split(options.train_split)
    named = options.train_split != DataOptions.train_split or options.test_split is not None
    test = [] if named and not train else find_test(root, options, ".tar file", of_split) or []
    if not train and (named or test):
        raise UserError(
            f"{root} holds no .tar file of the split {options.train_split!r}; set data.train_split"
        )
    like = [
        str(file.relative_to(root))
        for file in found
        if SPLITS & {word.lower() for word in _words(file, root)}
    ]
    if not train and like:
        warn(
            f"{root} holds no .tar file of the split {options.train_split!r}, so all are read as one split; if "
            f"{few(like)} belong to splits, set data.train_split and data.test_split to those words of their names"
        )
    if both := set(train) & set(test):
        raise UserError(
            f"{min(both)} belongs to the training split and to the test split by its name; rename it"
        )
    return _listing(train or found, options), _listing(test, options) if test else None


def _words(path: Path, root: Path) -> set[str]:
    return {path.stem, *re.split(r"[^A-Za-z0-9]+", path.stem), *path.relative_to(root).parts[:-1]}


def _listing(files: Sequence[Path], options: DataOptions) -> Listing:
    images: list[tuple[str, _Place]] = []
    labels: list[Any] = []
    attributes: list[Any] = []
    cut = ""  # a member that is no image because its key ends early
    for number, path in enumerate(files):
        samples = _samples(number, path)
        with _opened(path) as file:
            for key, members in samples.items():
                image = [suffix for suffix in members if suffix in IMAGE_SUFFIXES]
                if not image:
                    cut = cut or next((f"{key}{suffix}" for suffix in members if is_image(suffix[1:])), "")
                    continue
                if len(image) > 1:
                    raise UserError(
                        f"{path}: {key} has several images, {' and '.join(image)}; keep one for each key"
                    )
                images.append((f"{key}{image[0]}", members[image[0]]))
                label, attribute = _about(file, f"{path}: {key}", members, options)
                labels.append(label)
                attributes.append(attribute)
    if not images:
        early = (
            f"; a key ends at the first dot of a name, so {cut} is not taken for one: write dashes"
            if cut
            else ""
        )
        raise UserError(f"{files[0]} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}){early}")
    records = TarRecords(
        tuple(files),
        tuple(name for name, _ in images),
        np.array([place for _, place in images], dtype=np.int64),
    )
    wanted = f"{options.label_column!r} in KEY.json (data.label_column)" if options.label_column else "label"
    found = _column(labels, records, wanted) if options.labels else None
    if options.labels and options.label_column and found is None:
        raise UserError(f"{files[0]}: no image has a {wanted}")
    codes, classes = found or (None, [])
    if options.natural_column is None:
        return Listing(records, codes, classes)
    name = options.natural_column
    column = _column(attributes, records, f"{name!r} in KEY.json (data.natural_column)")
    if column is None:
        raise UserError(f"{files[0]}: no image has a {name!r} in KEY.json (data.natural_column)")
    return Listing(records, codes, classes, {name: column[0]}, {name: column[1]})


def _samples(number: int, path: Path) -> dict[str, dict[str, _Place]]:
    """The members of a tar file by key and suffix."""
    samples: dict[str, dict[str, _Place]] = defaultdict(dict)
    last, size = "its start", path.stat().st_size
    try:
        with tarfile.open(refuse_special(path), "r:") as tar:
            for member in tar:
                folder, slash, name = member.name.rpartition("/")
                stem, dot, rest = name.partition(".")
                suffix = f".{rest.lower()}"
                # A sparse file's bytes are in several places.
                if member.issparse() and suffix in (*IMAGE_SUFFIXES, *_LABELS):
                    raise UserError(
                        f"{path} holds {member.name} as a sparse file; write it without tar's --sparse"
                    )
                place = _Place(number, member.offset_data, member.size)
                if place.offset + place.size > size:
                    raise UserError(f"{path} is damaged: {member.name} is cut off")
                if member.type in _PLAIN and stem and dot:
                    if suffix in samples[f"{folder}{slash}{stem}"]:
                        raise UserError(f"{path} holds {member.name} twice; keep one")
                    samples[f"{folder}{slash}{stem}"][suffix] = place
                last = member.name
            end = tar.offset
        with path.open("rb") as file:  # tarfile treats a damaged header like the end
            file.seek(end - end % tarfile.BLOCKSIZE)
            left = list({any(block) for block in iter(lambda: file.read(2**20), b"")})
    except (tarfile.TarError, OSError) as error:
        raise UserError(
            f"{path} is not a readable tar file without compression: {first_line(error)}"
        ) from error
    if not left:
        raise UserError(f"{path} is cut off after {last}: it has no end mark; write it again")
    if left != [False]:
        raise UserError(f"{path} is damaged after {last}, or more was appended to it; write it again")
    return samples


def _about(file: IO[bytes], name: str, members: dict[str, _Place], options: DataOptions) -> tuple[Any, Any]:
    """Label and natural column of a sample; None for what it does not have."""
    said: dict[str, Any] = {}
    label = None
    for suffix in _LABELS:
        if suffix not in members:
            continue
        if members[suffix].size > _MOST_BYTES:
            raise UserError(f"{name}{suffix} has {members[suffix].size} bytes, too many for a label")
        try:
            text = _read(file, members[suffix]).decode()
            if suffix == ".cls":
                label = text.strip()
            else:
                table = json.loads(text)
                said = table if isinstance(table, dict) else {"label": table}
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{name}{suffix} cannot be read: {first_line(error)}") from error
    if label is None or options.label_column is not None:
        label = said.get(options.label_column or "label")
    return label, said.get(options.natural_column or "")


def _column(values: list[Any], records: TarRecords, what: str) -> tuple[Rows, list[str]] | None:
    """Codes and names of values, sorted as numbers if all are; None if there are none."""
    missing = [row for row, value in enumerate(values) if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        first = records.describe(missing[0])
        raise UserError(f"{first} has no {what}, which others have; add it, or leave all out")
    wrong = next((row for row, value in enumerate(values) if not isinstance(value, str | int)), None)
    if wrong is not None:
        raise UserError(
            f"{records.describe(wrong)}: {what} is {values[wrong]!r}; it must be an integer or text"
        )
    texts = [str(value) for value in values]
    numbers = all(re.fullmatch(r"-?\d{1,18}", text) for text in texts)
    return encode(np.array([int(text) for text in texts]) if numbers else texts)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file; an error while it is open becomes a sentence."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _read(file: IO[bytes], place: _Place) -> bytes:
    file.seek(place.offset)
    return file.read(place.size)
