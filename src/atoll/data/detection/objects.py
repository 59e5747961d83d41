"""Images with annotated objects: COCO's tables, checked, and the targets that torchvision's detectors learn from.

Reference:
    COCO's format of annotations, https://cocodataset.org/#format-data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.files import hash_bytes
from atoll.data.decode import CorruptImageError, decode_stored
from atoll.data.records import Records

Table = dict[str, Any]

_TOLERANCE = 1.0  # pixels by which a box may pass the image's border, as rounded boxes do; it is clipped
_THINNEST = 0.01  # pixels; the corners of a thinner box may be equal in float32


@dataclass(frozen=True)
class DetectionSet:
    """Images with annotated objects.

    Attributes:
        records: The encoded images.
        images: COCO's table of images, in the order of the records: ``id``, ``width``, ``height``.
        annotations: COCO's table of objects: ``image_id``, ``category_id``, ``bbox`` (x, y, width, height in
            pixels, from the top left), ``area``, ``iscrowd``, and ``segmentation`` if there is one.
        classes: Names of the categories by id.
        left_out: Number of objects without an area or nearly so, which are left out.
        name: The split's place, for error messages.
        called: What error messages call each object.
    """

    records: Records
    images: list[Table]
    annotations: list[Table]
    classes: dict[int, str]
    left_out: int = 0
    name: str = ""
    called: Sequence[str] = ()
    _by_image: dict[int, list[Table]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for one in self.annotations:
            self._by_image.setdefault(one["image_id"], []).append(one)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def unnamed(self) -> bool:
        """Whether the categories have no names but their ids."""
        return all(name == str(category) for category, name in self.classes.items())

    @cached_property
    def labels(self) -> dict[int, int]:
        """Label of each category id: 1, 2, …; 0 is the background."""
        return {category: label for label, category in enumerate(sorted(self.classes), start=1)}

    def objects(self, row: int) -> list[Table]:
        """Annotations of an image."""
        return self._by_image.get(self.images[row]["id"], [])

    def with_objects(self) -> list[int]:
        """Rows of the images with an object to learn from; crowds are not one."""
        return [row for row in range(len(self)) if any(not one["iscrowd"] for one in self.objects(row))]

    def pixels(self, row: int, channels: int) -> Tensor:
        """Decode an image at its stored size.

        Shape:
            - Output: (C, H, W) uint8

        Raises:
            UserError: The image cannot be decoded, or its size is not the annotated one.
        """
        (encoded,) = self.records.read(np.array([row]))
        where = f"{self.records.describe(row)} ({self.name})"
        try:
            pixels = torch.from_numpy(decode_stored(encoded, channels).copy())
        except CorruptImageError as error:
            raise UserError(
                f"{where} cannot be decoded: {error}; repair the file or leave the image out"
            ) from None
        height, width = pixels.shape[1:]
        annotated = self.images[row]["width"], self.images[row]["height"]
        if (width, height) != annotated:
            raise UserError(
                f"{where} has {width}×{height} pixels and is annotated as {annotated[0]}×{annotated[1]}, so its "
                "boxes do not fit it; correct the annotations"
            )
        return pixels

    def check_images(self, rows: Iterable[int], channels: int) -> None:
        """Decode images once, so that an image that cannot be used is found before any training.

        This takes as long as the decoding in an epoch. A header alone does not reveal a truncated file.

        Raises:
            UserError: Some cannot be decoded, or have another size than annotated; the first is named.
        """
        wrong: list[str] = []
        for row in rows:
            try:
                self.pixels(row, channels)
            except UserError as error:
                wrong.append(str(error))
        if wrong:
            raise UserError(wrong[0] + (f" ({len(wrong)} such images)" if len(wrong) > 1 else ""))

    def target(self, row: int, masks: bool) -> dict[str, Tensor]:
        """Return what a torchvision detector learns from an image; crowds are left out.

        Args:
            row: The image.
            masks: Whether to add the masks.

        Shape:
            - Output: ``boxes`` (n, 4) as (x₁, y₁, x₂, y₂), ``labels`` (n,) int64, ``masks`` (n, H, W) uint8
        """
        found = [one for one in self.objects(row) if not one["iscrowd"]]
        boxes = torch.tensor([one["bbox"] for one in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        target = {
            "boxes": boxes,
            "labels": torch.tensor([self.labels[one["category_id"]] for one in found], dtype=torch.int64),
        }
        if masks:
            height, width = self.images[row]["height"], self.images[row]["width"]
            drawn = [draw_mask(one["segmentation"], height, width) for one in found]
            target["masks"] = (
                torch.stack(drawn) if drawn else torch.zeros(0, height, width, dtype=torch.uint8)
            )
        return target

    def coco(self) -> Table:
        """Return COCO's dict of all tables, which pycocotools evaluates against."""
        categories = [{"id": category, "name": self.classes[category]} for category in sorted(self.classes)]
        return {"images": self.images, "annotations": self.annotations, "categories": categories}

    def fingerprint(self) -> str:
        """Hash of the images and the annotations; the same on every machine."""
        return hash_bytes(json.dumps([self.records.digest(), self.coco()], sort_keys=True).encode())

    def require_masks(self, crowds: bool = False) -> None:
        """Check that every object has a mask.

        Args:
            crowds: Whether crowds need one too: nothing is learned from them, but masks are measured against them.

        Raises:
            UserError: An object has no segmentation, or one that is no mask of its image's size.
        """
        sizes = {image["id"]: (image["height"], image["width"]) for image in self.images}
        for one, called in zip(self.annotations, self.called, strict=True):
            height, width = sizes[one["image_id"]]
            if (crowds or not one["iscrowd"]) and not _is_mask(one.get("segmentation"), height, width):
                raise UserError(
                    f"{self.name}: {called} has a box and no segmentation (polygons of three points "
                    f"or more, or a run-length encoding of the size [{height}, {width}], the image's height and "
                    "width), and Mask R-CNN learns from masks; give segmentations, or leave out masks=true to "
                    "detect boxes only"
                )


def _is_mask(segmentation: Any, height: int, width: int) -> bool:
    """Whether a segmentation can be drawn in an image: polygons (x, y, x, y, …), or a run-length encoding."""
    if isinstance(segmentation, dict):
        return segmentation.get("size") == [height, width] and _is_whole(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation:
        return False
    return all(
        isinstance(one, list) and len(one) >= 6 and len(one) % 2 == 0 and all(map(_is_number, one))
        for one in segmentation
    )


def _is_whole(runs: Table, height: int, width: int) -> bool:
    """Whether the counts of a run-length encoding cover the image."""
    counts = runs.get("counts")
    if isinstance(counts, list):
        return all(isinstance(one, int) and one >= 0 for one in counts) and sum(counts) == height * width
    if not isinstance(counts, str | bytes):
        return False
    try:
        draw_mask(runs, height, width)
    except ValueError:
        return False
    return True


def make_detection_set(
    records: Records,
    images: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    classes: Mapping[int, str],
    name: str,
) -> DetectionSet:
    """Check COCO's tables and complete them: areas, crowds, and ids of annotations, counted from 1.

    Args:
        records: The encoded images, in the order of ``images``.
        images: The table of images.
        annotations: The table of objects.
        classes: Names of the categories by id.
        name: The split's place, for error messages.

    Raises:
        UserError: There are no objects, two images have one id, ids are of two kinds, or an object names an
            unknown image or category, or has no box or one outside its image.
    """
    for image in images:
        sides = image["width"], image["height"]
        if not isinstance(image["id"], int | str) or not all(
            isinstance(one, int) and one > 0 for one in sides
        ):
            raise UserError(
                f"{name}: the image {image['id']!r} has the size {sides!r}; an id is a number or text, and "
                "width and height are whole numbers of pixels"
            )
    sizes = {image["id"]: (image["width"], image["height"]) for image in images}
    if len(sizes) < len(images):
        raise UserError(f"{name}: two images have the same id; give each image an id of its own")
    if len({isinstance(image, str) for image in sizes}) > 1:  # pycocotools sorts them
        raise UserError(f"{name}: ids of images are all numbers or all text; here they are of both kinds")
    kept, names = list[Table](), list[str]()
    for number, given in enumerate(annotations, 1):
        called = f"annotation {number}" + (f" (id {given['id']})" if "id" in given else "")
        if not isinstance(given["image_id"], int | str) or given["image_id"] not in sizes:
            raise UserError(f"{name}: {called} names the image {given['image_id']!r}, which is not listed")
        if not isinstance(given["category_id"], Hashable) or given["category_id"] not in classes:
            listed = ", ".join(map(str, sorted(classes)))
            raise UserError(
                f"{name}: {called} has the unknown category {given['category_id']!r}; categories listed: "
                f"{listed or 'none'}"
            )
        box = _clip(given.get("bbox"), sizes[given["image_id"]], f"{name}: {called}")
        if min(box[2:]) >= _THINNEST:
            area, crowd = given.get("area"), given.get("iscrowd") or 0
            if not all(_is_number(one) and one >= 0 for one in (crowd, 0 if area is None else area)):
                raise UserError(
                    f"{name}: {called} has the area {area!r} and iscrowd {crowd!r}, which must be "
                    "numbers of at least 0"
                )
            own = {
                "id": len(kept) + 1,  # pycocotools takes an annotation with the id 0 for none at all
                "bbox": box,
                "area": box[2] * box[3] if area is None else area,
                "iscrowd": int(crowd),
            }
            kept.append({**given, **own})
            names.append(called)
    if not kept:
        raise UserError(f"{name} holds no boxes to learn from or to measure on; give annotated images")
    return DetectionSet(
        records, [dict(one) for one in images], kept, dict(classes), len(annotations) - len(kept), name, names
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _clip(box: Any, size: tuple[int, int], where: str) -> list[float]:
    """Check that a box (x, y, width, height) is inside its image, and clip what rounding let out."""
    if not isinstance(box, list | tuple) or len(box) != 4 or not all(map(_is_number, box)):
        raise UserError(f"{where} has the box {box!r}; a box is [x, y, width, height] in pixels")
    x, y, width, height = map(float, box)
    left, top, right, bottom = x, y, x + width, y + height
    outside = max(-left, -top, right - size[0], bottom - size[1]) > _TOLERANCE
    if outside or width < 0 or height < 0:
        raise UserError(
            f"{where} has the box [{x:g}, {y:g}, {width:g}, {height:g}], which is not inside its image of "
            f"{size[0]}×{size[1]} pixels; a box is [x, y, width, height], from the top left"
        )
    if min(left, top, size[0] - right, size[1] - bottom) >= 0:
        return [x, y, width, height]
    left, top, right, bottom = max(left, 0.0), max(top, 0.0), min(right, size[0]), min(bottom, size[1])
    return [left, top, right - left, bottom - top]


def draw_mask(segmentation: Any, height: int, width: int) -> Tensor:
    """Draw a segmentation: polygons, or COCO's run lengths, compressed or not.

    Args:
        segmentation: A list of polygons [x₁, y₁, x₂, y₂, …], or a dict of ``counts`` and ``size``.
        height: Height of the image.
        width: Width of the image.

    Shape:
        - Output: (H, W) uint8, 1 inside
    """
    from pycocotools import mask as coco_mask

    if isinstance(segmentation, dict) and not isinstance(segmentation["counts"], list):
        runs = segmentation
    else:
        runs = coco_mask.frPyObjects(segmentation, height, width)
    drawn = coco_mask.decode(coco_mask.merge(runs) if isinstance(runs, list) else runs)
    return torch.from_numpy(np.ascontiguousarray(drawn))
