"""Parquet files and tables in the Hugging Face image convention.

An image column is ``struct<bytes: binary, path: string>`` (or plain binary) and contains encoded image files; the
schema's ``huggingface`` metadata contains the class names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atoll.core.errors import UserError
from atoll.core.files import content_digest, refuse_special
from atoll.core.text import first_line
from atoll.data.decode import Encoded
from atoll.data.options import DataOptions, find_test
from atoll.data.records import Listing, Rows
from atoll.data.tables import (
    NO_NAMES,
    SPLIT,
    choose_columns,
    class_names,
    has_splits,
    split_listing,
    table_listing,
)

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
        file = open_parquet(root)
        columns = [SPLIT] if has_splits(file.schema_arrow) else []
        return split_listing(
            _listing([root], options), file.read(columns=columns, use_threads=False), options, str(root)
        )
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
    columns = choose_columns(schemas[0], options, str(files[0]), test)
    for column in columns.read:
        named = [(path, names) for path, schema in paired if (names := class_names(schema, column))]
        for path, names in named[1:]:
            if names != named[0][1]:
                raise UserError(
                    f"{path} numbers the values of column {column!r} otherwise than {named[0][0].name}; write the "
                    "files of a split with the same names in one order"
                )
    tables = [open_parquet(path).read(columns=columns.read, use_threads=False) for path in files]
    try:  # shards may differ in the width of a column's numbers, or hold nothing in one
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(
            f"the files of the split of {files[0].name} have columns of different types ({first_line(error)}); "
            "write them with the same types"
        ) from error
    beside = open_parquet(other[0]).schema_arrow if other else NO_NAMES
    records = ParquetRecords(files, columns.image)
    return table_listing(records, table, columns, options, str(files[0]), test, beside)
