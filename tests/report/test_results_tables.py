from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from atoll.report.page import write_report
from tests.report.pages import Page, report, row
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


def test_the_highest_accuracy_is_marked_and_a_shape_never_is(tmp_path):
    a = make_run(tmp_path / "a", "moon", results=evaluation(0.7, 0.6, uniformity=-3.0))
    b = make_run(tmp_path / "b", "ssd", results=evaluation(0.8, 0.5))
    page = report(tmp_path, a, b)
    assert [cell.endswith("highest") for cell in row(page, "moon")[1:]] == [False, True, False, False]
    assert [cell.endswith("highest") for cell in row(page, "ssd")[1:]] == [True, False, False, False]
    assert "One seed cannot distinguish" in page.text
    error = 100 * math.sqrt(0.8 * 0.2 / 400)
    assert (
        f"With 400 test images, the standard error of an accuracy of 80 % is {error:.1f} points." in page.text
    )


OTHERS = {
    "data": ({"recipe": {"data": {"source": "digits", "limit": 9}}}, "differ in their images (data.limit)"),
    "split": ({"results": {**evaluation(0.8), "split": "train"}}, "were not evaluated on the same images"),
    "count": (
        {"results": {**evaluation(0.8), "knn/test_images": 50}},
        "were not evaluated on the same images",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_between_runs_with_other_images_nothing_is_the_highest(tmp_path, name):
    other, sentence = OTHERS[name]
    page = report(tmp_path, make_run(tmp_path / "a", "moon"), make_run(tmp_path / "b", "ssd", **other))
    assert not any(cell.endswith("highest") for method in ("moon", "ssd") for cell in row(page, method))
    assert f"No value is bold, because the runs {sentence}." in page.text
    assert "Bold:" not in page.text


def test_a_test_set_of_other_images_and_equal_size_is_another(tmp_path):
    def page(name, *fingerprints):
        runs = [
            make_run(tmp_path / name / method, method, results=evaluation(0.8)) for method in ("moon", "ssd")
        ]
        for run, fingerprint in zip(runs, fingerprints, strict=False):
            (run / "held_out.json").write_text(json.dumps({"fingerprint": fingerprint}))
        return report(tmp_path / name, *runs).text

    sentence = "No value is bold, because the runs were not evaluated on the same images."
    assert sentence in page("other", "a", "b")
    assert sentence not in page("same", "a", "a")
    assert sentence not in page("unknown", "a")


def test_under_another_protocol_nothing_is_the_highest_of_its_column(tmp_path):
    other = {**evaluation(0.7, 0.6), "probe/name": "l-dawa", "probe/lr": 0.01, "knn/train_images": 7}
    page = report(tmp_path, make_run(tmp_path / "a", "moon", results=other), make_run(tmp_path / "b", "ssd"))
    assert [cell.endswith("highest") for cell in row(page, "moon")[1:3]] == [False, False]
    assert [cell.endswith("highest") for cell in row(page, "ssd")[1:3]] == [True, False]
    sentence = "No value of probe % is bold, because the runs were evaluated under different protocols."
    assert sentence in page.text
    assert "Bold:" in page.text  # kNN's


def test_images_of_another_seed_or_memory_are_no_other_images(tmp_path):
    runs = [
        make_run(tmp_path / f"a{seed}", "moon", seed, {**evaluation(0.7), "knn/test_images": 400 + seed})
        for seed in (0, 1)
    ]
    settings = {"recipe": {"data": {"source": "digits", "memory_gib": 2.0}}}
    page = report(tmp_path, *runs, make_run(tmp_path / "b", "ssd", results=evaluation(0.8), **settings))
    assert row(page, "ssd")[1].endswith("highest")


def test_a_row_of_one_seed_beside_rows_of_more_is_named(tmp_path):
    folders = [make_run(tmp_path / f"ssd{seed}", "ssd", seed) for seed in (0, 1)]
    folders.append(make_run(tmp_path / "moon", "moon", 0))
    page = report(tmp_path, *folders)
    assert row(page, "ssd")[0] == "ssdmean ± std of 2 seeds"
    assert row(page, "moon")[0] == "moonone seed"
    assert "one seed" not in row(report(tmp_path, folders[2], folders[0]), "moon")[0]


def test_what_cannot_be_told_from_the_highest_is_marked_too(tmp_path):
    runs = [("moon", (0.70, 0.80)), ("ssd", (0.79, 0.81)), ("byol", (0.50, 0.51))]
    folders = [
        make_run(tmp_path / f"{method}{seed}", method, seed, evaluation(value))
        for method, values in runs
        for seed, value in enumerate(values)
    ]
    page = report(tmp_path, *folders)
    assert [row(page, method)[1].endswith("highest") for method, _ in runs] == [True, True, False]
    # A screen reader is told which of the bold values is the highest.
    assert row(page, "moon")[1] == "75.00 ± 7.07 within the deviations of the highest"
    assert row(page, "ssd")[1] == "80.00 ± 1.41 highest"


def test_every_number_names_recipe_seed_protocol_and_version(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run-a", seed=7))
    (runs,) = [rows for caption, rows in page.tables.items() if "digest" in caption]
    assert runs[1][:4] == ["ssd", "run-a", "7", "3 of 3"]
    assert runs[1][5] == "9.8.7"
    assert "k 20 · temperature 0.1" in page.text
    assert "name ssd · lr 0.003" in page.text
    assert "Measured on the test images." in page.text
    assert "[train]\nrounds = 3" in page.text


def test_what_else_differs_than_the_method_is_said(tmp_path):
    a = make_run(tmp_path / "a", "moon")
    b = make_run(tmp_path / "b", "ssd", recipe={"train": {"rounds": 3, "lr": 0.1}})
    (rows,) = [
        rows for caption, rows in report(tmp_path, a, b).tables.items() if "Differences between" in caption
    ]
    assert rows == [["recipe key", "moon", "ssd"], ["train.lr", "0.05", "0.1"]]


def test_seeds_with_other_numbers_of_images_have_one_protocol(tmp_path):
    a = make_run(tmp_path / "a", "moon", results={**evaluation(0.9), "geometry/client_images": 1438})
    b = make_run(tmp_path / "b", "ssd", results={**evaluation(0.9), "geometry/client_images": 1430})
    text = report(tmp_path, a, b).text
    assert "different protocols" not in text
    assert "test images 400" in text
    assert "client images 1438 or 1430" in text


def test_a_run_that_measured_nothing_is_under_no_protocol(tmp_path):
    """With no protocol in evaluation.at_end, the page said that the run was measured on the test images."""
    nothing = {"round": 2, "split": "test", "method": "MOON"}
    a = make_run(tmp_path / "a", "moon", results=nothing)
    assert "Measured on" not in report(tmp_path, a).text
    assert "Nothing has been measured yet." in report(tmp_path, a).text
    b = make_run(tmp_path / "b", "ssd")
    text = report(tmp_path, a, b).text
    assert "Measured on the test images" in text
    assert "The runs were evaluated under different protocols" not in text


def test_different_protocols_are_not_passed_off_as_one(tmp_path):
    a = make_run(tmp_path / "a", "moon")
    b = make_run(tmp_path / "b", "ssd", results={**evaluation(0.9), "knn/k": 200})
    text = report(tmp_path, a, b).text
    assert "The runs were evaluated under different protocols" in text
    assert "k 20 ·" in text
    assert "k 200 ·" in text
