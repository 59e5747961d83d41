"""Encoded images on demand: what a source is before anything is decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import UserError
from atoll.core.files import content_digest, read_bytes
from atoll.data.decode import Encoded

Rows = NDArray[np.int64]


class Records(Protocol):
    """N encoded images, read by row. Implementations pickle small: worker processes get copies."""

    def __len__(self) -> int: ...

    def read(self, rows: Rows) -> list[Encoded]:
        """The images of these rows, in that order."""
        ...

    def describe(self, row: int) -> str:
        """What a user would look for: a file, or a row of a file."""
        ...

    def digest(self) -> str:
        """Hash of the content; the same on every machine."""
        ...


@dataclass(frozen=True)
class FileRecords:
    """Image files, named by their path relative to a root."""

    root: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, rows: Rows) -> list[Encoded]:
        """See `Records.read`."""
        return [read_bytes(self.root / self.names[row]) for row in rows]

    def describe(self, row: int) -> str:
        """The file's name below the root."""
        return self.names[row]

    def digest(self) -> str:
        """Of names and contents: the names carry classes and clients."""
        return content_digest([(name, self.root / name) for name in self.names])


@dataclass(frozen=True)
class ItemRecords:
    """Images that a library hands over one at a time, as bytes or already open."""

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
        """The row of the named collection."""
        return f"image {row} of {self.name}"

    def digest(self) -> str:
        """As told when this was made."""
        return self.content


@dataclass(frozen=True)
class SelectedRecords:
    """Some rows of other records."""

    base: Records
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Rows) -> list[Encoded]:
        """See `Records.read`."""
        return self.base.read(self.rows[rows])

    def describe(self, row: int) -> str:
        """As the base describes it."""
        return self.base.describe(int(self.rows[row]))

    def digest(self) -> str:
        """Of the base and of the choice."""
        digest = hashlib.blake2b(self.base.digest().encode(), digest_size=16)
        digest.update(self.rows.astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Listing:
    """A split before decoding: records, and what is known of each."""

    records: Records
    labels: Rows | None = None
    classes: list[str] = field(default_factory=list)
    columns: dict[str, Rows] = field(default_factory=dict)
    column_values: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.records)

    def select(self, rows: Rows) -> Listing:
        """The listing of some rows."""
        return replace(
            self,
            records=SelectedRecords(self.records, rows),
            labels=None if self.labels is None else self.labels[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
        )

    def renamed(self, other: Listing) -> Listing:
        """This listing with its classes and column values numbered as in `other`.

        Splits may lack classes that another has (a test folder without one class folder), so codes are
        matched by name; names that `other` lacks come after its own.
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
    union = list(dict.fromkeys([*onto, *names]))
    position = {name: code for code, name in enumerate(union)}
    return np.array([position[name] for name in names], dtype=np.int64)[codes], union


def encode(values: Sequence[str] | Rows) -> tuple[Rows, list[str]]:
    """Codes and sorted names of arbitrary values."""
    names, codes = np.unique(np.asarray(values), return_inverse=True)
    return codes.astype(np.int64).reshape(-1), [str(name) for name in names]


def reason(error: Exception | None) -> str:
    """The first line of another library's error, to be put into a sentence."""
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
