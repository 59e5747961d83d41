"""Annotations as COCO's JSON, beside folders of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.data.detection.objects import DetectionSet, make_detection_set
from atoll.data.records import FileRecords

ANNOTATIONS = (
    "annotations/instances_{split}.json",
    "annotations/{split}.json",
    "{split}.json",
    "{split}/_annotations.coco.json",
)
FOLDERS = ("{split}", "images/{split}", "images", ".")


def read_coco(root: Path, split: str) -> DetectionSet | None:
    """Read a split: COCO's JSON, and the images in a folder beside it.

    Args:
        root: The folder of the data.
        split: Name of the split, such as ``train`` or ``train2017``.

    Returns:
        None if there is no such JSON; see `ANNOTATIONS` for its places, and `FOLDERS` for those of the images.

    Raises:
        UserError: The JSON is no file of COCO's, or images are missing.
    """
    paths = [root / place.format(split=split) for place in ANNOTATIONS]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    tables = _read(path)
    names = tuple(str(image["file_name"]) for image in tables["images"])
    folders = [root / place.format(split=split) for place in FOLDERS]
    folder = next((folder for folder in folders if names and (folder / names[0]).is_file()), folders[0])
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing is not None:
        raise UserError(
            f"{path} lists the image {missing}, and {folder} does not hold it; images belong into one of "
            f"{', '.join(str(folder) for folder in folders)}"
        )
    try:
        classes = {int(one["id"]): str(one["name"]) for one in tables["categories"]}
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: ids of categories are whole numbers ({error})") from None
    if len(classes) < len(tables["categories"]):
        raise UserError(f"{path}: two categories have the same id; give each category an id of its own")
    images = [{key: one[key] for key in ("id", "width", "height", "file_name")} for one in tables["images"]]
    return make_detection_set(FileRecords(folder, names), images, tables["annotations"], classes, str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        tables = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    needed = {
        "images": {"id", "width", "height", "file_name"},
        "annotations": {"image_id", "category_id"},
        "categories": {"id", "name"},
    }
    for name, keys in needed.items():
        rows = tables.get(name) if isinstance(tables, dict) else None
        if not isinstance(rows, list) or not all(
            isinstance(row, dict) and row.keys() >= keys for row in rows
        ):
            raise UserError(
                f"{path} is not a file of COCO's: it needs a list {name!r}, each entry with "
                f"{', '.join(sorted(keys))}"
            )
    return dict(tables)
