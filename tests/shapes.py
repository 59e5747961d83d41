"""Generated images of coloured shapes with boxes and masks, as COCO's JSON or as Parquet files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pycocotools import mask as coco_mask

CLASSES = {3: "square", 7: "disk"}  # ids with gaps, as COCO's are
SIDE = 96
Tables = dict[str, Any]


def draw(seed: int, side: int = SIDE) -> tuple[Image.Image, list[dict[str, Any]], list[np.ndarray[Any, Any]]]:
    """An image of a red square and a green disk, their annotations, and their masks."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(90, 150, (side, side, 3), dtype=np.uint8)
    rows, columns = np.mgrid[:side, :side]
    objects, masks = [], []
    for half, category in ((0, 3), (1, 7)):
        size = int(rng.integers(24, 40))
        x = int(rng.integers(0, side - size))
        y = int(rng.integers(0, side // 2 - size + 1)) + half * (side // 2)
        if category == 3:
            mask = (columns >= x) & (columns < x + size) & (rows >= y) & (rows < y + size)
            shape: Any = [[x, y, x + size, y, x + size, y + size, x, y + size]]
            pixels[mask] = (220, 30, 30)
        else:
            radius = size / 2
            mask = (columns + 0.5 - x - radius) ** 2 + (rows + 0.5 - y - radius) ** 2 < radius**2
            runs = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
            shape = {"size": runs["size"], "counts": runs["counts"].decode()}
            pixels[mask] = (30, 220, 30)
        objects.append({"category_id": category, "bbox": [x, y, size, size], "segmentation": shape})
        masks.append(mask)
    return Image.fromarray(pixels), objects, masks


def tables(count: int, first: int = 0) -> Tables:
    """COCO's tables of so many images."""
    images, annotations = [], []
    for number in range(count):
        image = 100 + number
        images.append({"id": image, "file_name": f"{image}.png", "width": SIDE, "height": SIDE})
        for one in draw(first + number)[1]:
            annotations.append({"id": len(annotations), "image_id": image, **one})
    categories = [{"id": key, "name": name} for key, name in CLASSES.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_coco(
    folder: Path,
    train: int = 4,
    test: int = 2,
    change: Callable[[Tables], None] = lambda tables: None,
    splits: tuple[str, str] = ("train", "test"),
) -> Path:
    """Write a training and a test split; ``change`` edits the training split's tables."""
    for split, count, first in zip(splits, (train, test), (0, 1000), strict=True):
        made = tables(count, first)
        if split == splits[0]:
            change(made)
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            draw(first + number)[0].save(folder / split / f"{100 + number}.png")
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(made))
    return folder


def write_parquet(folder: Path, train: int = 4, test: int = 2) -> Path:
    """Write the same images with boxes only, in the Hugging Face convention; categories count from 0."""
    folder.mkdir(parents=True, exist_ok=True)
    codes = {category: code for code, category in enumerate(CLASSES)}
    names = {"feature": {"names": list(CLASSES.values()), "_type": "ClassLabel"}, "_type": "List"}
    features = {"info": {"features": {"objects": {"category": names}}}}
    for split, count, first in (("train", train, 0), ("val", test, 1000)):
        rows = []
        for number in range(count):
            image, objects, _ = draw(first + number)
            file = io.BytesIO()
            image.save(file, "PNG")
            lists = {
                "bbox": [[float(value) for value in one["bbox"]] for one in objects],
                "category": [codes[one["category_id"]] for one in objects],
            }
            encoded = {"bytes": file.getvalue(), "path": f"{number}.png"}
            rows.append({"image": encoded, "width": SIDE, "height": SIDE, "objects": lists})
        table = pa.Table.from_pylist(rows).replace_schema_metadata({"huggingface": json.dumps(features)})
        pq.write_table(table, folder / f"{split}.parquet", row_group_size=2)
    return folder
