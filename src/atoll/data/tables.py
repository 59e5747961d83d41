"""Tables of images, from CSV and Parquet files and the hub: the columns of labels, clients and splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from atoll.core.errors import UserError, did_you_mean, warn
from atoll.core.text import few, plural
from atoll.data.options import CLIENT, DataOptions, held_out_names
from atoll.data.parts import like_labels
from atoll.data.records import Listing, Records, Rows, encode

NO_NAMES = pa.schema([])
SPLIT = "split"  # the column whose values are splits
_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


class Columns(NamedTuple):
    """Names of a table's columns.

    Attributes:
        image: The column of images.
        read: Those of labels and attributes.
        unread: Those of text that are not read. One of them may name the clients.
    """

    image: str
    read: list[str]
    unread: list[str]


def choose_columns(schema: pa.Schema, options: DataOptions, where: str, test: bool = False) -> Columns:
    """Choose the image column and the columns of labels and attributes.

    Args:
        schema: The schema of the file or table.
        options: The recipe's ``[data]`` section.
        where: Name of the file or table, for error messages.
        test: Whether it is the test split, which need not contain the clients.

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
    return list_columns(schema, options, image)


def refuse_missing_columns(names: Sequence[str], options: DataOptions, where: str, test: bool) -> None:
    """Refuse a table that lacks a column which the recipe names; see `choose_columns`."""
    for option in ("image_column", "label_column", *(() if test else ("natural_column",))):
        name = getattr(options, option)
        if name is not None and name not in names:
            raise UserError(f"{where} has no column {name!r} (data.{option}); {did_you_mean(name, names)}")


def list_columns(schema: pa.Schema, options: DataOptions, image: str) -> Columns:
    """List the columns beside that of images; see `choose_columns`.

    All whole numbers are read. Of text, which takes longer, only the labels, `CLIENT` and the column that the
    recipe names.
    """
    label = _label_column(options, schema.names)
    named = {label if options.labels else None, options.natural_column}
    columns = Columns(image, [], [])
    for field in schema:
        number = pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)
        text = is_text(field.type)
        if field.name in named or (field.name != label and (number or (text and field.name == CLIENT))):
            columns.read.append(field.name)
        elif text and field.name not in (label, image, SPLIT):
            columns.unread.append(field.name)
    return columns


def is_text(kind: pa.DataType) -> bool:
    """Whether a column's type is one of Arrow's types of text, or of pandas' categories of text."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(is_kind(plain) for is_kind in _TEXT)


def _label_column(options: DataOptions, names: Sequence[str]) -> str | None:
    return options.label_column or ("label" if "label" in names else None)


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def table_listing(
    records: Records,
    table: pa.Table,
    chosen: Columns,
    options: DataOptions,
    where: str,
    test: bool = False,
    beside: pa.Schema = NO_NAMES,
) -> Listing:
    """Build the listing of records whose labels and columns are in a table.

    Args:
        records: The records, one per row of the table.
        table: The labels and further columns.
        chosen: The names of all columns.
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
    unread = list(chosen.unread)
    for name in chosen.read:
        if table.column(name).null_count and name not in required:
            unread.append(name)  # an optional column with missing values is ignored
            continue
        given = class_names(table.schema, name) or (class_names(beside, name) if name == label else [])
        codes, names = _codes(name, table.column(name), given, where, records)
        if name == label:
            labels, classes = (codes, names) if names else encode(codes)
        else:
            columns[name] = codes
            if names:
                column_values[name] = names
    if options.labels and label is None and not test and (likely := like_labels([*columns, *unread])):
        warn(
            f"{where}: no column is called 'label', so the images count as unlabelled; if {' or '.join(likely)} "
            f"holds their labels, set data.label_column = {likely[0]!r}, and otherwise data.labels = false"
        )
    # Once the recipe names the clients' column, others are no candidates.
    candidates = () if options.natural_column else tuple(unread)
    return Listing(records, labels, classes, columns, column_values, candidates)


def _codes(
    name: str, column: pa.ChunkedArray, names: list[str], where: str, records: Records
) -> tuple[Rows, list[str]]:
    column = _filled(name, column, where, records)
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


def _filled(name: str, column: pa.ChunkedArray, where: str, records: Records) -> pa.ChunkedArray:
    """A column that has a value in each row; pandas' categories become their values."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise UserError(
            f"{where}: column {name!r} is empty for {records.describe(row)} "
            f"({plural(column.null_count, 'such row')}); give each a value, or leave them out"
        )
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def has_splits(schema: pa.Schema) -> bool:
    """Whether a table says in a column of text to which split each row belongs."""
    return SPLIT in schema.names and is_text(schema.field(SPLIT).type)


def split_listing(
    listing: Listing, table: pa.Table, options: DataOptions, where: str
) -> tuple[Listing, Listing | None]:
    """Split the listing of a file by its text column ``split``; without one, all images are for training.

    Args:
        listing: The listing of all rows.
        table: The column, if the file has it, and perhaps others.
        options: The recipe's ``[data]`` section.
        where: Name of the file, for messages.

    Raises:
        UserError: The column is empty in a row, or lacks a split that the recipe names.
    """
    if not has_splits(table.schema):
        if options.test_split is not None:
            raise UserError(
                f"{where} is one file and has no text column {SPLIT!r}, so it holds no split "
                f"{options.test_split!r}; leave data.test_split out, or give a folder with a file for each split "
                "in data.path"
            )
        return listing, None
    splits = np.array(_filled(SPLIT, table.column(SPLIT), where, listing.records).to_pylist())
    counts = dict(zip(*np.unique(splits, return_counts=True), strict=True))
    test = next((name for name in held_out_names(options.test_split) if name in counts), None)
    for option, wanted in (("train_split", options.train_split), ("test_split", test or options.test_split)):
        if wanted is not None and wanted not in counts:
            found = few([repr(str(name)) for name in counts], 5)
            raise UserError(f"{where}: column {SPLIT!r} holds {found}, and not {wanted!r}; set data.{option}")
    # A second held-out split with a usual name is no mistake.
    known = {options.train_split, options.test_split, DataOptions.train_split, *held_out_names(None)}
    if unread := [f"{str(name)!r} ({count})" for name, count in counts.items() if name not in known]:
        warn(
            f"{where}: column {SPLIT!r} also holds {few(unread, 5)}, and these rows belong to no split that is "
            "read; if they should, correct the values, or set data.train_split and data.test_split"
        )
    train = listing.select(np.flatnonzero(splits == options.train_split))
    return train, listing.select(np.flatnonzero(splits == test)) if test is not None else None


def class_names(schema: pa.Schema, column: str) -> list[str]:
    """Class names from the ``huggingface`` metadata; [] if there are none."""
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])
        return [str(name) for name in info["info"]["features"][column]["names"]]
    except (KeyError, TypeError, ValueError):
        return []
