"""Every table and figure of the papers: listed by name, buildable, and run by one cell each."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from atoll.commands.reproduce import dry_run, reproduce, require_built
from atoll.core.errors import UserError
from atoll.papers.inventory import HERE, inventory
from atoll.papers.reproduction import find_table
from atoll.papers.tables import figure_names, listed, load_table, table_names
from tests.shapes import write_coco

RUNNABLE = [*table_names(), *figure_names()]
TABLES = {"ssd": 5, "l-dawa": 7, "fedca": 3, "fedquad": 5}
FIGURES = {"ssd": [1, 2, 3, 4, 5, 6], "l-dawa": range(1, 7), "fedca": range(1, 6), "fedquad": range(1, 5)}


DATA = os.environ.get("ATOLL_DATA")


@pytest.fixture(scope="session")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small sets of noise with the classes and the places of the papers' sets."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name, size, classes, splits in (
        ("cifar10", 32, 10, {"train": 400, "test": 60}),
        ("tiny-imagenet", 64, 200, {"train": 400, "val": 200}),
    ):
        (folder / name).mkdir()
        for split, count in splits.items():
            labels = np.arange(count) % classes
            images = [
                _png(rng.integers(0, 256, (size, size, 3)) * 0.5 + 127 * label / classes) for label in labels
            ]
            table = pa.table({"image": [{"bytes": image, "path": ""} for image in images], "label": labels})
            pq.write_table(table, folder / name / f"{split}.parquet")
    for place, count in (
        ("imagenet-100/train/{:03}", 50),
        ("imagenet-100/val/{:03}", 2),
        ("amazon-packages/{}", 20),
    ):
        for group in range(5):
            here = folder / place.format(group)
            here.mkdir(parents=True)
            for i in range(count):
                (here / f"{i}.png").write_bytes(_png(rng.integers(0, 256, (32, 32, 3))))
    write_coco(folder / "coco", splits=("train2017", "val2017"))
    write_coco(folder / "amazon-packages-masks", splits=("train", "val"))
    return folder


@pytest.fixture
def data(noise: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of ATOLL_DATA, or the sets of noise."""
    folder = Path(DATA) if DATA else noise
    monkeypatch.setenv("ATOLL_DATA", str(folder))
    return folder


def _png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(stream, "png")
    return stream.getvalue()


def test_every_table_and_figure_of_the_papers_has_a_name() -> None:
    expected = {f"{paper}-{n}" for paper, count in TABLES.items() for n in range(1, count + 1)}
    expected |= {f"{paper}-fig-{n}" for paper, numbers in FIGURES.items() for n in numbers}
    expected |= {f"dec-ssl-{n}" for n in ("1-left", "1-right", "2-top", "2-bottom", "3", "4")}
    expected |= {f"dec-ssl-fig-{n}" for n in range(1, 22)}
    expected = (expected - {"ssd-fig-6"}) | {"ssd-fig-6a", "ssd-fig-6b"}
    assert set(listed()) == expected


def test_each_has_a_state_and_nothing_is_absent(
    monkeypatch: pytest.MonkeyPatch, noise: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATOLL_DATA", str(noise))
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path))
    entries = {entry.name: entry for entry in inventory()}
    assert set(RUNNABLE) <= set(entries)
    for name, about in listed().items():
        parts = [entry for entry in entries.values() if entry.name == name or entry.name.startswith(name)]
        assert parts
        assert not ("why" in about and name in RUNNABLE), "it has a file now: take the reason out"
    assert all(entry.title and entry.state for entry in entries.values())
    assert entries["ssd-3"].state.startswith(HERE)
    assert "test images of cifar10: 60; in the paper's setting 10,000" in entries["ssd-3"].marks
    assert "14 of 28 rows runnable here" in entries["l-dawa-6"].state
    assert "the others with CIFAR100 (torchvision)" in entries["l-dawa-6"].state
    assert entries["ssd-fig-2"].state == "not runnable: a drawing: it measures nothing"


def test_without_images_the_state_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    entries = {entry.name: entry for entry in inventory()}
    assert entries["ssd-3"].state == "runnable with cifar10 (parquet)"


def test_what_is_not_covered_says_why() -> None:
    with pytest.raises(UserError, match="ssd-fig-2 is not covered: a drawing"):
        load_table("ssd-fig-2")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_every_row_builds_and_one_cell_of_each_runs(name: str, data: Path, tmp_path: Path) -> None:
    checks = dry_run(find_table(name, scale="test"))
    require_built(checks)
    here = [check.row.name for check in checks if check.clients]
    if not here:
        pytest.skip(f"no images for {name}: {checks[0].missing}")
    record = reproduce(find_table(name, [here[-1]], scale="test", out=tmp_path / "out"))
    assert record["failures"] == {}
    (row,) = record["rows"]
    measured = [value for value in row["values"].values() if value["measure"]]
    assert all(len(value["ours"]) == 1 for value in measured)
    if name in figure_names():
        assert record["figure"]["panels"]
        assert "NOT the paper's setting" in (tmp_path / "out/figure.svg").read_text()
