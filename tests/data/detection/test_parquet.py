from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from atoll.core.errors import UserError
from atoll.data.detection.coco import read_coco
from atoll.data.detection.parquet import read_parquet_objects
from tests.shapes import write_coco, write_parquet


def test_the_boxes_are_those_of_the_same_images_in_cocos_json(tmp_path: Path) -> None:
    parquet = read_parquet_objects(write_parquet(tmp_path / "parquet"), "train")
    coco = read_coco(write_coco(tmp_path / "coco"), "train")
    assert parquet is not None
    assert coco is not None
    assert list(parquet.classes.values()) == list(coco.classes.values())
    for row in range(len(coco)):
        ours, theirs = parquet.target(row, masks=False), coco.target(row, masks=False)
        assert all(ours[name].equal(theirs[name]) for name in theirs)
        assert parquet.pixels(row, 3).equal(coco.pixels(row, 3))


def test_boxes_only_cannot_train_masks(tmp_path: Path) -> None:
    data = read_parquet_objects(write_parquet(tmp_path), "train")
    assert data is not None
    with pytest.raises(UserError, match="has a box and no segmentation"):
        data.require_masks()


def test_a_split_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_parquet_objects(write_parquet(tmp_path), "test") is None


def test_ids_of_images_are_those_of_their_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path) / "train.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("image_id", [[9, 8, 7, 6]]), path)
    data = read_parquet_objects(tmp_path, "train")
    assert data is not None
    assert [image["id"] for image in data.images] == [9, 8, 7, 6]
    assert [one["image_id"] for one in data.annotations] == [9, 9, 8, 8, 7, 7, 6, 6]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path) / "train.parquet"
    pq.write_table(pq.read_table(path).drop_columns("width"), path)
    with pytest.raises(UserError, match="has no column 'width'"):
        read_parquet_objects(tmp_path, "train")


def test_objects_may_be_a_struct_each_or_none_at_all(tmp_path: Path) -> None:
    path = write_parquet(tmp_path) / "train.parquet"
    expected = read_parquet_objects(tmp_path, "train")
    table = pq.read_table(path)
    place = table.column_names.index("objects")
    rows = [
        [dict(zip(row, values, strict=True)) for values in zip(*row.values(), strict=True)]
        for row in table.column("objects").to_pylist()
    ]
    pq.write_table(table.set_column(place, "objects", [[*rows[:2], None, *rows[3:]]]), path)
    data = read_parquet_objects(tmp_path, "train")
    assert data is not None
    assert expected is not None
    assert [len(data.objects(row)) for row in range(4)] == [2, 2, 0, 2]
    assert data.target(3, masks=False)["boxes"].equal(expected.target(3, masks=False)["boxes"])


def test_lists_of_unlike_lengths_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path) / "train.parquet"
    table = pq.read_table(path)
    objects = table.column("objects").to_pylist()
    objects[2]["category"].pop()
    place = table.column_names.index("objects")
    pq.write_table(table.set_column(place, "objects", [objects]), path)
    with pytest.raises(UserError, match=r"row 2 of .* of one length"):
        read_parquet_objects(tmp_path, "train")
