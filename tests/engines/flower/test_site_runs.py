"""A run of sites: how it starts, starts again, resets a site and goes on."""

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
from atoll.engines.flower.site_options import SiteOptions
from atoll.engines.server import TooFewUpdatesError
from tests.engines.flower.deployment import SITES
from tests.engines.flower.grid import FakeGrid
from tests.engines.flower.sites import FOLDERS, play, site, sites
from tests.engines.flower.test_engine import FEDCA
from tests.harness import tiny


def test_a_site_that_lost_its_state_is_reset_only_if_it_says_so(place, caplog):
    settings = ("train.bn_buffers=local", "train.min_accepted=0.25")
    play(sites(place), place, *settings, "train.rounds=1")
    (states,) = (place / "state").glob("*/west/states")
    federation = states.parts[-3]
    states.rename(place / "lost")

    forbidden = play(sites(place), place, *settings, "train.rounds=2", resume=True)
    reason = forbidden.metrics[-1]["lost"]["3"]
    assert "the client state of 'west' after round 1 is lost" in reason
    assert f'reset="{federation}"' in reason
    assert str(place) not in reason
    assert f"cannot read {states}" in caplog.text  # in the site's own log

    grid = sites(place)
    grid.nodes[13] = site(13, "west", place, reset=federation)
    allowed = play(grid, place, *settings, "train.rounds=4", resume=True)
    lines = {line["round"]: line for line in allowed.metrics}
    assert lines[3]["lost"]["3"].endswith("the client is reset and starts again when it is next selected")
    assert lines[4]["clients"] == 4
    asked = [tree(content) for at, kind, content in grid.sent if kind == "train" and at == 13]
    assert [request["message"]["kept"] for request in asked] == [1, 0]  # as one that never took part
    assert "west" in allowed.read_json("evaluation.json")["sites"]


def test_a_reset_of_another_run_resets_nothing(place):
    settings = ("train.bn_buffers=local", "train.min_accepted=0.25")
    play(sites(place), place, *settings, "train.rounds=1")
    (states,) = (place / "state").glob("*/west/states")
    states.rename(place / "lost")
    grid = sites(place)
    grid.nodes[13] = site(13, "west", place, reset="0" * 32)
    run = play(grid, place, *settings, "train.rounds=3", resume=True)
    assert [set(line.get("lost", {})) for line in run.metrics[2:]] == [{"3"}, {"3"}]


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


def test_the_old_word_for_a_reset_still_works():
    options = SiteOptions.read({"site": "east", "data": "images", "afresh": "59b8"})
    assert options.reset == "59b8"
