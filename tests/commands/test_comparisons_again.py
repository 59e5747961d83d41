"""Comparisons that continue their runs, or start them again."""

import json

import pytest

from atoll.commands.compare import Comparison, compare, other_runs
from atoll.core.errors import UserError
from tests.commands.interrupted import LONGER, OWN, SETTINGS, flip
from tests.harness import remains, run_tiny, tiny
from tests.trees import same


def test_a_comparison_starts_again_what_cannot_be_continued(tmp_path):
    recipe = tiny(*SETTINGS, "name=x")
    (run,) = compare([recipe], 1, tmp_path).runs
    for path in run.checkpoints.glob("round-*"):
        flip(path)
    longer = tiny(*LONGER, "name=x")
    (failure,) = compare([longer], 1, tmp_path).failures.values()
    assert failure.endswith("or start the run again with --restart")
    again = compare([longer], 1, tmp_path, restart=True)
    assert not again.failures
    assert again.runs[0].results["round"] == 3


@pytest.mark.parametrize("restart", [False, True])
def test_a_comparison_leaves_a_run_of_real_sites_alone(tmp_path, restart):
    run = run_tiny(tmp_path / "x-seed0", *SETTINGS, "name=x")
    run.write("partition.json", json.dumps({**run.read_json("partition.json"), "fingerprint": "sites-12ab"}))
    before = remains(run)
    with pytest.raises(UserError, match="is a run of real sites, which its app continues: flwr run APP"):
        compare([tiny(*LONGER, "name=x")], 1, tmp_path, restart=restart)
    assert same(remains(run), before)


def test_a_comparison_starts_again_a_run_whose_prerequisite_changed(tmp_path):
    alignment = tmp_path / "alignment.toml"
    settings = ("data.limit=40", "partition.clients=2", "name=x", "method.name=fedca")
    settings = (*settings, f"options.fedca_alignment.recipe={alignment}", "options.fedca_dictionary.size=16")
    centralised = (
        "partition.kind=centralised",
        "train.keep_optimizer=true",
        "evaluation.at_end=['geometry']",
    )

    def trained_at(lr):
        inner = tiny(
            "data.limit=40", "method.name=fed_simclr", *centralised, f"train.lr={lr}", "train.rounds=1"
        )
        alignment.write_text(inner.to_toml())

    trained_at(0.05)
    assert not compare([tiny(*settings, "train.rounds=1")], 1, tmp_path).failures
    trained_at(0.02)
    longer = tiny(*settings, "train.rounds=2")
    (failure,) = compare([longer], 1, tmp_path).failures.values()
    assert "needs the run in" in failure
    assert "was started with train.lr = 0.05" in failure
    assert not compare([longer], 1, tmp_path, restart=True).failures


def test_a_comparison_trains_again_what_has_changed_if_asked(own_method, tmp_path):
    recipes = [tiny(*SETTINGS, "name=mine", "method.name=owned:METHOD"), tiny(*SETTINGS, "name=theirs")]
    mine, theirs = compare(recipes, 1, tmp_path).runs
    before = {run.name: remains(run) for run in (mine, theirs)}
    times = {run.name: (run.folder / "evaluation.json").stat().st_mtime_ns for run in (mine, theirs)}
    own_method(OWN.replace("0.1", "0.2"))
    recipes[0] = tiny(*SETTINGS, "name=mine", "method.name=owned:METHOD")
    with pytest.raises(UserError, match=r"^mine: .* another version of owned:METHOD .*--restart"):
        compare(recipes, 1, tmp_path)
    compare(recipes, 1, tmp_path, restart=True)
    assert not same(remains(mine), before[mine.name])
    assert (theirs.folder / "evaluation.json").stat().st_mtime_ns == times[theirs.name]
    assert other_runs(Comparison([mine], {}), tmp_path) == [theirs.name]
    assert other_runs(Comparison([mine], {theirs.name: "why"}), tmp_path) == []
