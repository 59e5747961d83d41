"""How a run of sites starts, or is refused before anybody is waited for, and starts again."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.flower.codec import tree
from atoll.engines.flower.engine import FlowerEngine
from atoll.engines.server import TooFewUpdatesError
from tests.engines.flower.deployment import SITES
from tests.engines.flower.grid import FakeGrid
from tests.engines.flower.site_runs import FOLDERS, play, site, sites
from tests.engines.flower.test_engine import FEDCA
from tests.harness import tiny


def test_a_wrong_folder_of_the_coordinator_is_said_before_anybody_is_waited_for(place):
    with pytest.raises(UserError, match="nowhere-at-all"):
        play(FakeGrid({}), place, images=str(place / "nowhere-at-all"), wait=60.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["method.name=fed_align_uniform", "method.aggregation=secure_sum"],
            "set train.bn_buffers = 'local'",
        ),
        (["method.name=fed_align_uniform", "method.aggregation=multi_krum"], "needs at least 5 updates in a"),
        (["method.name=fed_sl", "data.labels=false"], "is supervised and these images have no labels"),
    ],
)
def test_a_recipe_that_cannot_run_is_said_before_anybody_is_waited_for(place, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        play(FakeGrid({}), place, *settings, wait=2.0)
    assert not (place / "run" / "recipe.toml").exists()


def test_a_run_that_was_killed_in_its_prerequisite_goes_on(place, monkeypatch):
    settings = ("method.name=fedca", "evaluation.at_end=['geometry']", *FEDCA)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("atoll.commands.run._run_prerequisite", killed)
        with pytest.raises(KeyboardInterrupt):
            play(sites(place), place, *settings, "train.rounds=1")
    began = json.loads((place / "run" / "sites.json").read_text())["federation"]
    run = play(sites(place), place, *settings, "train.rounds=1", resume=True)
    assert run.read_json("sites.json")["federation"] == began
    assert run.metrics[-1]["clients"] == 4


def test_a_second_start_leaves_the_run_of_the_first_alone(place):
    """`flwr run` starts another process while the first one waits for its sites, too."""
    recipe = tiny("data.path=nowhere", *FOLDERS, "train.rounds=1")
    options = FlowerOptions(sites=4, wait=3.0, deadline=10.0)
    second = FlowerEngine(sites(place), options, recipe.to_toml())
    registry = second._registry
    gather = registry.gather

    def overtaken(*arguments):
        gather(*arguments)
        play(sites(place), place, "train.rounds=1")

    registry.gather = overtaken
    with pytest.raises(UserError, match=r"another process began the run in .* while this one waited"):
        run_recipe(recipe, place / "run", False, None, second)
    assert play(sites(place), place, "train.rounds=2", resume=True).metrics[-1]["round"] == 2


def test_a_folder_that_another_process_uses_is_refused_before_anybody_is_asked(place):
    grid = sites(place)
    with Run(place / "run").locked(), pytest.raises(UserError, match="another process is using"):
        play(grid, place)
    assert not grid.sent
    assert not (place / "run" / "audit.jsonl").exists()


def test_a_run_without_a_complete_round_may_go_on_with_other_sites(place):
    silent = sites(
        place, **dict.fromkeys(SITES, lambda reply: None if "update" in tree(reply.content) else reply)
    )
    with pytest.raises(TooFewUpdatesError, match="round 1 failed"):
        play(silent, place, deadline=1.0)
    began = Run(place / "run").read_json("sites.json")
    folder = place / "images" / "west"
    shutil.copy(next(folder.glob("train/*/*.png")), folder / "train/0/more.png")
    three = sites(place)
    del three.nodes[10]
    three.nodes[20] = site(20, "abroad", place, data=str(place / "images" / "east"))
    del three.nodes[11]
    run = play(three, place, "train.epochs=2", resume=True, sites=3)
    now = run.read_json("sites.json")
    assert [one["name"] for one in now["sites"]] == ["abroad", "south", "west"]
    assert now["federation"] == began["federation"]
    assert [line["clients"] for line in run.metrics[1:]] == [3, 3]
