"""Several runs in Python's hands: one table with the mean over seeds, and one page."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import atoll
from atoll.core.errors import UserError
from tests.harness import printed, run_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    made = [("ssd", seed) for seed in range(2)] + [("fed_simclr", 0)]
    return [
        run_tiny(root / f"{method}-{seed}", f"method.name={method}", f"seed={seed}").folder
        for method, seed in made
    ]


def test_seeds_are_one_row_with_their_mean_and_spread(folders: list[Path]) -> None:
    runs = atoll.Runs([atoll.Run(folders[0]), str(folders[1]), folders[2]])
    first, second, other = (100 * run.results["knn/accuracy"] for run in runs)
    both = (first, second)
    shown, page = printed(runs), runs._repr_html_()
    for where in (shown, page):
        assert f"{statistics.mean(both):.2f} ± {statistics.stdev(both):.2f}" in where
        assert f"{other:.2f}" in where
    assert page.count("<tr>") == 4  # the head, the untrained encoder, and two methods


def test_the_table_of_final_numbers_has_a_row_for_each_run(folders: list[Path]) -> None:
    pytest.importorskip("pandas")
    frame = atoll.Runs(folders).to_pandas()
    assert list(frame.index) == ["ssd-0", "ssd-1", "fed_simclr-0"]
    assert list(frame["method"]) == ["SSD", "SSD", "FedSimCLR"]
    assert list(frame["seed"]) == [0, 1, 0]
    assert list(frame["knn/accuracy"]) == [atoll.Run(one).results["knn/accuracy"] for one in folders]


def test_the_page_compares_the_runs(folders: list[Path], tmp_path: Path) -> None:
    page = atoll.Runs(folders).report(tmp_path / "page.html").read_text()
    assert "SSD" in page
    assert "FedSimCLR" in page


def test_it_is_a_sequence_of_runs(folders: list[Path]) -> None:
    runs = atoll.Runs(folders)
    assert [run.folder for run in runs] == folders
    assert (len(runs), runs[0].name, [run.name for run in runs[1:]]) == (
        3,
        "ssd-0",
        ["ssd-1", "fed_simclr-0"],
    )
    assert repr(runs).splitlines() == [repr(run) for run in runs]


def test_mistakes(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes a list of runs"):
        atoll.Runs(folders[0])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="takes a list of runs, not an int"):
        atoll.Runs(3)  # type: ignore[arg-type]
    for report in (atoll.Runs(folders).report, atoll.Run(folders[0]).report):
        with pytest.raises(UserError, match="the report is an int; give a path"):
            report(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least one run"):
        atoll.Runs([])
    with pytest.raises(UserError, match="a run is an int; give a path"):
        atoll.Runs([3])  # type: ignore[list-item]
    with pytest.raises(UserError, match="nothing"):
        atoll.Runs([*folders, tmp_path / "nothing"])
