import io
import statistics
from dataclasses import replace

import pytest
from rich.console import Console

from atoll.cli import main
from atoll.compare import (
    by_method,
    compare,
    comparison_cells,
    comparison_markdown,
    comparison_table,
    counterparts,
)
from atoll.errors import UserError
from atoll.launch import launch
from atoll.runs import Run
from harness import TINY, tiny


def text(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_recipes_by_method_and_their_lines():
    recipes = by_method(tiny("name=base"), ["ssd", "fed_simclr", "fed_align_uniform"])
    assert [recipe.name for recipe in recipes] == ["base-ssd", "base-fed_simclr", "base-fed_align_uniform"]
    lines = counterparts(recipes)
    assert [line.name for line in lines] == [
        "base-fed_align_uniform-centralised",
        "base-fed_align_uniform-alone",
        "base-fed_simclr-centralised",
        "base-fed_simclr-alone",
    ]
    whole, alone = lines[0], lines[1]
    assert whole.partition.kind == "centralised"
    assert whole.train.keep_optimizer
    assert whole.composed.terms == ()
    assert whole.label == "FedAlignUniform, centralised"
    assert alone.composed.merge.name == "local_only"
    assert alone.label == "FedAlignUniform, each client alone"
    with pytest.raises(UserError, match="unknown method"):
        by_method(tiny(), ["sdd"])


def test_each_objective_with_its_options_has_its_own_lines():
    """FedX's contrast has another temperature than FedSimCLR's, which L-DAWA shares."""
    recipes = by_method(tiny("name=base"), ["fed_simclr", "l_dawa", "fedx"])
    lines = counterparts(recipes)
    assert [line.name for line in lines[::2]] == ["base-fed_simclr-centralised", "base-fedx-centralised"]
    assert [line.composed.objective.temperature for line in lines[::2]] == [0.5, 0.1]
    elsewhere = by_method(tiny("name=other", "data.limit=80"), ["fed_simclr"])
    assert len(counterparts([*recipes, *elsewhere])) == 6
    warmer = [
        tiny(f"name={name}", f"method.name={name}", "options.simclr.temperature=0.2")
        for name in ("fed_simclr", "l_dawa")
    ]
    assert len(counterparts(warmer)) == 2


def test_a_table_is_mean_and_std_over_seeds_and_a_comparison_resumes(tmp_path):
    recipe = tiny("name=tiny", "method.name=fed_simclr")
    runs = compare([recipe], 2, tmp_path).runs
    accuracies = [100 * run.read_json("evaluation.json")["knn/accuracy"] for run in runs]
    untrained = [100 * run.metrics()[0]["evaluation"]["knn/accuracy"] for run in runs]
    shown = text(comparison_table(comparison_cells(runs)))
    for values in (accuracies, untrained):
        assert f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" in shown
    stamps = [run.encoder_path.stat().st_mtime_ns for run in runs]
    again = compare([recipe], 3, tmp_path).runs
    assert f"| FedSimCLR | {statistics.mean(accuracies):.2f} ± " in comparison_markdown(
        comparison_cells(runs)
    )
    assert [run.encoder_path.stat().st_mtime_ns for run in again[:2]] == stamps
    assert len(again) == 3
    # Two methods begin with the same weights: the untrained encoder still counts once a seed.
    both = [*runs, *compare([tiny("name=other", "method.name=ssd")], 2, tmp_path).runs]
    assert comparison_cells(both)[1][0] == comparison_cells(runs)[1][0]


def test_a_run_that_fails_takes_none_of_the_others_with_it(tmp_path, monkeypatch, capsys):
    """Of two seeds one has every update refused: the other's number stands, and says that it is alone."""

    def launch_or_fail(recipe, folder, **rest):
        fails = recipe.label == "SSD" and recipe.seed == 1
        return launch(
            replace(recipe, train=replace(recipe.train, first_norm=1e-9)) if fails else recipe, folder, **rest
        )

    monkeypatch.setattr("atoll.compare.launch", launch_or_fail)
    settings = [word for setting in (*TINY, "seed=0") for word in ("--set", setting)]
    asked = f"compare digits --methods fed_align_uniform ssd --seeds 2 --out {tmp_path}".split()
    assert main([*asked, *settings]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("atoll: SSD, seed 1: round 1 failed: ")
    assert said.err.count("\n") == 1
    assert "SSD (1 of 2 runs)" in said.out
    assert "FedAlignUniform (" not in said.out
    assert (
        f"{100 * Run(tmp_path / 'digits-ssd-seed0').read_json('evaluation.json')['knn/accuracy']:.2f}"
        in said.out
    )
    assert (tmp_path / "report.html").is_file()
    assert "| SSD (1 of 2 runs) |" in (tmp_path / "table.md").read_text()


def test_a_comparison_that_cannot_be_made_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="at least 1 seed a recipe, not 0"):
        compare([tiny()], 0, tmp_path)
    with pytest.raises(UserError, match="two recipes are called 'digits'"):
        compare([tiny(), tiny("train.lr=0.3")], 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_recipes_of_one_method_keep_rows_of_their_own(tmp_path):
    """Else the mean of two settings would pass for one over seeds, and one's untrained encoder for the other's."""
    made = compare([tiny("name=small"), tiny("name=large", "data.image_size=12")], 1, tmp_path)
    _, rows, _ = comparison_cells(made.runs)
    results = [run.read_json("evaluation.json") for run in made.runs]
    first = [run.metrics()[0]["evaluation"] for run in made.runs]
    assert [row[0].rpartition(" (")[2] for row in rows] == ["small)", "large)", "small)", "large)"]
    assert [row[1] for row in rows] == [f"{100 * one['knn/accuracy']:.2f}" for one in (*first, *results)]
