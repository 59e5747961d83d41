from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.core.errors import UserError
from atoll.data.detection.objects import DetectionSet, make_detection_set
from atoll.data.records import ItemRecords
from atoll.evaluation.detection.average_precision import (
    as_results,
    average_precision,
    detect_objects,
    require_pycocotools,
)

SIDE = 200


def annotated(objects: list[dict[str, Any]], images: int = 1) -> DetectionSet:
    records = ItemRecords(images, lambda row: b"", "none", "")
    rows = [{"id": 50 + i, "width": SIDE, "height": SIDE} for i in range(images)]
    return make_detection_set(records, rows, objects, {2: "cell", 5: "rod"}, "made")


def one(box: list[float], category: int = 2, image: int = 50, **more: Any) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "bbox": box, **more}


TRUTH = [one([10, 10, 40, 40]), one([100, 100, 50, 50])]


def test_two_of_three_detections_are_right() -> None:
    found = [
        one([10, 10, 40, 40], score=0.9),
        one([10, 100, 40, 40], score=0.8),
        one([100, 100, 50, 50], score=0.7),
    ]
    measured = average_precision(annotated(TRUTH), found)["bbox"]
    expected = (51 * 1 + 50 * 2 / 3) / 101  # precision 1 up to recall 1/2, and 2/3 from there
    assert measured["AP"] == pytest.approx(expected)
    assert measured["AR_100"] == 1.0
    assert measured["AR_1"] == 0.5
    assert measured["classes"] == {"cell": pytest.approx(expected), "rod": None}


def test_classes_of_one_name_are_told_apart_by_their_ids() -> None:
    data = replace(annotated([*TRUTH, one([10, 100, 40, 40], category=5)]), classes={2: "cell", 5: "cell"})
    found = [one([10, 100, 40, 40], category=5, score=0.9)]
    measured = average_precision(data, found)["bbox"]["classes"]
    assert measured == {"cell (2)": 0.0, "cell (5)": pytest.approx(1)}


def test_a_box_that_overlaps_partly_counts_at_lower_thresholds() -> None:
    found = [one([10, 10, 40, 31], score=0.9), one([100, 100, 50, 50], score=0.8)]  # 31/40 = 0.775
    measured = average_precision(annotated(TRUTH), found)["bbox"]
    assert (measured["AP50"], measured["AP75"]) == (1.0, 1.0)
    half = 51 * 0.5 / 101  # the first is wrong, so precision is 1/2 up to recall 1/2
    assert measured["AP"] == pytest.approx((6 * 1 + 4 * half) / 10)


@pytest.mark.parametrize(
    ("found", "precision"),
    [
        ([], 0.0),
        ([one([10, 10, 40, 40], category=5, score=0.9)], 0.0),
        ([{**one(box["bbox"]), "score": 0.5} for box in TRUTH], 1.0),
    ],
    ids=["nothing", "other class", "all"],
)
def test_the_ends_of_the_scale(found: list[dict[str, Any]], precision: float) -> None:
    assert average_precision(annotated(TRUTH), found)["bbox"]["AP"] == precision


def test_a_detection_in_a_crowd_is_no_mistake() -> None:
    truth = annotated([*TRUTH, one([0, 150, 100, 50], iscrowd=1)])
    found = [{**box, "score": 0.5} for box in TRUTH]
    inside = [one([5, 155, 20, 20], score=0.9)]
    assert average_precision(truth, found + inside)["bbox"]["AP"] == 1.0
    assert average_precision(annotated(TRUTH), found + inside)["bbox"]["AP"] < 0.8


def overlap(a: list[float], b: list[float]) -> float:
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    common = max(width, 0.0) * max(height, 0.0)
    return common / (a[2] * a[3] + b[2] * b[3] - common)


def slow_precision(truth: list[dict[str, Any]], found: list[dict[str, Any]], threshold: float) -> float:
    """COCO's AP of one class by the book: greedy matches by score, 101 recalls, the envelope of the precision."""
    free = dict.fromkeys(range(len(truth)), True)
    hits = []
    for guess in sorted(found, key=lambda guess: -guess["score"]):
        choices = [
            (overlap(guess["bbox"], box["bbox"]), i)
            for i, box in enumerate(truth)
            if free[i] and box["image_id"] == guess["image_id"]
        ]
        best, chosen = max(choices, default=(0.0, -1))
        hits.append(best >= threshold)
        if best >= threshold:
            free[chosen] = False
    recalls = np.cumsum(hits) / len(truth)
    precisions = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    reached = [precisions[recalls >= level - 1e-12] for level in np.linspace(0, 1, 101)]
    return float(np.mean([values.max() if len(values) else 0.0 for values in reached]))


@pytest.mark.parametrize("seed", range(4))
def test_random_boxes_score_as_a_slow_loop_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, found = [], []
    for image in (50, 51, 52):
        for category in (2, 5):
            for _ in range(4):
                box = [*rng.uniform(0, 120, 2), *rng.uniform(20, 70, 2)]
                truth.append(one(box, category, image))
                for _ in range(int(rng.integers(0, 3))):
                    near = (np.array(box) + rng.normal(0, 4, 4)).clip(1).tolist()
                    found.append(one(near, category, image, score=float(rng.random())))
    data = annotated(truth, images=3)
    measured = average_precision(data, found)["bbox"]
    by_class = {
        name: [
            slow_precision(
                [box for box in data.annotations if box["category_id"] == category],
                [box for box in found if box["category_id"] == category],
                threshold,
            )
            for threshold in np.linspace(0.5, 0.95, 10)
        ]
        for category, name in ((2, "cell"), (5, "rod"))
    }
    assert measured["classes"] == pytest.approx({name: np.mean(values) for name, values in by_class.items()})
    assert measured["AP"] == pytest.approx(np.mean(list(by_class.values())))
    assert measured["AP50"] == pytest.approx(np.mean([values[0] for values in by_class.values()]))
    assert 0.1 < measured["AP"] < 0.9


def test_masks_are_measured_by_their_own_overlap() -> None:
    # The masks are the upper halves of the boxes: right boxes with whole masks overlap by a half.
    halves = [[[x, y, x + w, y, x + w, y + h / 2, x, y + h / 2]] for x, y, w, h in (b["bbox"] for b in TRUTH)]
    data = annotated([{**box, "segmentation": half} for box, half in zip(TRUTH, halves, strict=True)])
    boxes = torch.tensor([[10.0, 10, 50, 50], [100, 100, 150, 150]])
    masks = torch.zeros(2, 1, SIDE, SIDE)
    masks[0, 0, 10:30, 10:50], masks[1, 0, 100:125, 100:150] = 0.9, 0.9
    whole = torch.zeros(2, 1, SIDE, SIDE)
    whole[0, 0, 10:50, 10:50], whole[1, 0, 100:150, 100:150] = 0.9, 0.9
    output = {"boxes": boxes, "labels": torch.tensor([1, 1]), "scores": torch.tensor([0.9, 0.8])}
    results = as_results({**output, "masks": masks}, data, 0)
    assert [result["bbox"] for result in results] == [box["bbox"] for box in TRUTH]
    assert [result["category_id"] for result in results] == [2, 2]
    right = average_precision(data, results, masks=True)
    assert (right["bbox"]["AP"], right["segm"]["AP"]) == (1.0, 1.0)
    twice = average_precision(data, as_results({**output, "masks": whole}, data, 0), masks=True)
    assert twice["bbox"]["AP"] == 1.0
    assert twice["segm"]["AP50"] == 1.0
    assert twice["segm"]["AP"] == pytest.approx(0.1)  # at the threshold 0.5 alone
    unsure = average_precision(data, as_results({**output, "masks": masks / 2}, data, 0), masks=True)
    assert unsure["segm"]["AP"] == 0.0


def test_masks_are_small_by_their_own_area() -> None:
    # A thin diagonal's box is large, its mask is small: as a false positive it counts among the small masks.
    square = {"bbox": [100, 100, 15, 15], "segmentation": [[100, 100, 115, 100, 115, 115, 100, 115]]}
    data = annotated([one([100, 100, 15, 15], segmentation=square["segmentation"])])
    masks = torch.zeros(2, 1, SIDE, SIDE)
    masks[0, 0, 100:115, 100:115] = 0.9
    masks[1, 0, range(10, 90), range(10, 90)] = 0.9
    boxes = torch.tensor([[100.0, 100, 115, 115], [10, 10, 90, 90]])
    output = {
        "boxes": boxes,
        "labels": torch.tensor([1, 1]),
        "scores": torch.tensor([0.8, 0.9]),
        "masks": masks,
    }
    found = average_precision(data, as_results(output, data, 0), masks=True)
    assert found["bbox"]["AP_small"] == pytest.approx(1)
    assert found["segm"]["AP_small"] == pytest.approx(0.5, abs=0.01)


class Brightness(torch.nn.Module):
    """Finds the whole of each image, as surely as the image is bright; notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.given: list[int] = []

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.given.append(len(images))
        box, label = torch.tensor([[0.0, 0.0, SIDE, SIDE]]), torch.tensor([2])
        return [{"boxes": box, "labels": label, "scores": image.mean()[None]} for image in images]


def test_each_image_is_detected_once_in_batches_between_0_and_1() -> None:
    def picture(row: int) -> bytes:
        file = io.BytesIO()
        Image.new("L", (SIDE, SIDE), 51 * row).save(file, "PNG")
        return file.getvalue()

    rows = [{"id": 50 + i, "width": SIDE, "height": SIDE} for i in range(5)]
    records = ItemRecords(5, picture, "grey", "")
    data = make_detection_set(records, rows, TRUTH, {2: "cell", 5: "rod"}, "made")
    detector, told = Brightness().train(), list[int]()
    found = detect_objects(detector, data, 1, 2, told.append)
    assert detector.given == told == [2, 2, 1]
    assert found == [
        one([0, 0, SIDE, SIDE], 5, 50 + row, score=pytest.approx(row / 5, abs=1e-6)) for row in range(5)
    ]


def test_without_pycocotools_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_pycocotools()
    monkeypatch.setitem(sys.modules, "pycocotools.cocoeval", None)
    with pytest.raises(UserError, match=r"pip install '\.\[detect\]'"):
        require_pycocotools()
