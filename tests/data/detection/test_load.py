from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.core.errors import UserError
from atoll.data.detection.load import load_detection
from tests.shapes import write_coco, write_parquet


def test_the_test_split_is_test_or_else_val(tmp_path: Path) -> None:
    train, test = load_detection(str(write_coco(tmp_path / "coco")))
    assert (len(train), len(test)) == (4, 2)
    train, test = load_detection(str(write_parquet(tmp_path / "parquet")))
    assert (len(train), len(test)) == (4, 2)
    assert test.name.endswith("val.parquet")
    assert len(load_detection(str(tmp_path / "coco"), "test", "train")[0]) == 2


def test_a_relative_path_is_found_under_the_folder_of_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_coco(tmp_path / "shapes")
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    assert len(load_detection("shapes")[0]) == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train2017", None), "of the split 'train2017'.*train_split=NAME"),
        (("train", "val2017"), "of the split 'val2017'.*test_split=NAME"),
    ],
)
def test_a_missing_split_is_named_with_where_it_belongs(
    tmp_path: Path, arguments: tuple[str, str | None], sentence: str
) -> None:
    write_coco(tmp_path)
    with pytest.raises(UserError, match=sentence):
        load_detection(str(tmp_path), *arguments)
    with pytest.raises(UserError, match="there is no file or folder"):
        load_detection(str(tmp_path / "nowhere"))


def test_splits_of_different_categories_are_refused(tmp_path: Path) -> None:
    path = write_coco(tmp_path) / "annotations" / "instances_test.json"
    tables = json.loads(path.read_text())
    tables["categories"][1]["name"] = "ring"
    path.write_text(json.dumps(tables))
    with pytest.raises(UserError, match="different categories, such as 7"):
        load_detection(str(tmp_path))


def test_plain_parquet_lists_the_categories_of_both_splits(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    for split, kept in (("train", 0), ("val", 1)):
        rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        for row in rows:
            row["objects"]["category"] = [kept] * len(row["objects"]["category"])
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    train, test = load_detection(str(tmp_path))
    assert train.classes == test.classes == {0: "0", 1: "1"}
    assert {one["category_id"] for one in train.annotations} == {0}
    assert len(train.annotations) == sum(len(train.objects(row)) for row in range(len(train)))
