"""Columns of tables, which mean the same in CSV and Parquet files."""

import csv
import warnings

import pyarrow as pa
import pytest

from atoll.core.errors import UserError
from atoll.data.options import DataOptions
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
