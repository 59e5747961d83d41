"""No accuracy is called the highest among rows that were measured on other images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.core.run_folder import SITES_OWN, Run
from atoll.report.comparison import comparison_cells
from atoll.report.page import write_report
from tests.report.pages import Page
from tests.report.run_folders import evaluation, make_run

UNLIKE = "different sites measured before and after the training"


def at_sites(accuracy: float, *names: str, images: int = 12) -> dict[str, Any]:
    """The evaluation of a federation whose coordinator has no images."""
    counts = {"knn/test_images": images * len(names)}
    sites = {name: evaluation(accuracy) | {"knn/test_images": images} for name in names}
    return {**evaluation(accuracy), **counts, "split": SITES_OWN, "sites": sites}


def federated(folder: Path, before: dict[str, Any], after: dict[str, Any], method: str = "ssd") -> Path:
    make_run(folder, method, results=after)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[0]["evaluation"] = before
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (("east", "west"), ("west",), f"{UNLIKE} (only before: east)"),
        (("west",), ("east", "west"), f"{UNLIKE} (only after: east)"),
        (("west",), ("east",), f"{UNLIKE} (only before: west; only after: east)"),
    ],
)
def test_a_baseline_of_other_sites_is_no_rival_and_the_missing_ones_are_named(tmp_path, before, after, words):
    run = federated(tmp_path / "run", at_sites(0.6, *before), at_sites(0.6, *after))
    page = Page(write_report([run], tmp_path / "report.html"))
    assert f"No value is bold, because {words}." in page.text
    assert not any("highest" in cell for row in page.tables["Results by method"] for cell in row)
    assert words in comparison_cells([Run(run)])[2]


def test_a_baseline_of_the_same_sites_is_compared(tmp_path):
    run = federated(tmp_path / "run", at_sites(0.5, "east", "west"), at_sites(0.6, "west", "east"))
    page = Page(write_report([run], tmp_path / "report.html"))
    assert "Bold: the highest" in page.text
    assert UNLIKE not in page.text
    assert not any(UNLIKE in note for note in comparison_cells([Run(run)])[2])


def test_methods_that_other_sites_measured_are_not_compared(tmp_path):
    """Both have as many images."""
    runs = [
        federated(tmp_path / method, at_sites(0.5, site), at_sites(0.6, site), method)
        for method, site in (("ssd", "east"), ("moon", "west"))
    ]
    page = Page(write_report(runs, tmp_path / "report.html"))
    assert "No value is bold, because the runs were not evaluated on the same images." in page.text


def test_the_standard_error_counts_the_sites_images_and_not_the_sites(tmp_path):
    both = at_sites(0.5, "east", "west", images=6)
    page = Page(write_report([federated(tmp_path / "run", both, both)], tmp_path / "report.html"))
    assert "With 12 images of the sites, the standard error" in page.text
