"""Columns of tables, which mean the same in CSV and Parquet files."""

import csv
import warnings

import pyarrow as pa
import pytest

from atoll.core.errors import UserError
from atoll.data.options import DataOptions, PartitionOptions
from atoll.data.partition.make import partition_images
from atoll.data.sources import load_data


@pytest.fixture(params=["csv", "parquet"])
def load(request, tmp_path, digits, encode_png, write_parquet):
    """Writes a table of images with the given columns, None for an empty cell, and loads it."""

    def write_and_load(options=None, **columns):
        size = len(next(iter(columns.values())))
        files = [encode_png(pixels) for pixels in digits[0][:size]]
        path = tmp_path / f"list.{request.param}"
        if request.param == "parquet":
            write_parquet(path, files, **{name: pa.array(values) for name, values in columns.items()})
        else:
            for row, data in enumerate(files):
                (tmp_path / f"{row}.png").write_bytes(data)
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(["file", *columns])
                csv.writer(file).writerows(
                    [f"{row}.png", *cells] for row, cells in enumerate(zip(*columns.values(), strict=True))
                )
        settings = {"image_size": 8, "channels": 1, "test_fraction": 0, **(options or {})}
        return load_data(DataOptions(request.param, str(path), **settings), seed=0)

    return write_and_load


def test_a_column_says_the_split(load):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a second held-out split is usual
        splits = load(split=["train", "test", "val"] * 2, label=[0, 1, 2] * 2)
    assert (splits.train.labels.tolist(), splits.test.labels.tolist()) == ([0, 0], [1, 1])


def test_a_row_without_a_split_is_refused(load):
    with pytest.raises(UserError, match=r"column 'split' is empty for .* \(2 such rows\); give each a value"):
        load(split=["train", None, "test", None], label=[0, 1, 0, 1])


def test_values_that_are_no_split_are_told_with_their_rows(load):
    told = (
        r"column 'split' also holds 'train ' \(1\), 'valid' \(2\), and these rows .* no split .* data\.test"
    )
    with pytest.warns(UserWarning, match=told):
        splits = load(split=["train", "valid", "test", "valid", "train "], label=[0, 1, 0, 1, 0])
    assert (len(splits.train), len(splits.test)) == (1, 1)
    with pytest.raises(UserError, match=r"'train', 'valid', and not 'val'; set data\.test_split"):
        load({"test_split": "val"}, split=["train", "valid"], label=[0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load({"test_split": "valid"}, split=["train", "valid", "test"], label=[0, 0, 0]).test) == 1


def clients(splits):
    partition = partition_images(splits.train, PartitionOptions("natural"), seed=0)
    return partition.names, partition.sizes


def test_a_text_column_client_names_the_natural_clients(load):
    """A whole number beside it, such as a year, does not."""
    splits = load(label=[0, 1, 0], client=["north", "south", "north"], year=[1, 1, 1])
    assert clients(splits) == (["north", "south"], [2, 1])


def test_natural_clients_are_not_guessed_among_columns(load):
    splits = load(label=[0, 1, 0], hospital=["north", "south", "north"], age=[40, 50, 60])
    with pytest.raises(
        UserError,
        match=r"among several columns; set partition\.column \(and data\.natural_column, if it is hospital\) "
        "to the column of the clients: age, hospital$",
    ):
        clients(splits)
    splits = load(label=[0, 1, 0], client=["north", None, "north"], age=[40, 50, 60])  # too few names
    with pytest.raises(UserError, match=r"among several columns.*: age, client$"):
        clients(splits)
    with pytest.raises(UserError, match=r"a column of texts in data\.natural_column \(hospital, town\); for"):
        clients(load(label=[0, 1], hospital=["north", "south"], town=["a", "b"]))


def test_the_only_column_names_the_natural_clients(load):
    assert clients(load(label=[0, 1, 0], site=[7, 9, 7])) == (["site=7", "site=9"], [2, 1])
    named = {"natural_column": "site"}
    splits = load(named, label=[0, 1, 0], site=["a", "b", "a"], town=["x", "y", "z"])
    assert clients(splits) == (["a", "b"], [2, 1])


@pytest.mark.parametrize(("name", "values"), [("class", ["cat", "dog", "cat"]), ("Label", [0, 1, 0])])
def test_a_column_that_may_hold_the_labels_is_told(load, name, values):
    told = (
        rf"no column is called 'label', .*; if {name} holds their labels, set data\.label_column = '{name}'"
    )
    columns = {name: values, "age": [1, 2, 3]}
    with pytest.warns(UserWarning, match=told) as caught:
        assert load(**columns).train.labels is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load({"label_column": name}, **columns).train.labels.tolist() == [0, 1, 0]
        assert load({"labels": False}, **columns).train.labels is None
        assert load(age=[1, 2, 3]).train.labels is None
