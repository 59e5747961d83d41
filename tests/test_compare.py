import io
import statistics

import pytest
from rich.console import Console

from atoll.compare import by_method, compare, comparison_table, counterparts
from atoll.errors import UserError
from harness import tiny


def text(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_recipes_by_method_and_their_lines():
    recipes = by_method(tiny("name=base"), ["ssd", "fed_simclr", "fed_align_uniform"])
    assert [recipe.name for recipe in recipes] == ["base-ssd", "base-fed_simclr", "base-fed_align_uniform"]
    lines = counterparts(recipes)
    assert [line.name for line in lines] == [
        "base-align_uniform-centralised",
        "base-align_uniform-alone",
        "base-simclr-centralised",
        "base-simclr-alone",
    ]
    whole, alone = lines[0], lines[1]
    assert whole.partition.kind == "centralised"
    assert whole.train.keep_optimizer
    assert whole.composed.terms == ()
    assert whole.label == "FedAlignUniform, centralised"
    assert alone.composed.merge.name == "local_only"
    with pytest.raises(UserError, match="unknown method"):
        by_method(tiny(), ["sdd"])


def test_a_table_is_mean_and_std_over_seeds_and_a_comparison_resumes(tmp_path):
    recipe = tiny("name=tiny", "method.name=fed_simclr")
    runs = compare([recipe], 2, tmp_path)
    accuracies = [100 * run.read_json("evaluation.json")["knn/accuracy"] for run in runs]
    untrained = [100 * run.metrics()[0]["evaluation"]["knn/accuracy"] for run in runs]
    shown = text(comparison_table(runs))
    for values in (accuracies, untrained):
        assert f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" in shown
    stamps = [run.encoder_path.stat().st_mtime_ns for run in runs]
    again = compare([recipe], 3, tmp_path)
    assert [run.encoder_path.stat().st_mtime_ns for run in again[:2]] == stamps
    assert len(again) == 3


def test_a_comparison_that_cannot_be_made_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="at least 1 seed a recipe, not 0"):
        compare([tiny()], 0, tmp_path)
    with pytest.raises(UserError, match="two recipes are called 'digits'"):
        compare([tiny(), tiny("train.lr=0.3")], 1, tmp_path)
    assert list(tmp_path.iterdir()) == []
