"""Folders that are unfinished, damaged or edited: what the page still shows, and what it says."""

from __future__ import annotations

import json
import math

import pytest

from atoll.commands.report import report_runs
from atoll.core.errors import UserError
from atoll.core.metrics_lines import format_line
from atoll.core.run_folder import Run
from atoll.report import write_report
from tests.report.pages import report, row
from tests.report.run_folders import evaluation, make_run


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("evaluation.json", {"environments": 5}),
        ("evaluation.json", {"knn/accuracy": 10**400}),
        ("evaluation.json", {"geometry/singular_values": [["x"]]}),
        ("evaluation.json", {"seconds": "<b>"}),
        ("partition.json", {"clients": [{"name": "0", "size": math.inf, "label_counts": None}]}),
        ("partition.json", {"options": None}),
    ],
)
def test_an_edited_file_that_atoll_would_not_write_is_named(tmp_path, file, change):
    """A file without a digest is read as it is; the commands ended with a traceback."""
    run = make_run(tmp_path / "run")
    (run / file).write_text(json.dumps({**json.loads((run / file).read_text()), **change}))
    for command in (lambda: report_runs([run]), lambda: write_report([run], tmp_path / "report.html")):
        with pytest.raises(UserError, match=rf"does not write \(.*may have been edited: .*{file}"):
            command()
    assert not (run / "report.html").exists()


def test_only_files_without_a_digest_are_blamed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    for name in ("recipe.toml", "partition.json", "evaluation.json"):
        Run(run).write(name, (run / name).read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    sealed = [format_line(line) for line in lines]
    edited = json.dumps({**lines[-1], "bytes_up": ["x"]}).encode()
    (run / "metrics.jsonl").write_bytes(b"".join([*sealed[:-1], edited, b"\n"]))
    with pytest.raises(UserError, match=r"edited: [^,]*metrics\.jsonl; restore"):
        write_report([run], tmp_path / "report.html")
    (run / "metrics.jsonl").write_bytes(b"".join(sealed))
    monkeypatch.setattr("atoll.report.page.page", lambda *_: {}["defect"])
    with pytest.raises(KeyError, match="defect"):
        write_report([run], tmp_path / "report.html")


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("evaluation.json", "there are no final results of this run"),
        ("partition.json", "its clients are unknown"),
        ("metrics.jsonl", "there are no curves and no untrained encoder"),
        ("map.safetensors", "there is no map"),
    ],
)
def test_a_missing_or_damaged_file_is_said_and_the_rest_is_shown(tmp_path, file, sentence):
    whole = make_run(tmp_path / "whole", "moon")
    run = make_run(tmp_path / "broken")
    (run / file).unlink()
    page = report(tmp_path, whole, run)
    assert f"broken: {file} is missing" in page.text
    assert sentence in page.text
    assert "whole:" not in page.text
    assert row(page, "moon")[1].startswith("90.00")
    (run / file).write_bytes(b"\x00{not json")
    assert f"broken: {file} is " in report(tmp_path, run).text


def test_lost_lines_of_a_finished_runs_metrics_are_said(tmp_path):
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-2]))
    page = report(tmp_path, run)
    assert "run: metrics.jsonl ends at round 1 of 3, so the curves lack the rounds between." in page.text
    assert "rounds are done" not in page.text


def test_a_folder_with_a_recipe_alone_is_a_page(tmp_path):
    run = make_run(tmp_path / "run", rounds=0)
    for file in ("metrics.jsonl", "partition.json"):
        (run / file).unlink()
    page = report(tmp_path, run)
    assert "run: 0 of 3 rounds are done" in page.text
    assert "No round has been completed yet." in page.text


def test_an_unfinished_run_shows_how_far_it_came(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run", rounds=2, asked=5))
    assert "run: 2 of 5 rounds are done; this page shows the completed ones." in page.text
    (knn,) = [panel for panel in page.data["curves"] if panel["title"] == "kNN %"]
    assert knn["series"] == [{"line": 0, "x": [0, 1, 2], "y": [50.0, 65.0, 70.0], "s": None}]
    assert row(page, "ssd")[1] == "–"


def test_of_damaged_metrics_nothing_is_claimed(tmp_path):
    damaged = make_run(tmp_path / "damaged", results=evaluation(0.8) | {"round": 3})
    (damaged / "metrics.jsonl").write_text("{")
    text = report(tmp_path, damaged).text
    assert "damaged: its metrics cannot be read, so refused and lost updates are unknown" in text
    assert "No update was refused or lost." not in text
    with pytest.warns(UserWarning, match=r"damaged: metrics\.jsonl is missing or empty, so there are no"):
        report_runs([damaged])


def test_a_diverged_run_is_a_page(tmp_path):
    run = make_run(tmp_path / "run")
    line = {
        "round": 4,
        "loss": math.nan,
        "bytes_up": 1,
        "bytes_down": 1,
        "evaluation": {"knn/accuracy": math.inf},
    }
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert report(tmp_path, run).data["curves"]


def test_a_folder_that_holds_no_run_is_a_mistake_and_writes_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    for folders in ([], [tmp_path / "empty"], [tmp_path / "nowhere"]):
        with pytest.raises(UserError):
            write_report(folders, tmp_path / "report.html")
    run = make_run(tmp_path / "run")
    (run / "recipe.toml").write_text("seed = ")
    with pytest.raises(UserError, match=r"recipe\.toml"):
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_folder_whose_name_is_no_text_has_a_page(tmp_path):
    run = make_run(tmp_path / "caf\udce9")
    assert "caf" in write_report([run], tmp_path / "page.html").read_text()
