"""Images that differ from the papers' sets are found by their number, their encoding and their content."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from atoll.data.options import DataOptions
from atoll.data.sources import read_listings
from atoll.papers import images
from atoll.papers.images import PublicSet, image_changes


def stored(folder: Path, kind: str, count: int = 4) -> DataOptions:
    """A small set under the name of CIFAR-10."""
    (folder / "cifar10").mkdir(exist_ok=True)
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, kind)
    for split in ("train", "test"):
        rows = [{"bytes": stream.getvalue(), "path": ""}] * count
        table = pa.table({"image": rows, "label": np.arange(count) % 2})
        pq.write_table(table, folder / "cifar10" / f"{split}.parquet")
    return DataOptions(source="parquet", path=str(folder / "cifar10"))


def test_fewer_images_are_counted(tmp_path: Path) -> None:
    assert image_changes(stored(tmp_path, "png")) == {
        "training images of cifar10": "4; in the paper's setting 50,000",
        "test images of cifar10": "4; in the paper's setting 10,000",
    }


def test_lost_pixels_are_seen_and_known_copies_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(images.PUBLIC_SETS, "cifar10", PublicSet(4, 4))
    assert image_changes(stored(tmp_path, "png")) == {}
    data = stored(tmp_path, "jpeg")
    assert image_changes(data) == {"copy of cifar10": "a JPEG copy; in the paper's setting the original"}
    digest = read_listings(data)[0].records.digest()
    monkeypatch.setitem(images.PUBLIC_SETS, "cifar10", PublicSet(4, 4, copies={digest: "Anna's copy"}))
    assert image_changes(data) == {"copy of cifar10": "Anna's copy; in the paper's setting the original"}


def test_images_that_are_not_here_or_not_public_give_nothing(tmp_path: Path) -> None:
    assert image_changes(DataOptions(source="parquet", path=str(tmp_path / "cifar10"))) == {}
    assert image_changes(DataOptions(source="digits")) == {}
