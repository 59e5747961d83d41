"""Annotated images in Parquet files, in the Hugging Face convention for detection: boxes only.

A row holds ``image`` (an encoded file), ``width``, ``height`` and ``objects``, a struct of lists: ``bbox``
([x, y, width, height] in pixels), ``category`` and, if it is there, ``area`` and ``iscrowd``. The schema's
``huggingface`` metadata names the categories.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from atoll.core.errors import UserError
from atoll.data.detection.objects import DetectionSet, make_detection_set
from atoll.data.parquet import ParquetRecords, open_parquet, split_files

_NEEDED = ("image", "width", "height", "objects")
_KEYS = {"bbox": "bbox", "category": "category_id", "area": "area", "iscrowd": "iscrowd"}


def read_parquet_objects(root: Path, split: str) -> DetectionSet | None:
    """Read a split of a folder of Parquet files; None if it holds no file of that split.

    Raises:
        UserError: A column is missing, or see `make_detection_set`.
    """
    files = split_files(root, split)
    if not files:
        return None
    schema = open_parquet(files[0]).schema_arrow
    missing = next((name for name in _NEEDED if name not in schema.names), None)
    if missing is not None:
        raise UserError(
            f"{files[0]} has no column {missing!r}; detection reads the columns {', '.join(_NEEDED)}"
        )
    columns = [name for name in ("image_id", "width", "height", "objects") if name in schema.names]
    rows = [
        row
        for file in files
        for row in open_parquet(file).read(columns=columns, use_threads=False).to_pylist()
    ]
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        own = row.get("image_id")
        image = number if own is None else own
        images.append({"id": image, "width": row["width"], "height": row["height"]})
        annotations += _objects(row["objects"], image, f"row {number} of {files[0]}")
    classes = dict(enumerate(_names(schema))) or {
        one: str(one) for one in {a["category_id"] for a in annotations} - {None}
    }
    return make_detection_set(ParquetRecords(files, "image"), images, annotations, classes, str(files[0]))


def _objects(objects: Any, image: int, where: str) -> list[dict[str, Any]]:
    if not objects:  # an image without objects
        return []
    if isinstance(objects, list) and all(isinstance(one, dict) for one in objects):
        # A struct for each object.
        objects = {key: [one.get(key) for one in objects] for key in objects[0]}
    if not isinstance(objects, dict):
        raise UserError(f"{where}: objects holds {objects!r}, and needs the lists bbox and category")
    known = {key: objects[key] for key in _KEYS if objects.get(key) is not None}
    if not {"bbox", "category"} <= known.keys() or len({len(values) for values in known.values()}) > 1:
        raise UserError(f"{where}: objects needs the lists bbox and category, of one length")
    return [
        {"image_id": image, **dict(zip((_KEYS[key] for key in known), values, strict=True))}
        for values in zip(*known.values(), strict=True)
    ]


def _names(schema: pa.Schema) -> list[str]:
    """Names of the categories from the ``huggingface`` metadata; [] if there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return []
    return _find_names(features.get("objects"))


def _find_names(feature: Any) -> list[str]:
    """The first list of class names in a feature, however deep: versions of the library nest it differently."""
    if isinstance(feature, dict) and isinstance(feature.get("names"), list):
        return [str(name) for name in feature["names"]]
    inner = feature.values() if isinstance(feature, dict) else feature if isinstance(feature, list) else ()
    return next((names for one in inner if (names := _find_names(one))), [])
