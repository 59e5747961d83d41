"""Image files that a CSV file lists, each with its label and further columns."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
from pyarrow.csv import ConvertOptions, ParseOptions

from atoll.core.errors import UserError
from atoll.core.files import content_digest
from atoll.core.text import few, first_line, plural
from atoll.data.options import DataOptions, find_test
from atoll.data.records import FileRecords, Listing
from atoll.data.tables import is_text, list_columns, refuse_missing_columns, split_listing, table_listing

_SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t"


@dataclass(frozen=True)
class ListedRecords(FileRecords):
    """Image files in the order of a CSV file.

    Attributes:
        root: The CSV file's folder.
        names: Names as the CSV file has them, relative to the root or absolute.
        table: The CSV file.
    """

    table: Path

    def digest(self) -> str:
        """Hash of the CSV file, which holds the labels, and of the names and contents."""
        return content_digest([("", self.table), *((name, self.root / name) for name in self.names)])


def read_csv(options: DataOptions, root: Path) -> tuple[Listing, Listing | None]:
    """Read the training and test splits at `root`: a CSV file, or a folder with one for each split.

    Raises:
        UserError: There is no such file, a column or an image is missing, or a label is.
    """
    if root.is_dir() and (train := _file_of(root, options.train_split)):
        test = find_test(root, options, "CSV file", lambda name: _file_of(root, name))
        listing = _listing(train, _read(train), options)
        return listing, _listing(test, _read(test), options, test=True) if test else None
    path = root if root.is_file() else _only_file(root, options)
    table = _read(path)
    return split_listing(_listing(path, table, options), table, options, str(path))


def _file_of(root: Path, split: str) -> Path | None:
    """The CSV file of a split: ``SPLIT.csv``, or the only one in the folder ``SPLIT``."""
    named = [path for suffix in _SUFFIXES if (path := root / f"{split}{suffix}").is_file()]
    found = named or (_files(root / split) if (root / split).is_dir() else [])
    return found[0] if len(found) == 1 else None


def _only_file(root: Path, options: DataOptions) -> Path:
    found = _files(root)
    if len(found) != 1:
        there = few([path.name for path in found]) or "none"
        raise UserError(
            f"{root} holds no CSV file of the split {options.train_split!r} (files there: {there}); set "
            "data.train_split, or give the file in data.path"
        )
    return found[0]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and path.is_file())


def _listing(path: Path, table: pa.Table, options: DataOptions, test: bool = False) -> Listing:
    refuse_missing_columns(table.column_names, options, str(path), test)
    image = options.image_column or _image_column(table, path)
    if not is_text(table.schema.field(image).type):
        raise UserError(f"{path}: column {image!r} does not hold names of image files; set data.image_column")
    names = table.column(image).to_pylist()
    if None in names:
        raise UserError(
            f"{path}: column {image!r} is empty in row {names.index(None) + 1}, counted from 1 below the row of "
            f"names ({plural(names.count(None), 'such row')}); name an image in each, or leave them out"
        )
    # Unlike `atoll.core.files.is_file`, this takes a name that is too long for one that does not exist.
    if missing := [name for name in names if not os.path.isfile(path.parent / name)]:
        raise UserError(
            f"{path} lists {len(missing)} of {len(names)} images that do not exist: {few(missing)}; the names in "
            f"column {image!r} are relative to {path.parent}"
        )
    records = ListedRecords(path.parent, tuple(names), path)
    columns = list_columns(table.schema, options, image)
    return table_listing(records, table, columns, options, str(path), test)


def _read(path: Path) -> pa.Table:
    try:
        with path.open("rb") as file:
            counts = Counter(file.readline().decode("utf-8-sig"))
        table = pyarrow.csv.read_csv(
            path,
            parse_options=ParseOptions(
                delimiter=max(_DELIMITERS, key=lambda sign: counts[sign]), newlines_in_values=True
            ),
            # Only an empty cell is missing: a class may be called NA or null.
            convert_options=ConvertOptions(strings_can_be_null=True, null_values=[""]),
        )
    except UnicodeDecodeError:
        table = None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is not a readable CSV file: {first_line(error)}") from error
    # Arrow takes text in another encoding for bytes.
    if table is None or any(pa.types.is_binary(kind) for kind in table.schema.types):
        raise UserError(f"{path} is not in UTF-8; save it as CSV in UTF-8")
    if twins := [name for name, count in Counter(table.column_names).items() if count > 1]:
        raise UserError(f"{path} has several columns called {few(map(repr, twins))}; rename them")
    if not len(table):
        raise UserError(f"{path} has no row below the row of names; add one for each image")
    return table


def _image_column(table: pa.Table, path: Path) -> str:
    """The first column whose first value is a file."""
    names: list[str] = table.column_names
    for name in names:
        if is_text(table.schema.field(name).type) and len(table):
            first = table.column(name)[0].as_py()
            if first and os.path.isfile(path.parent / first):
                return name
    raise UserError(
        f"{path}: no column names image files relative to {path.parent} in its first row (columns: "
        f"{', '.join(names)}); set data.image_column"
    )
