"""What sites measure on their own images, and what the coordinator makes of it."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.commands.evaluate import evaluate_run, measure_run
from atoll.core.errors import UserError
from atoll.data.options import DataOptions
from atoll.engines.flower.codec import tree
from atoll.report.comparison import comparison_cells
from tests.engines.flower.deployment import SITES
from tests.engines.flower.site_runs import play, sites


def test_each_site_measures_on_its_own_images_and_sends_numbers_only(place):
    heard = []

    def listen(reply):
        heard.append(tree(reply.content))
        return reply

    run = play(sites(place, **dict.fromkeys(SITES, listen)), place)
    results = run.read_json("evaluation.json")
    assert set(results["sites"]) == set(SITES)
    assert results["knn/accuracy"] == results["sites_mean"]["knn/accuracy"]  # there are no others
    assert results["knn/test_images"] == 4 * 20
    assert type(results["knn/k"]) is int
    accuracies = [numbers["knn/accuracy"] for numbers in results["sites"].values()]
    assert results["sites_mean"]["knn/accuracy"] == pytest.approx(sum(accuracies) / 4)
    measured = [answer for answer in heard if "results" in answer]
    assert measured
    for answer in measured:
        assert all(type(value) in (int, float) for value in answer["results"].values())


def test_a_site_that_is_missing_at_the_end_is_told_beside_the_baseline(place):
    measured = []

    def silent_at_the_end(reply):
        measured.extend(["results"] if "results" in tree(reply.content) else [])
        return None if len(measured) > 1 else reply

    run = play(sites(place, north=silent_at_the_end), place, "train.rounds=1", deadline=2.0)
    assert run.read_json("evaluation.json")["sites"].keys() == {"east", "south", "west"}
    note = "different sites measured before and after the training (only before: north)"
    assert note in comparison_cells([run])[2]


def test_every_model_of_a_run_without_images_here_is_measured_on_others(place):
    run = play(sites(place), place, "method.name=featarc")
    clients = run.read_json("evaluation.json")["clients_by_model"]
    assert clients.keys() == {"cluster-0", "cluster-1"}
    assert sum(clients.values()) == 4
    with pytest.raises(UserError, match="nowhere"):
        evaluate_run(run, "knn")
    data = DataOptions(source="digits", limit=80, image_size=8, channels=1)
    found = measure_run(run, ["knn"], data)
    assert found["by_model"].keys() == clients.keys()


def test_the_coordinators_own_images_are_measured_too(place):
    run = play(sites(place), place, images=str(place / "images" / "west"))
    assert 0 <= run.read_json("evaluation.json")["knn/accuracy"] <= 1
