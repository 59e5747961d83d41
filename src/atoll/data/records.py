"""Encoded images, read on demand: the contents of a source before decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import UserError
from atoll.core.files import content_digest, hash_bytes, read_bytes
from atoll.data.decode import Encoded

Rows = NDArray[np.int64]
UNLABELLED = -1  # the label of images without one, as in torchvision's STL-10


class Records(Protocol):
    """N encoded images, read by row. Implementations must pickle to few bytes: worker processes receive copies."""

    def __len__(self) -> int: ...

    def read(self, rows: Rows) -> list[Encoded]:
        """Read the images of these rows, in that order."""
        ...

    def describe(self, row: int) -> str:
        """Describe a row for the user: a file, or a row of a file."""
        ...

    def digest(self) -> str:
        """Hash of the content; the same on every machine."""
        ...


@dataclass(frozen=True)
class FileRecords:
    """Image files, named by their path relative to a root.

    Attributes:
        root: The root folder.
        names: POSIX paths relative to the root.
    """

    root: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, rows: Rows) -> list[Encoded]:
        """See `Records.read`."""
        return [read_bytes(self.root / self.names[row]) for row in rows]

    def describe(self, row: int) -> str:
        """Describe a row by the file's path relative to the root."""
        return self.names[row]

    def digest(self) -> str:
        """Hash of names and contents; the names contain classes and clients."""
        return content_digest([(name, self.root / name) for name in self.names])


@dataclass(frozen=True)
class ItemRecords:
    """Images that a library provides one at a time, as bytes or already opened.

    Attributes:
        size: Number of images.
        item: Returns the image of a row.
        name: Name of the collection, for error messages.
        content: Hash of the content.
    """

    size: int
    item: Callable[[int], Encoded]
    name: str
    content: str

    def __len__(self) -> int:
        return self.size

    def read(self, rows: Rows) -> list[Encoded]:
        """See `Records.read`."""
        try:
            return [self.item(int(row)) for row in rows]
        except OSError as error:
            raise UserError(f"cannot read {self.name}: {error}") from error

    def describe(self, row: int) -> str:
        """Describe a row by its number in the named collection."""
        return f"image {row} of {self.name}"

    def digest(self) -> str:
        """Hash of the content, as given to the constructor."""
        return self.content


@dataclass(frozen=True)
class SelectedRecords:
    """Selection of rows of other records.

    Attributes:
        base: The other records.
        rows: The selected rows.
    """

    base: Records
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Rows) -> list[Encoded]:
        """See `Records.read`."""
        return self.base.read(self.rows[rows])

    def describe(self, row: int) -> str:
        """Describe a row as the base does."""
        return self.base.describe(int(self.rows[row]))

    def digest(self) -> str:
        """Hash of the base and of the selection."""
        return hash_bytes(self.base.digest().encode() + self.rows.astype("<i8").tobytes())


@dataclass(frozen=True)
class Listing:
    """Split before decoding: records with labels and further columns.

    Attributes:
        records: The encoded images.
        labels: (N,) int64, or None if there are no labels.
        classes: Class names by label; empty without labels.
        columns: Further integer columns, each (N,) int64.
        column_values: Names of a column's values, for columns with names.
        unread: Names of columns that may hold clients and were not read.
    """

    records: Records
    labels: Rows | None = None
    classes: list[str] = field(default_factory=list)
    columns: dict[str, Rows] = field(default_factory=dict)
    column_values: dict[str, list[str]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def select(self, rows: Rows) -> Listing:
        """Select some rows."""
        return replace(
            self,
            records=SelectedRecords(self.records, rows),
            labels=None if self.labels is None else self.labels[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
        )

    def renamed(self, other: Listing) -> Listing:
        """Renumber the classes and column values as in `other`.

        A split may lack classes that another one has (for example a test folder without one of the class folders),
        so codes are matched by name; names that `other` lacks are numbered after those of `other`.

        Raises:
            UserError: The splits' classes differ, and two of them have the same name.
        """
        labels, classes = self.labels, self.classes
        if labels is not None and other.labels is not None:
            labels, classes = _recode(labels, classes, other.classes)
        columns, column_values = dict(self.columns), dict(self.column_values)
        for name in self.column_values.keys() & other.column_values.keys():
            columns[name], column_values[name] = _recode(
                columns[name], column_values[name], other.column_values[name]
            )
        return replace(self, labels=labels, classes=classes, columns=columns, column_values=column_values)


def _recode(codes: Rows, names: list[str], onto: list[str]) -> tuple[Rows, list[str]]:
    if names == onto:
        return codes, names
    refuse_twins(names)
    refuse_twins(onto)
    union = list(dict.fromkeys([*onto, *names]))
    position = {name: code for code, name in enumerate(union)}
    return np.array([position[name] for name in names], dtype=np.int64)[codes], union


def refuse_twins(names: Sequence[str]) -> None:
    """Refuse classes that must be matched by name if two of them have the same name."""
    if len(set(names)) < len(names):
        twin = next(name for name in names if names.count(name) > 1)
        raise UserError(
            f"two classes are called {twin!r}, so the classes of two sources, which differ, cannot be matched by "
            "name; give each class a name of its own"
        )


def encode(values: Sequence[str] | Rows) -> tuple[Rows, list[str]]:
    """Encode arbitrary values as integers; return the codes and the sorted names."""
    names, codes = np.unique(np.asarray(values), return_inverse=True)
    return codes.astype(np.int64).reshape(-1), [str(name) for name in names]
