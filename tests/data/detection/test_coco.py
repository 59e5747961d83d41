from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CocoDetection

from atoll.core.errors import UserError
from atoll.data.detection.coco import ANNOTATIONS, read_coco
from tests.shapes import write_coco


def test_the_annotations_are_those_that_torchvision_reads(tmp_path: Path) -> None:
    write_coco(tmp_path)
    data = read_coco(tmp_path, "train")
    assert data is not None
    torchvisions = CocoDetection(tmp_path / "train", tmp_path / "annotations" / "instances_train.json")
    assert len(data) == len(torchvisions)
    for row, (image, objects) in enumerate(torchvisions):
        assert [one["bbox"] for one in data.objects(row)] == [one["bbox"] for one in objects]
        assert [one["category_id"] for one in data.objects(row)] == [one["category_id"] for one in objects]
        assert np.array_equal(data.pixels(row, 3).permute(1, 2, 0).numpy(), np.asarray(image))
    assert data.classes == {3: "square", 7: "disk"}


@pytest.mark.parametrize("place", ANNOTATIONS)
@pytest.mark.parametrize("folder", ["train", "images/train", "images", "."])
def test_the_json_and_the_images_are_found_in_the_usual_places(
    tmp_path: Path, place: str, folder: str
) -> None:
    made = write_coco(tmp_path / "made")
    root = tmp_path / "moved"
    path = root / place.format(split="train")
    path.parent.mkdir(parents=True)
    (made / "annotations" / "instances_train.json").rename(path)
    (root / folder).mkdir(parents=True, exist_ok=True)
    for image in (made / "train").iterdir():
        image.rename(root / folder / image.name)
    data = read_coco(root, "train")
    assert data is not None
    assert data.pixels(3, 3).shape == (3, 96, 96)
    assert read_coco(root, "test") is None


def test_a_missing_image_is_named_before_any_training(tmp_path: Path) -> None:
    write_coco(tmp_path)
    (tmp_path / "train" / "102.png").unlink()
    with pytest.raises(UserError, match=r"lists the image 102\.png"):
        read_coco(tmp_path, "train")


@pytest.mark.parametrize("text", ["{", "[]", '{"images": []}', '{"images": [{"id": 1}], "annotations": []}'])
def test_a_file_that_is_not_of_coco_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(UserError, match=r"train\.json"):
        read_coco(tmp_path, "train")


def test_categories_may_have_gaps_and_labels_have_none(tmp_path: Path) -> None:
    write_coco(tmp_path)
    path = tmp_path / "annotations" / "instances_train.json"
    tables = json.loads(path.read_text())
    tables["categories"].append({"id": 5, "name": "line"})
    path.write_text(json.dumps(tables))
    data = read_coco(tmp_path, "train")
    assert data is not None
    assert data.labels == {3: 1, 5: 2, 7: 3}
