"""Paired differences against scipy's own test."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from atoll.core.run_folder import Run
from atoll.report import write_report
from atoll.report.comparison import comparison_cells
from atoll.report.paired import paired, verdict, with_interval
from tests.report.pages import Page
from tests.report.run_folders import evaluation, make_run

VALUES = st.floats(0, 100).map(lambda value: round(value, 2))


@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=6))
def test_the_interval_is_that_of_scipys_paired_test(pairs):
    row, base = ({seed: pair[i] for seed, pair in enumerate(pairs)} for i in (0, 1))
    n, mean, half = paired({**row, 90: 1.0}, {**base, 91: 2.0})  # seeds of one alone do not count
    assert n == len(pairs)
    if len({round(a - b, 2) for a, b in pairs}) > 1:
        theirs = stats.ttest_rel(list(row.values()), list(base.values())).confidence_interval(0.95)
        assert (mean - half, mean + half) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    else:
        assert half == pytest.approx(0, abs=1e-9)


def test_the_words_say_what_cannot_be_told():
    assert verdict(3, 2.0, 2.484) == "+2.00 [−0.48, +4.48], cannot tell"
    assert verdict(3, -2.0, 0.5) == "−2.00 [−2.50, −1.50]"
    assert verdict(1, 1.0, None) == "+1.00, cannot tell (one seed)"
    assert verdict(0, float("nan"), None) == "–"
    assert with_interval(1.0, None) == "+1.00"


def test_one_common_seed_has_a_difference_without_an_interval():
    assert paired({0: 2.0, 1: 9.0}, {0: 0.5, 2: 3.0}) == (1, 1.5, None)


def test_the_page_shows_differences_if_seeds_are_common(tmp_path):
    folders = [
        make_run(tmp_path / f"{method}{seed}", method, seed, evaluation(knn))
        for method, knns in (("ssd", (0.5, 0.6, 0.7)), ("fed_simclr", (0.45, 0.55, 0.6)))
        for seed, knn in enumerate(knns)
    ]
    page = Page(write_report(folders, tmp_path / "report.html"))
    (caption,) = (caption for caption in page.tables if caption.startswith("Differences"))
    assert caption == "Differences from ssd, paired by seed"
    assert page.tables[caption] == [
        ["method", "kNN %", "probe %"],
        [
            "fed_simclr3 common seeds",
            "−6.67 [−13.84, +0.50], cannot tell",
            "+0.00 [+0.00, +0.00], cannot tell",
        ],
    ]
    alone = Page(write_report(folders[:4:3], tmp_path / "one.html"))
    assert not any(caption.startswith("Differences") for caption in alone.tables)


def test_the_page_names_the_common_seeds_of_each_difference(tmp_path):
    knns = {"ssd": (0.5, 0.6, 0.7, 0.8, 0.9), "moon": (0.52, 0.61, 0.75), "byol": (0.4, 0.7), "fedu": (0.4,)}
    folders = [
        make_run(tmp_path / f"{method}{seed}", method, seed, evaluation(knn))
        for method, values in knns.items()
        for seed, knn in enumerate(values)
    ]
    path = write_report(folders, tmp_path / "report.html")
    _, *rows = Page(path).tables["Differences from ssd, paired by seed"]
    assert [row[0] for row in rows] == ["moon3 common seeds", "byol2 common seeds"]
    html = path.read_text("utf-8").split("Differences from ssd, paired by seed</span>")[1]
    assert re.findall(r'class="key k(\d)"', html.partition("</table>")[0]) == ["1", "2"]
    for row, method in zip(rows, ("moon", "byol"), strict=True):
        ours = [100 * knn for knn in knns[method]]
        theirs = [100 * knn for knn in knns["ssd"][: len(ours)]]
        interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        assert row[1].startswith(f"{sum(ours) / len(ours) - sum(theirs) / len(ours):+.2f} [")
        bounds = f"[{interval.low:+.2f}, {interval.high:+.2f}], cannot tell"
        assert row[1].endswith(bounds.replace("-", "−"))


def test_another_protocol_or_other_images_have_no_difference(tmp_path):
    probe = {"probe/name": "l-dawa", "probe/lr": 0.01}
    kinds = {
        "ssd": ({}, {}),
        "moon": (probe, {}),
        "fed_simclr": ({}, {"data": {"source": "digits", "limit": 9}}),
    }
    folders = [
        make_run(
            tmp_path / f"{method}{seed}", method, seed, evaluation(0.5 + 0.1 * seed) | more, recipe=recipe
        )
        for method, (more, recipe) in kinds.items()
        for seed in (0, 1)
    ]
    page = Page(write_report(folders, tmp_path / "report.html"))
    assert page.tables["Differences from ssd, paired by seed"] == [
        ["method", "kNN %", "probe %"],
        ["moon2 common seeds", "+0.00 [+0.00, +0.00], cannot tell", "–"],
    ]
    assert "A dash stands for another protocol" in page.text


def test_without_results_the_first_method_is_not_the_base(tmp_path):
    folders = [
        make_run(tmp_path / f"{method}{seed}", method, seed) for method in ("a", "b", "c") for seed in (0, 1)
    ]
    for folder in folders[:2]:
        (folder / "evaluation.json").unlink()
    page = Page(write_report(folders, tmp_path / "report.html"))
    (caption,) = (caption for caption in page.tables if caption.startswith("Differences"))
    assert caption == "Differences from b, paired by seed"
    assert [row[0] for row in page.tables[caption]] == ["method", "c2 common seeds"]
    (folders[2] / "evaluation.json").unlink()
    labels = [row[0] for row in comparison_cells([Run(folder) for folder in folders])[1]]
    assert labels == ["Untrained encoder", "a", "b (1 of 2 runs)", "c"]


def test_methods_of_other_seeds_are_told_with_them_and_have_no_difference(tmp_path):
    folders = [
        make_run(tmp_path / f"{name}{seed}", name, seed)
        for name, seed in zip("aabb", (0, 1, 1, 2), strict=True)
    ]
    page = write_report(folders, tmp_path / "report.html")
    assert not [caption for caption in Page(page).tables if caption.startswith("Differences")]
    assert "No differences are shown: no other method has two of the seeds of a." in page.read_text()
    assert [row[0] for row in Page(page).tables["Results by method"][-2:]] == [
        "amean ± std of 2 seeds; seeds 0, 1",
        "bmean ± std of 2 seeds; seeds 1, 2",
    ]
    notes = comparison_cells([Run(folder) for folder in folders])[2]
    assert notes[-1].startswith(
        "seeds 0, 1, 2 (Untrained encoder: seeds 0, 1, 2; a: seeds 0, 1; b: seeds 1, 2)"
    )
