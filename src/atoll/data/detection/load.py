"""Training and test images with annotated objects, from COCO's JSON or Parquet files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atoll.core.errors import UserError
from atoll.data.detection.coco import ANNOTATIONS, read_coco
from atoll.data.detection.objects import DetectionSet
from atoll.data.detection.parquet import read_parquet_objects
from atoll.data.options import held_out_names
from atoll.data.sources import locate


def load_detection(
    data: str, train_split: str = "train", test_split: str | None = None
) -> tuple[DetectionSet, DetectionSet]:
    """Read the training and the test split of a folder.

    Args:
        data: The folder; a relative path that does not exist is searched for under ``ATOLL_DATA``.
        train_split: Name of the training split.
        test_split: Name of the test split; None for ``test``, or ``val`` if there is no ``test``.

    Raises:
        UserError: The folder or a split is missing, the splits have different categories, or see
            `atoll.data.detection.objects.make_detection_set`.
    """
    root = locate(data, "the data of detection")
    train = _read(root, (train_split,), "train_split")
    test = _read(root, held_out_names(test_split), "test_split")
    if train.unnamed and test.unnamed:  # plain Parquet lists no categories but those of its objects
        both = dict(sorted((train.classes | test.classes).items()))
        train, test = replace(train, classes=both), replace(test, classes=both)
    if train.classes != test.classes:
        different = sorted(train.classes.items() ^ test.classes.items())[0]
        raise UserError(
            f"{train.name} and {test.name} list different categories, such as {different[0]} ({different[1]}); "
            "give both the same list"
        )
    return train, test


def why_no_objects(data: str) -> str:
    """Reason why a folder of annotated images is not on this machine; empty if it is. Its content is not read."""
    try:
        locate(data, "the data of detection")
    except UserError as error:
        return str(error)
    return ""


def _read(root: Path, splits: tuple[str, ...], option: str) -> DetectionSet:
    for split in splits:
        for read in (read_coco, read_parquet_objects):
            if (found := read(root, split)) is not None:
                return found
    places = ", ".join(place.format(split=splits[0]) for place in ANNOTATIONS)
    raise UserError(
        f"{root} holds no annotated images of the split {' or '.join(map(repr, splits))}: neither Parquet files of "
        f"that name nor COCO's JSON ({places}); name the split with {option}=NAME"
    )
