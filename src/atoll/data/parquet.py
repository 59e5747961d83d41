"""Parquet files and tables in the Hugging Face image convention.

An image column is ``struct<bytes: binary, path: string>`` (or plain binary) and contains encoded image files; the
schema's ``huggingface`` metadata contains the class names.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atoll.core.errors import UserError, did_you_mean
from atoll.core.files import content_digest, refuse_special
from atoll.core.text import few, first_line, plural
from atoll.data.decode import Encoded
from atoll.data.options import DataOptions, find_test, refuse_test_split
from atoll.data.records import Listing, Records, Rows, encode

_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_NO_NAMES = pa.schema([])
_HELD_BYTES = 2**28  # size of the encoded row groups that a process keeps in memory


class ParquetRecords:
    """Images in Parquet files, read one row group at a time.

    The most recently used row groups stay in memory, up to `_HELD_BYTES`, so that random batches do not read a row
    group for every image.

    Args:
        files: The Parquet files.
        column: Name of the image column.
    """

    def __init__(self, files: Sequence[Path], column: str) -> None:
        self.files = list(files)
        self.column = column
        sizes = [
            (file, group, metadata.row_group(group).num_rows)
            for file, metadata in enumerate(open_parquet(path).metadata for path in self.files)
            for group in range(metadata.num_row_groups)
        ]
        self._groups = [(file, group) for file, group, _ in sizes]
        self._starts = np.cumsum([0, *(rows for _, _, rows in sizes)])
        self._readers: dict[int, pq.ParquetFile] = {}
        self._held: OrderedDict[int, pa.ChunkedArray] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}, "_held": OrderedDict()}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, rows: Rows) -> list[Encoded]:
        """See `atoll.data.records.Records.read`."""
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        images: list[Encoded] = [b""] * len(rows)
        for group, positions in groupby(
            np.argsort(groups, kind="stable").tolist(), key=lambda i: int(groups[i])
        ):
            column = self._group(group)
            for i in positions:
                images[i] = encoded(column[int(rows[i] - self._starts[group])].as_py(), self.files[0].parent)
        return images

    def _group(self, group: int) -> pa.ChunkedArray:
        if group in self._held:
            self._held.move_to_end(group)
            return self._held[group]
        file, number = self._groups[group]
        if file not in self._readers:
            self._readers[file] = open_parquet(self.files[file])
        try:
            # One thread: Arrow's pool does not survive a fork.
            table = self._readers[file].read_row_group(number, columns=[self.column], use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"{self.files[file]} is damaged in row group {number}: {first_line(error)}"
            ) from error
        self._held[group] = table.column(self.column)
        while len(self._held) > 1 and sum(held.nbytes for held in self._held.values()) > _HELD_BYTES:
            self._held.popitem(last=False)
        return self._held[group]

    def describe(self, row: int) -> str:
        """Describe a row by its number in its file, counted from 0."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        file = self._groups[group][0]
        first = next(int(self._starts[i]) for i, (owner, _) in enumerate(self._groups) if owner == file)
        return f"row {row - first} of {self.files[file].name}"

    def digest(self) -> str:
        """Hash of the files' bytes, and of the image files that cells name."""
        return content_digest([("", path) for path in [*self.files, *self._named_files()]])

    def _named_files(self) -> list[Path]:
        """The image files that cells may name in place of bytes."""
        found: list[Path] = []
        for path in self.files:
            file = open_parquet(path)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                chunks = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
                data, names = (chunks.get(f"{self.column}.{field}") for field in ("bytes", "path"))
                if data is None or names is None:
                    continue  # not a struct: the cells hold bytes
                if data.statistics is None or data.statistics.null_count != 0:
                    table = file.read_row_group(number, columns=[names.path_in_schema], use_threads=False)
                    cells = table.column(self.column).to_pylist()
                    found += [self.files[0].parent / cell["path"] for cell in cells if cell and cell["path"]]
        return [path for path in found if path.is_file()]


def encoded(value: Any, folder: Path) -> bytes:
    """Image file in a cell, which holds bytes, or a struct of bytes or of a path; empty if there is none."""
    if isinstance(value, dict):
        path = value.get("path")
        value = value.get("bytes")
        if value is None and path and Path(folder, path).is_file():
            return Path(folder, path).read_bytes()
    return bytes(value or b"")


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises:
        UserError: The file is not a readable Parquet file.
    """
    try:
        return pq.ParquetFile(refuse_special(path), memory_map=True)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is not a readable Parquet file: {first_line(error)}") from error


def read_parquet(options: DataOptions, root: Path) -> tuple[Listing, Listing | None]:
    """Read the training and test splits at `root`: a file, or a folder of files named by split."""
    if root.is_file():
        refuse_test_split(root, options.test_split)
        return _listing([root], options), None
    train = split_files(root, options.train_split)
    if not train:
        found = ", ".join(sorted(path.name for path in root.glob("*.parquet"))) or "none"
        raise UserError(
            f"{root} holds no Parquet file of the split {options.train_split!r} (files there: {found})"
        )
    test = find_test(root, options, "Parquet file", lambda name: split_files(root, name)) or []
    return _listing(train, options, other=test), _listing(test, options, True, train) if test else None


def split_files(root: Path, split: str) -> list[Path]:
    """Files of a split in a folder, named in one of the usual ways; [] if there are none."""
    for pattern in (
        f"{split}.parquet",
        f"{split}-*.parquet",
        f"data/{split}-*.parquet",
        f"{split}/*.parquet",
    ):
        if files := sorted(root.glob(pattern)):
            return files
    return []


def _listing(
    files: list[Path], options: DataOptions, test: bool = False, other: Sequence[Path] = ()
) -> Listing:
    """List the split in some files, given those of the other split."""
    schemas = [open_parquet(path).schema_arrow for path in files]
    paired = list(zip(files, schemas, strict=True))
    for path, schema in paired:
        if schema.names != schemas[0].names:
            raise UserError(f"{path} has other columns than {files[0].name}; the files of a split must match")
    image, others = choose_columns(schemas[0], options, str(files[0]), test)
    for column in others:
        named = [(path, names) for path, schema in paired if (names := _class_names(schema, column))]
        for path, names in named[1:]:
            if names != named[0][1]:
                raise UserError(
                    f"{path} numbers the values of column {column!r} otherwise than {named[0][0].name}; write the "
                    "files of a split with the same names in one order"
                )
    tables = [open_parquet(path).read(columns=others, use_threads=False) for path in files]
    try:  # shards may differ in the width of a column's numbers, or hold nothing in one
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(
            f"the files of the split of {files[0].name} have columns of different types ({first_line(error)}); "
            "write them with the same types"
        ) from error
    beside = open_parquet(other[0]).schema_arrow if other else _NO_NAMES
    return table_listing(ParquetRecords(files, image), table, options, str(files[0]), test, beside)


def choose_columns(
    schema: pa.Schema, options: DataOptions, where: str, test: bool = False
) -> tuple[str, list[str]]:
    """Choose the image column and the columns of labels and attributes.

    Args:
        schema: The schema of the file or table.
        options: The recipe's ``[data]`` section.
        where: Name of the file or table, for error messages.
        test: Whether it is the test split, which need not contain the clients.

    Returns:
        The name of the image column, and the names of the other columns to read.

    Raises:
        UserError: A named column is missing, or no column holds images.
    """
    refuse_missing_columns(schema.names, options, where, test)
    images = [f.name for f in schema if _holds_images(f.type)]
    image = options.image_column or next(iter(images), None)
    if image is None or image not in images:
        raise UserError(
            f"{where}: column {image!r} does not hold images (bytes of image files)"
            if image
            else f"{where} has no column of images (bytes of image files) among {', '.join(schema.names)}"
        )
    return image, other_columns(schema, options)


def refuse_missing_columns(names: Sequence[str], options: DataOptions, where: str, test: bool) -> None:
    """Refuse a table that lacks a column which the recipe names; see `choose_columns`."""
    for option in ("image_column", "label_column", *(() if test else ("natural_column",))):
        name = getattr(options, option)
        if name is not None and name not in names:
            raise UserError(f"{where} has no column {name!r} (data.{option}); {did_you_mean(name, names)}")


def other_columns(schema: pa.Schema, options: DataOptions) -> list[str]:
    """Names of the columns of labels and attributes; see `choose_columns`."""
    label = _label_column(options, schema.names)
    wanted = {label if options.labels else None, options.natural_column} - {None}
    return [
        f.name
        for f in schema
        if f.name in wanted
        or (f.name != label and (pa.types.is_integer(f.type) or pa.types.is_boolean(f.type)))
    ]


def is_text(kind: pa.DataType) -> bool:
    """Whether a column's type is one of Arrow's types of text."""
    return any(is_kind(kind) for is_kind in _TEXT)


def _label_column(options: DataOptions, names: Sequence[str]) -> str | None:
    return options.label_column or ("label" if "label" in names else None)


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def table_listing(
    records: Records,
    table: pa.Table,
    options: DataOptions,
    where: str,
    test: bool = False,
    beside: pa.Schema = _NO_NAMES,
) -> Listing:
    """Build the listing of records whose labels and columns are in a table.

    Args:
        records: The records, one per row of the table.
        table: The labels and further columns.
        options: The recipe's ``[data]`` section.
        where: Name of the file or table, for error messages.
        test: Whether it is the test split, as for `choose_columns`.
        beside: The schema of the other split; its class names are used if this one has none.

    Raises:
        UserError: Labels are missing, out of range, or neither integers nor text.
    """
    label = _label_column(options, table.column_names) if options.labels else None
    required = {label, None if test else options.natural_column}
    labels: Rows | None = None
    classes: list[str] = []
    columns: dict[str, Rows] = {}
    column_values: dict[str, list[str]] = {}
    for name in table.column_names:
        if table.column(name).null_count and name not in required:
            continue  # an optional column with missing values is ignored
        given = _class_names(table.schema, name) or (_class_names(beside, name) if name == label else [])
        codes, names = _codes(name, table.column(name), given, where, records)
        if name == label:
            labels, classes = (codes, names) if names else encode(codes)
        else:
            columns[name] = codes
            if names:
                column_values[name] = names
    return Listing(records, labels, classes, columns, column_values)


def _codes(
    name: str, column: pa.ChunkedArray, names: list[str], where: str, records: Records
) -> tuple[Rows, list[str]]:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise UserError(
            f"{where}: column {name!r} is empty for {records.describe(row)} "
            f"({plural(column.null_count, 'such row')}); give each a value, or leave them out"
        )
    if pa.types.is_dictionary(column.type):  # pandas' categories
        column = column.cast(column.type.value_type)
    if is_text(column.type):
        return encode(column.to_pylist())
    if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        raise UserError(
            f"{where}: column {name!r} holds {column.type}; clients and labels must be integers or text"
        )
    codes = np.array(column.to_numpy(), dtype=np.int64)
    outside = (codes < 0) | (codes >= len(names))
    if names and outside.any():
        row = int(outside.argmax())
        raise UserError(
            f"{where}: column {name!r} is {codes[row]} for {records.describe(row)}, outside 0 to {len(names) - 1}, "
            f"the numbers of the classes that are named ({few(names)}); set data.labels = false if this split is "
            "not labelled"
        )
    return codes, names


def _class_names(schema: pa.Schema, column: str) -> list[str]:
    """Class names from the ``huggingface`` metadata; [] if there are none."""
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])
        return [str(name) for name in info["info"]["features"][column]["names"]]
    except (KeyError, TypeError, ValueError):
        return []
