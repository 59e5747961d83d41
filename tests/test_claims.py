"""The claims: their page is what the records say, and a verdict follows from its interval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy import stats

import claims as tool
from board_rows import Entry

CLAIM = {
    "paper": "Dec-SSL",
    "says": "Unlike clients cost less.",
    "published": {
        "keys": {
            "paper": "Dec-SSL",
            "table": "2-bottom",
            "dataset": "CIFAR-100->CIFAR-10",
            "metric": "LP acc (fraction) with 100% labels",
        },
        "plus": [{"method": "Dec-SSL Non-IID"}, {"method": "Dec-SLRep IID"}],
        "minus": [{"method": "Dec-SSL IID"}, {"method": "Dec-SLRep Non-IID"}],
        "points": 100,
    },
    "measure": ["classifier/accuracy", "probe/accuracy"],
    "ours": [{"scale": "tiny", "plus": ["claims:a", "claims:b"], "minus": ["claims:c"]}],
    "tell": "more",
}
TABLE = {
    "seeds": [1, 2, 3],
    "runs": {name: {"recipe": "digits", "settings": []} for name in "abc"},
    "claims": [CLAIM],
}


def store(folder: Path, name: str, seed: int, **evaluation: float) -> None:
    record = {"evaluation": {key.replace("_", "/"): value for key, value in evaluation.items()}}
    (folder / f"{name}-seed{seed}.json").write_text(json.dumps(record))


def test_the_page_is_what_the_records_say():
    text = tool.PAGE.read_text("utf-8")
    assert tool.filled(text, tool.made(tool.Claims()), tool.BEGIN, tool.END) == text


def test_every_claim_has_the_papers_value_and_sources_that_exist():
    claims = tool.Claims()
    assert len(claims.table["claims"]) > 15
    for claim in claims.table["claims"]:
        assert tool.published(claim) > 0, claim["says"]
        for one in claim["ours"]:
            for source in [*one["plus"], *one["minus"]]:
                claims.points(source, claim["measure"])


def test_the_papers_difference_is_that_of_its_table():
    # methods.md's Table 2 (bottom): 0.70 − 0.71 for self-supervision, 0.43 − 0.65 for supervision
    assert tool.published(CLAIM) == pytest.approx(100 * ((0.70 - 0.71) - (0.43 - 0.65)))


def test_a_difference_takes_common_seeds_and_the_first_measure_that_exists(tmp_path):
    for seed, (a, b, c) in enumerate([(0.5, 0.2, 0.3), (0.6, 0.2, 0.3), (0.7, 0.2, 0.1)], start=1):
        store(tmp_path, "a", seed, classifier_accuracy=a, probe_accuracy=0.0)
        store(tmp_path, "b", seed, probe_accuracy=b)
        if seed < 3:
            store(tmp_path, "c", seed, probe_accuracy=c)
    claims = tool.Claims(tmp_path, TABLE)
    (row,) = tool.rows(claims)
    differences = [40.0, 50.0]
    half = stats.ttest_rel(differences, [0, 0]).confidence_interval(0.95).high - 45
    assert row[3] == f"+45.00 [{tool.signed(45 - half)}, {tool.signed(45 + half)}]"
    assert row[4:6] == ["tiny, 2 seeds", "cannot tell"]
    store(tmp_path, "c", 3, probe_accuracy=0.4)
    assert [row[5] for row in tool.rows(claims)] == ["supports"]
    assert claims.missing() is None


def test_a_record_without_the_measure_does_not_count(tmp_path):
    store(tmp_path, "a", 1, knn_accuracy=0.5)
    store(tmp_path, "a", 2, classifier_accuracy=0.7, knn_accuracy=0.1)
    store(tmp_path, "a", 3)  # a failed run
    claims = tool.Claims(tmp_path, TABLE)
    assert claims.points("claims:a", CLAIM["measure"]) == {2: 70.0}
    store(tmp_path, "b", 1, probe_accuracy=0.5)
    store(tmp_path, "c", 1, probe_accuracy=0.5)
    assert [row[5] for row in tool.rows(claims)] == ["not run"]


def test_a_comparison_takes_each_runs_own_base(tmp_path):
    for seed, (a, b) in enumerate([(0.5, 0.2), (0.6, 0.2)], start=1):
        store(tmp_path, "a", seed, knn_accuracy=a)
        store(tmp_path, "b", seed, knn_accuracy=b)
    rows = [{"what": "first", "run": "a", "base": "b"}, {"what": "second", "run": "c", "base": "b"}]
    table = TABLE | {"comparisons": [{"title": "T", "measures": ["knn/accuracy"], "rows": rows}]}
    half = stats.ttest_rel([30.0, 40.0], [0, 0]).confidence_interval(0.95).high - 35
    interval = f"[{tool.signed(35 - half)}, {tool.signed(35 + half)}]"
    lines = list(tool.compared(tool.Claims(tmp_path, table)))
    assert lines[-3:] == [f"| first | +35.00 {interval} (2) |", "| second | – |", ""]


def test_a_setting_may_name_its_seed(tmp_path):
    runs = {"a": {"recipe": "digits", "settings": ["train.start=runs/b-seed{seed}"]}}
    claims = tool.Claims(tmp_path, TABLE | {"runs": runs})
    assert [entry.settings for entry in claims.entries()] == [
        [f"train.start=runs/b-seed{n}"] for n in (1, 2, 3)
    ]


def test_every_comparison_names_runs_that_exist():
    table = tool.Claims().table
    sides = [one[side] for t in table["comparisons"] for one in t["rows"] for side in ("run", "base")]
    assert sides
    assert set(sides) <= set(table["runs"])


def test_without_records_a_claim_is_not_run(tmp_path):
    claims = tool.Claims(tmp_path, TABLE)
    ((*_, ours, _, verdict, _),) = tool.rows(claims)
    assert (ours, verdict) == ("–", "not run")
    assert claims.missing() == Entry("a-seed1", "digits", 1, [], ())


@pytest.mark.parametrize(
    ("n", "mean", "half", "verdict"),
    [
        (3, 1.0, 0.5, "supports"),
        (3, -1.0, 0.5, "contradicts"),
        (3, 1.0, 1.0, "cannot tell"),
        (1, 9.0, None, "cannot tell (one seed)"),
        (0, float("nan"), None, "not run"),
    ],
)
def test_a_verdict_follows_from_its_interval(n, mean, half, verdict):
    assert tool.judge(n, mean, half) == verdict
