from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atoll.report.page import write_report
from tests.report.pages import Page
from tests.report.run_folders import evaluation, make_run

CAPTION = "Measured after the run, by atoll evaluate"


def further(folder: Path, name: str, accuracy: float, **more: Any) -> None:
    results = {"split": "test", "finetune-1/accuracy": accuracy, "finetune-1/epochs": 7}
    (folder / f"evaluation-{name}.json").write_text(json.dumps({"protocol": "finetune-1", **results, **more}))


def test_further_evaluations_are_rows_over_seeds_for_each_images(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"run{seed}", seed=seed, results=evaluation(0.8 + 0.01 * seed)) for seed in (0, 1)
    ]
    for folder, accuracy in zip(folders, (0.5, 0.6), strict=True):
        further(folder, "finetune-1", accuracy)
    further(
        folders[0], "finetune-1-on-moved-1", 0.25, data={"source": "digits", "path": "/moved", "limit": 9}
    )
    (folders[0] / "evaluation-table-knn.json").write_text('{"asked": {}, "results": {"knn/accuracy": 0.1}}')
    page = Page(write_report(folders, tmp_path / "report.html"))
    head, *rows = page.tables[CAPTION]
    assert head == ["method", "images", "split", "measure", "value"]
    assert [row[1:] for row in rows] == [
        ["the recipe’s", "test", "finetune-1 %", "55.00 ± 7.07"],
        ["moved, limit = 9", "test", "finetune-1 %", "25.00"],
    ]
    assert [row[0].endswith(end) for row, end in zip(rows, ("2 seeds", "seed 0"), strict=True)] == [
        True,
        True,
    ]
    assert "finetune-1: epochs 7" in page.text


def test_constants_that_differ_between_images_are_all_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", results=evaluation(0.8))
    further(folder, "finetune-1", 0.5, **{"finetune-1/test_images": 44})
    data = {"source": "digits", "path": "/elsewhere"}
    further(folder, "finetune-1-on-elsewhere-1", 0.6, data=data, **{"finetune-1/test_images": 71})
    page = Page(write_report([folder], tmp_path / "report.html"))
    assert "finetune-1: epochs 7 · test images 44 or 71" in page.text


def test_seeds_that_were_measured_on_other_images_in_one_place_are_no_mean(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"run{seed}", seed=seed, results=evaluation(0.8)) for seed in range(3)]
    for folder, accuracy, images in zip(folders, (0.5, 0.6, 0.9), ("47", "47", "48"), strict=True):
        data = {"source": "digits", "path": "/elsewhere"}
        further(folder, "finetune-1-on-elsewhere-1", accuracy, data=data, fingerprints=["60", images])
    _, *rows = Page(write_report(folders, tmp_path / "report.html")).tables[CAPTION]
    assert [row[-1] for row in rows] == ["55.00 ± 7.07", "90.00"]


def test_without_them_there_is_no_such_table_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", results=evaluation(0.8))
    assert CAPTION not in Page(write_report([folder], tmp_path / "report.html")).tables
    (folder / "evaluation-probe.json").write_text("{")
    page = Page(write_report([folder], tmp_path / "report.html"))
    assert CAPTION not in page.tables
    assert "evaluation-probe.json is damaged, so it is not in the table of further evaluations" in page.text
