from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask

from atoll.core.errors import UserError
from atoll.data.detection.coco import read_coco
from atoll.data.detection.objects import DetectionSet, draw_mask
from tests.shapes import SIDE, Tables, draw, write_coco

Change = Callable[[Tables], None]


def read(folder: Path, change: Change = lambda tables: None) -> DetectionSet:
    return train_split(write_coco(folder, change=change))


def train_split(folder: Path) -> DetectionSet:
    found = read_coco(folder, "train")
    assert found is not None
    return found


def test_a_target_holds_corners_labels_and_masks_of_the_drawing(tmp_path: Path) -> None:
    data = read(tmp_path)
    for row in range(len(data)):
        image, objects, masks = draw(row)
        target = data.target(row, masks=True)
        corners = [[x, y, x + w, y + h] for x, y, w, h in (one["bbox"] for one in objects)]
        assert target["boxes"].tolist() == corners
        assert target["labels"].tolist() == [1, 2]  # of the ids 3 and 7
        assert np.array_equal(target["masks"].numpy(), np.stack(masks))
        assert np.array_equal(data.pixels(row, 3).permute(1, 2, 0).numpy(), np.asarray(image))
        assert np.array_equal(data.pixels(row, 1)[0].numpy(), np.asarray(image.convert("L")))


@pytest.mark.parametrize(
    "segmentation",
    [[[2, 1, 5, 1, 5, 3, 2, 3]], {"size": [4, 6], "counts": [9, 2, 2, 2, 2, 2, 5]}],
    ids=["polygon", "runs"],
)
def test_a_mask_is_drawn_where_its_segmentation_says(segmentation: object) -> None:
    expected = torch.zeros(4, 6, dtype=torch.uint8)
    expected[1:3, 2:5] = 1  # runs go down the columns: 9 = 2 columns of 4, and one row
    assert torch.equal(draw_mask(segmentation, 4, 6), expected)


def test_crowds_are_measured_against_but_not_learned(tmp_path: Path) -> None:
    def change(tables: Tables) -> None:
        tables["annotations"][0]["iscrowd"] = 1
        for one in tables["annotations"][2:4]:
            one["iscrowd"] = 1

    data = read(tmp_path, change)
    assert data.target(0, masks=False)["labels"].tolist() == [2]
    assert data.with_objects() == [0, 2, 3]
    assert len(data.coco()["annotations"]) == 8


def test_ids_of_annotations_count_from_one_and_areas_are_filled_in(tmp_path: Path) -> None:
    data = read(tmp_path, lambda tables: tables["annotations"][1].update(area=17.5))
    assert [one["id"] for one in data.annotations] == list(range(1, 9))
    width, height = data.annotations[0]["bbox"][2:]
    assert [one["area"] for one in data.annotations[:2]] == [width * height, 17.5]


def test_a_box_that_rounding_let_out_is_clipped_and_one_without_area_left_out(tmp_path: Path) -> None:
    def change(tables: Tables) -> None:
        tables["annotations"][0]["bbox"] = [-0.5, 0, 10, SIDE + 0.25]
        tables["annotations"][1]["bbox"] = [5, 5, 0, 10]

    data = read(tmp_path, change)
    assert data.annotations[0]["bbox"] == [0, 0, 9.5, SIDE]
    assert data.left_out == 1
    assert len(data.annotations) == 7


def test_a_box_that_rounding_would_close_is_left_out(tmp_path: Path) -> None:
    data = read(tmp_path, _box(40, 40, 1e-9, 20))
    assert data.left_out == 1
    left, top, right, bottom = torch.cat(
        [data.target(row, masks=False)["boxes"] for row in range(len(data))]
    ).unbind(1)
    assert (right > left).all()
    assert (bottom > top).all()


def _box(*box: float) -> Change:
    return lambda tables: tables["annotations"][5].update(bbox=list(box))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tables: tables["annotations"].clear(), "holds no boxes to learn from"),
        (_box(80, 10, 30, 10), r"annotation 6 \(id 5\) has the box \[80, 10, 30, 10\].* not inside .* 96×96"),
        (_box(-3, 10, 30, 10), "not inside its image"),
        (_box(20, 10, -5, 10), "not inside its image"),
        (_box(20, 10, 5), r"a box is \[x, y, width, height\]"),
        (_box(20, 10, 5, float("nan")), r"a box is \[x, y, width, height\]"),
        (lambda tables: tables["annotations"][5].pop("bbox"), "has the box None"),
        (
            lambda tables: tables["annotations"][2].update(category_id=4),
            "unknown category 4; .* listed: 3, 7",
        ),
        (
            lambda tables: tables["annotations"][2].update(image_id=9),
            "names the image 9, which is not listed",
        ),
        (lambda tables: tables["images"][1].update(id=100), "two images have the same id"),
        (lambda tables: tables["annotations"][5].update(bbox=[None, 1, 2, 3]), "has the box .None, 1, 2, 3"),
        (lambda tables: tables["annotations"][5].update(bbox=["1", 1, 2, 3]), "has the box .'1', 1, 2, 3"),
        (
            lambda tables: tables["annotations"][5].update(image_id=[1]),
            r"names the image \[1\], which is not",
        ),
        (lambda tables: tables["annotations"][5].update(iscrowd="no"), "iscrowd 'no', which must be numbers"),
        (
            lambda tables: tables["annotations"][5].update(area="big"),
            "the area 'big' and iscrowd 0, which must",
        ),
        (lambda tables: tables["annotations"][5].update(area=""), "the area '' and iscrowd 0, which must"),
        (lambda tables: tables["annotations"][5].update(area=-5), "the area -5 and iscrowd 0, .* at least 0"),
        (lambda tables: tables["images"][1].update(id="101"), "ids of images are all numbers or all text"),
        (lambda tables: tables["images"][1].update(width=None), r"has the size \(None, 96\)"),
        (lambda tables: tables["categories"][0].update(id=7), "two categories have the same id"),
        (lambda tables: tables["categories"][0].update(id="cat"), "ids of categories are whole numbers"),
    ],
)
def test_annotations_that_cannot_be_right_are_refused(tmp_path: Path, change: Change, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read(tmp_path, change)


def test_masks_are_required_of_each_object_and_of_crowds_that_are_measured_against(tmp_path: Path) -> None:
    data = read(tmp_path / "whole")
    data.require_masks()

    def change(tables: Tables) -> None:
        del tables["annotations"][3]["segmentation"]
        tables["annotations"][0].update(iscrowd=1, segmentation=[])
        tables["annotations"][1]["bbox"][2] = 1e-9  # left out; the others keep their numbers

    partly = read(tmp_path / "partly", change)
    with pytest.raises(UserError, match=r"annotation 4 \(id 3\) has a box and no segmentation"):
        partly.require_masks()
    with pytest.raises(UserError, match=r"annotation 1 \(id 0\) has a box and no segmentation"):
        partly.require_masks(crowds=True)


@pytest.mark.parametrize(
    "segmentation",
    [
        *([[]], [[1, 2, 3, 4]], [[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5, 6], []], {}, 3),
        [["a", 2, 3, 4, 5, 6]],
        {"size": [SIDE, SIDE], "counts": [10, 20]},
        {"size": [SIDE, SIDE], "counts": [SIDE * SIDE + 1, -1]},
        {"size": [SIDE, SIDE], "counts": "no runs"},
        {"size": [SIDE, SIDE], "counts": 3},
        {"size": [SIDE, SIDE // 2], "counts": [SIDE * SIDE // 2]},
        {"size": "large", "counts": [SIDE * SIDE]},
    ],
    ids=repr,
)
def test_what_is_no_mask_is_refused_before_the_training(tmp_path: Path, segmentation: object) -> None:
    data = read(tmp_path, lambda tables: tables["annotations"][3].update(segmentation=segmentation))
    with pytest.raises(UserError, match=r"annotation 4 \(id 3\) has a box and no segmentation"):
        data.require_masks()


@pytest.mark.parametrize("counts", [[9, 20, SIDE * SIDE - 29], "compressed"])
def test_run_lengths_of_the_images_size_are_masks(tmp_path: Path, counts: object) -> None:
    if counts == "compressed":
        mask = np.asfortranarray(np.eye(SIDE, dtype=np.uint8))
        counts = coco_mask.encode(mask)["counts"].decode()
    runs = {"size": [SIDE, SIDE], "counts": counts}
    read(tmp_path, lambda tables: tables["annotations"][3].update(segmentation=runs)).require_masks()


def test_an_image_of_another_size_than_annotated_is_refused(tmp_path: Path) -> None:
    data = read(tmp_path, lambda tables: tables["images"][0].update(width=SIDE + 4))
    with pytest.raises(UserError, match=r"100\.png .* has 96×96 pixels and is annotated as 100×96"):
        data.pixels(0, 3)


def test_the_fingerprint_follows_boxes_and_pixels(tmp_path: Path) -> None:
    before = read(tmp_path / "a").fingerprint()
    assert read(tmp_path / "b").fingerprint() == before
    assert read(tmp_path / "c", _box(1, 2, 3, 4)).fingerprint() != before
    other = write_coco(tmp_path / "d")
    draw(77)[0].save(other / "train" / "100.png")
    assert train_split(other).fingerprint() != before
