"""Average precision of a detector's boxes and masks, by pycocotools.

Reference:
    Lin et al., "Microsoft COCO", ECCV 2014, https://arxiv.org/abs/1405.0312; https://cocodataset.org/#detection-eval.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.extras import require
from atoll.data.detection.objects import DetectionSet

Detection = dict[str, Any]  # COCO's entry of a result: image_id, category_id, score, bbox, segmentation

# The numbers that pycocotools summarises, in its order.
NUMBERS = (
    *("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large"),
    *("AR_1", "AR_10", "AR_100", "AR_small", "AR_medium", "AR_large"),
)
MASK_THRESHOLD = 0.5  # probability above which a pixel belongs to a mask, as in torchvision's references


def require_pycocotools() -> None:
    """Check that pycocotools is installed.

    Raises:
        UserError: It is not.
    """
    require("pycocotools.cocoeval", "detect", "the average precision of detection")


@torch.no_grad()
def detect_objects(
    detector: nn.Module,
    data: DetectionSet,
    channels: int,
    batch_size: int,
    progress: Callable[[int], None] = lambda images: None,
) -> list[Detection]:
    """Detect the objects of all images.

    Args:
        detector: torchvision's detector, on its device.
        data: The images.
        channels: Channels of the images.
        batch_size: Number of images at a time.
        progress: Called with the number of images after each batch.

    Returns:
        COCO's table of results, with boxes and masks in the coordinates of the stored images.
    """
    detector.eval()
    device = next(detector.parameters()).device
    found: list[Detection] = []
    for start in range(0, len(data), batch_size):
        rows = range(start, min(start + batch_size, len(data)))
        outputs = detector([data.pixels(row, channels).to(device).float() / 255 for row in rows])
        for row, output in zip(rows, outputs, strict=True):
            found += as_results({name: value.cpu() for name, value in output.items()}, data, row)
        progress(len(rows))
    return found


def as_results(output: dict[str, Tensor], data: DetectionSet, row: int) -> list[Detection]:
    """Convert a detector's output for one image to COCO's results.

    Args:
        output: ``boxes`` (x₁, y₁, x₂, y₂), ``labels``, ``scores``, and ``masks`` as probabilities if there are any.
        data: The images.
        row: The image.

    Shape:
        - output: (n, 4), (n,), (n,), (n, 1, H, W)
    """
    categories = {label: category for category, label in data.labels.items()}
    boxes = torch.cat([output["boxes"][:, :2], output["boxes"][:, 2:] - output["boxes"][:, :2]], dim=1)
    results: list[Detection] = [
        {
            "image_id": data.images[row]["id"],
            "category_id": categories[label],
            "bbox": box,
            "score": score,
        }
        for box, label, score in zip(
            boxes.tolist(), output["labels"].tolist(), output["scores"].tolist(), strict=True
        )
    ]
    for one, mask in zip(results, output.get("masks", ()), strict=False):
        one["segmentation"] = _encode(mask[0] > MASK_THRESHOLD)
    return results


def _encode(mask: Tensor) -> dict[str, Any]:
    from pycocotools import mask as coco_mask

    runs: dict[str, Any] = coco_mask.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
    return runs


def average_precision(
    data: DetectionSet, detections: Sequence[Detection], masks: bool = False
) -> dict[str, Any]:
    """Measure the average precision and recall of boxes, and of masks.

    Args:
        data: The annotated images.
        detections: COCO's table of results.
        masks: Whether to measure masks too.

    Returns:
        For ``"bbox"``, and with ``masks`` also for ``"segm"``: COCO's twelve numbers as shares in [0, 1], and the
        AP of each class under ``"classes"``, with the id if a name stands for several; a number is None if there
        is no such object.
    """
    return {kind: _measure(data, detections, kind) for kind in (("bbox", "segm") if masks else ("bbox",))}


def _measure(data: DetectionSet, detections: Sequence[Detection], kind: str) -> dict[str, Any]:
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints as it works
        truth = _index(data.coco())
        # Copies, because pycocotools writes into them. It takes a mask's area from its box, if there is one.
        given = [{key: one[key] for key in one if kind == "bbox" or key != "bbox"} for one in detections]
        found = truth.loadRes(given) if given else _index({**data.coco(), "annotations": []})
        evaluation = COCOeval(truth, found, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    numbers = {name: _known(value) for name, value in zip(NUMBERS, evaluation.stats, strict=True)}
    precision = evaluation.eval["precision"]  # (IoU thresholds, recalls, classes, areas, most detections)
    names = _distinct(data.classes)
    classes = {
        names[category]: _known(_mean(precision[:, :, place, 0, -1]))
        for place, category in enumerate(evaluation.params.catIds)
    }
    return {**numbers, "classes": classes}


def _index(tables: dict[str, Any]) -> Any:
    from pycocotools.coco import COCO

    indexed = COCO()
    indexed.dataset = {**tables, "annotations": [dict(one) for one in tables["annotations"]]}
    indexed.createIndex()
    return indexed


def _distinct(classes: Mapping[int, str]) -> dict[int, str]:
    """Names of the categories, with the id where several have one name."""
    shared = Counter(classes.values())
    return {
        category: f"{name} ({category})" if shared[name] > 1 else name for category, name in classes.items()
    }


def _mean(precision: np.ndarray[Any, Any]) -> float:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else -1.0


def _known(value: float) -> float | None:
    """COCO's value, or None if it is −1, which means that nothing could be measured."""
    return None if value < 0 else float(value)
