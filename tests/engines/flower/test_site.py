"""What a site does when something of its own is missing, and what it tells the coordinator."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.core.errors import UserError
from atoll.engines.flower import agreed
from atoll.engines.flower.codec import tree
from atoll.engines.flower.site import SiteSide
from atoll.engines.flower.site_options import SiteOptions
from atoll.recipe.recipe import load_recipe
from tests.engines.flower.site_runs import play, site, sites


def test_a_folder_that_vanishes_is_named(place, caplog):
    grid = sites(place)
    trained = []
    handle = grid.nodes[13]

    def vanish(message):
        if message.metadata.message_type == "train":
            trained.append(1)
            if len(trained) == 2:
                from atoll.engines.flower import agreed as module

                module._open.cache_clear()  # as if this were a process of its own
                (place / "images" / "west").rename(place / "gone")
        return handle(message)

    grid.nodes[13] = vanish
    run = play(grid, place, "train.rounds=2", "evaluation.at_end=['geometry']")
    assert run.metrics[-1]["lost"]["3"].startswith(
        "the site's images do not fit the recipe, or some cannot be"
    )
    assert "there is no file or folder" in caplog.text  # in the site's own log
    assert "west" not in run.read_json("evaluation.json")["sites"]


@pytest.mark.parametrize("source", ["images", "folder"])
def test_names_of_files_folders_and_classes_do_not_leave_a_site_in_an_error(place, source, caplog):
    told = []
    grid = sites(place)
    grid.nodes[13] = site(
        13, "west", place, lambda reply: told.append(tree(reply.content)) or reply, source=source
    )
    (place / "images" / "west" / "train" / "0" / "MEIER_Anna_1954.png").write_bytes(b"torn")
    with pytest.raises(UserError, match="3 of 4 sites connected"):
        play(grid, place, wait=1.0)
    assert "MEIER_Anna_1954.png" in caplog.text  # in the site's own log
    (answer,) = {str(one) for one in told}
    assert "MEIER" not in answer
    assert str(place) not in answer
    assert "own log says which" in answer
    assert told[0]["name"] == "west"


def test_a_policy_that_is_not_there_is_named_at_the_site_alone(place, caplog):
    grid = sites(place)
    grid.nodes[13] = site(13, "west", place, policy=str(place / "drsmith" / "policy.toml"))
    with pytest.raises(UserError, match=r"3 of 4 sites connected.*the site's policy cannot be read") as error:
        play(grid, place, wait=1.0)
    assert "drsmith" not in str(error.value)
    assert f"cannot read {place}/drsmith/policy.toml" in caplog.text


@pytest.mark.parametrize("what", ["state", "audit log"])
def test_a_file_that_cannot_be_written_is_named_at_the_site_alone(place, what, caplog):
    grid, told = sites(place), []
    west = site(13, "west", place, lambda reply: told.append(str(tree(reply.content))) or reply)

    def block(message):
        if message.metadata.message_type == "train" and what == "state":
            run = place / "state" / tree(message.content)["federation"] / "west"
            run.mkdir(parents=True, exist_ok=True)
            (run / "states").write_text("no folder")
        elif message.metadata.message_type == "train":
            (place / "state" / "audit-west.jsonl").unlink()
            (place / "state" / "audit-west.jsonl").mkdir()
        return west(message)

    grid.nodes[13] = block
    run = play(grid, place, "train.bn_buffers=local", "train.rounds=1", "train.min_accepted=0.25")
    reason = run.metrics[-1]["lost"]["3"]
    assert reason.startswith("the site cannot read or write one of its files; its own log says which and why")
    assert not any(str(place) in answer for answer in told)
    assert str(place / "state") in caplog.text


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"digest": "../x"}, "has no valid 'digest'"),
        ({"digest": None}, "has no valid 'digest'"),
        ({"federation": "../x"}, "has no valid 'federation'"),
        ({"agreed": {"recipe": "another"}}, "has an 'agreed' that does not fit its 'digest'"),
    ],
)
def test_a_request_that_a_site_cannot_use_names_the_field_and_what_to_do(tmp_path, changes, words):
    side = SiteSide(SiteOptions.read({"site": "east", "data": "images", "state": str(tmp_path)}))
    with pytest.raises(UserError) as error:
        side.train({"federation": "0" * 32, "digest": "0" * 32, **changes})
    assert f"the coordinator's request {words}; install the coordinator's version" in str(error.value)


def test_the_old_word_for_a_reset_still_works():
    options = SiteOptions.read({"site": "east", "data": "images", "afresh": "59b8"})
    assert options.reset == "59b8"


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named_with_the_place_where_the_site_sets_it(device):
    options = SiteOptions.read({"site": "east", "data": "images", "device": device})
    with pytest.raises(UserError, match=r"^device in the --node-config "):
        options.recipe(load_recipe("digits-ssd"))


def test_other_images_of_the_same_number_and_classes_are_refused_and_nothing_of_them_leaves(place, caplog):
    play(sites(place), place, "train.rounds=1")
    mine, theirs = (sorted((place / "images" / name).rglob("*.png")) for name in ("west", "east"))
    kept = [path.read_bytes() for path in mine]
    for path, other in zip(mine, theirs, strict=True):
        path.write_bytes(other.read_bytes())
    agreed._open.cache_clear()  # as if this were a process of its own
    run = play(sites(place), place, "train.rounds=2", "train.min_accepted=0.5", resume=True)
    assert run.metrics[-1]["lost"]["3"].startswith("the site's images have changed since it began this run")
    for path, content in zip(mine, kept, strict=True):
        path.write_bytes(content)
    agreed._open.cache_clear()
    run = play(sites(place), place, "train.rounds=3", "train.min_accepted=0.5", resume=True)
    assert "lost" not in run.metrics[-1]
