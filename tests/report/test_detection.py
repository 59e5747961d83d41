from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from atoll.core.files import hash_bytes
from atoll.report.detection import HEADINGS, detection_table, precision_cells
from atoll.report.folders import Folder, read_folder
from atoll.report.groups import group_runs
from atoll.report.page import page


def record(seed: int, precision: float | None, **more: Any) -> dict[str, Any]:
    numbers = {"AP": precision, "AP50": 0.5, "AP75": None}
    options = {"epochs": 3, "seed": seed, "save_every": 100 + seed}
    return {"data": "bccd", "start": "pretrained", "seed": seed, "options": options, "bbox": numbers, **more}


def folder(path: Path, records: list[dict[str, Any]]) -> Folder:
    """A run of which only the recipe and the records are there."""
    (path / "detection" / "bccd").mkdir(parents=True)
    (path / "recipe.toml").write_text('seed = 4\nname = "run"\n[method]\nname = "ssd"\n')
    for number, one in enumerate(records):
        (path / "detection" / "bccd" / f"{number}.json").write_text(json.dumps(one))
    return read_folder(path)


def rows(text: str) -> list[list[str]]:
    body = re.search(r"<tbody>(.*?)</tbody>", text)
    assert body is not None
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", body[1])
    ]


def test_cells_are_means_over_seeds_in_percent() -> None:
    assert precision_cells([record(0, 0.30), record(1, 0.34)]) == ["32.0 ± 2.8", "50.0", "–", "–", "–"]
    masks = record(0, 0.1, segm={"AP": 0.25, "AP50": 0.75})
    assert dict(zip(HEADINGS, precision_cells([masks]), strict=True))["AP50, masks %"] == "75.0"


def test_a_row_is_one_start_over_its_seeds(tmp_path: Path) -> None:
    other = {**record(0, 0.2), "options": {"epochs": 9}}
    run = folder(tmp_path / "run", [record(0, 0.3), record(1, 0.34), record(0, 0.1, start="scratch"), other])
    shown = rows(detection_table(group_runs([run])))
    assert [[cells[0], *cells[1:4]] for cells in shown] == [
        ["ssd2 seeds", "bccd", "this encoder", "32.0 ± 2.8"],
        ["ssdseed 0", "bccd", "from scratch", "10.0"],
        ["ssdseed 0", "bccd", "this encoder", "20.0"],
    ]
    text = detection_table(group_runs([run]))
    assert "epochs 3" in text
    assert "epochs 9" in text
    assert "save every" not in text


def test_the_page_holds_the_table_and_names_a_damaged_record(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [record(0, 0.3)])
    assert "Object detection" in page([run])
    assert detection_table(group_runs([folder(tmp_path / "none", [])])) == ""
    (tmp_path / "run" / "detection" / "bccd" / "0.json").write_text("{")
    damaged = read_folder(tmp_path / "run")
    assert damaged.detection == []
    assert any("detection/bccd/0.json is damaged" in sentence for sentence in damaged.missing)


def test_detectors_of_an_earlier_encoder_are_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "encoder.safetensors").write_bytes(b"weights")
    now, before = ({"weights": hash_bytes(weights)} for weights in (b"weights", b"others"))
    records = [record(0, 0.3, encoder=now), record(1, 0.9, encoder=before), record(2, 0.1, encoder={})]
    run = folder(tmp_path, records)
    assert [one["seed"] for one in run.detection] == [0, 2]
    assert [one for one in run.missing if "bccd/1.json is of an earlier encoder" in one]
