"""Which nodes become sites: their names, keys and images, and nodes that are turned away."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from flwr.app import Error, Message

from atoll.core.errors import UserError
from atoll.engines.flower.codec import records
from atoll.engines.flower.site_registry import Site, SiteRegistry
from tests.engines.flower.deployment import SITES
from tests.engines.flower.grid import FakeGrid, node
from tests.engines.flower.site_runs import play, public_key, site, sites


def test_a_site_enrols_with_the_number_of_images_that_it_measures_on(place):
    """With a validation split, that is the split's."""
    settings = ("data.validation_fraction=0.1", "train.rounds=1")
    run = play(sites(place), place, *settings)
    assert [site["test"] for site in run.read_json("sites.json")["sites"]] == [4] * 4
    assert run.read_json("evaluation.json")["sites_mean"]["knn/test_images"] == 4 * 4


def test_a_second_node_with_a_taken_name_is_turned_away(place):
    grid = sites(place)
    grid.nodes[20] = site(20, "west", place)
    run = play(grid, place)
    (turned,) = run.read_json("sites.json")["turned_away"]
    assert (turned["name"], turned["node"]) == ("west", "20")
    assert "already takes part" in turned["reason"] or "complete" in turned["reason"]


def test_a_name_stays_with_its_key(place):
    grid = sites(place)
    grid.keys = {10 + k: bytes([k]) for k in range(4)}
    play(grid, place, "train.rounds=1")
    grid = FakeGrid({node + 10: handler for node, handler in sites(place).nodes.items()})
    grid.keys = {20: b"\0", 21: b"\1", 22: b"\2", 23: b"thief"}
    run = play(grid, place, "train.rounds=2", resume=True, wait=1.0)
    assert run.metrics[-1]["lost"] == {"3": "its site is not connected"}
    assert 4 * run.metrics[2]["bytes_down"] == 3 * run.metrics[1]["bytes_down"]
    assert json.loads((run.folder / "sites.json").read_text())["turned_away"][-1]["reason"].endswith(
        "another key"
    )


@pytest.mark.parametrize(
    ("copied", "sentence"),
    [
        (
            "train/0/more.png",
            r"'west' took part with 40 training and 20 held-out images .*, and has 41 training",
        ),
        ("train/new/more.png", r"of the classes 0, 1.*, and has 41 .* 9, new; restore its images"),
    ],
)
def test_a_site_that_returns_with_other_images_is_refused(place, copied, sentence):
    play(sites(place), place, "train.rounds=1")
    folder = place / "images" / "west"
    (folder / copied).parent.mkdir(exist_ok=True)
    shutil.copy(next(folder.glob("train/*/*.png")), folder / copied)
    run = play(sites(place), place, "train.rounds=2", "train.min_accepted=0.5", resume=True, wait=1.0)
    assert run.metrics[-1]["clients"] == 3
    turned = run.read_json("sites.json")["turned_away"]
    assert re.search(sentence, turned[-1]["reason"])


def test_too_few_sites_get_a_sentence(place):
    grid = sites(place)
    del grid.nodes[12]
    with pytest.raises(UserError, match=r"3 of 4 sites connected within 1 s \(east, north, west\)"):
        play(grid, place, wait=1.0)


def test_an_unnamed_node_and_one_without_images_say_what_is_missing(place):
    grid = FakeGrid(
        {
            1: node(1, {}),
            2: node(2, {"site": "a"}),
            3: site(3, "../etc", place),
            4: site(4, "b", place, dta="x"),
        }
    )
    with pytest.raises(UserError) as caught:
        play(grid, place, wait=1.0)
    for words in ("lacks a name", "has no images", "cannot be a site's name", "unknown 'dta'"):
        assert words in str(caught.value)


def test_a_node_that_cannot_answer_is_named_once_and_asked_again(place, monkeypatch):
    monkeypatch.setattr("atoll.engines.flower.site_registry.SECONDS_UNTIL_ASKED_AGAIN", (0.5, 0.5))
    died = []

    def die_twice(message):
        if message.metadata.message_type == "query.hello" and len(died) < 2:
            died.append(1)
            return Message(Error(0, "its process died"), reply_to=message)
        return west(message)

    grid = sites(place)
    west, grid.nodes[13] = grid.nodes[13], die_twice
    run = play(grid, place)
    assert len(died) == 2
    assert run.metrics[-1]["clients"] == 4
    (turned,) = run.read_json("sites.json")["turned_away"]
    assert turned["reason"] == "its node failed: its process died"


def test_a_site_that_mends_its_folder_takes_part(place, monkeypatch, caplog):
    monkeypatch.setattr("atoll.engines.flower.site_registry.SECONDS_UNTIL_ASKED_AGAIN", (0.2, 0.2))
    grid = sites(place)
    (place / "images" / "west").rename(place / "unmounted")
    west, asked = grid.nodes[13], []

    def mend_at_the_third(message):
        asked.append(message.metadata.message_type)
        if len(asked) == 3:
            (place / "unmounted").rename(place / "images" / "west")
        return west(message)

    grid.nodes[13] = mend_at_the_third
    run = play(grid, place, "train.rounds=1")
    assert asked.count("query.hello") == 3
    assert run.metrics[-1]["clients"] == 4
    said = [record for record in caplog.records if "cannot take part" in record.getMessage()]
    assert len(said) == 1
    assert "node 13, with the name 'west', cannot take part: the site's images" in said[0].getMessage()
    assert "no file or folder" in caplog.text  # in the site's own log
    assert "data.path and data.source are data=… and source=… in --node-config" in caplog.text


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in sleep."""
    made = SimpleNamespace(now=0.0)
    made.monotonic = lambda: made.now
    made.sleep = lambda seconds: setattr(made, "now", made.now + seconds)
    monkeypatch.setattr("atoll.engines.flower.site_registry.time", made)
    monkeypatch.setattr("atoll.engines.flower.exchange.time", made)
    return made


def saying(name, heard, clock, silent=0, train=9):
    """A node that says its name and nothing else, after it has been silent so many times."""

    def handle(message):
        heard.append(clock.now)
        answer = {"name": name, "train": train, "test": 0, "classes": [], "version": "1", "environment": {}}
        return Message(records(answer), reply_to=message) if len(heard) > silent else None

    return handle


def test_a_node_that_is_turned_away_is_asked_again_less_and_less_often(clock, caplog):
    heard = []
    registry = SiteRegistry(FakeGrid({7: saying("../x", heard, clock)}), "", 1)
    with pytest.raises(UserError, match="0 of 1 sites"):
        registry.gather(1, 400.0)
    gaps = [later - sooner for sooner, later in pairwise(heard)]
    assert gaps == pytest.approx([5, 10, 20, 40, 60, 60, 60, 60, 60], abs=0.7)
    assert len(registry.turned_away) == 1
    assert caplog.text.count("its answer contains no valid name") == 1


def test_a_hello_that_is_lost_is_sent_again_and_a_late_node_is_heard_after_weeks(clock):
    early, late = [], []
    grid = FakeGrid({7: saying("east", early, clock, silent=1)})
    registry = SiteRegistry(grid, "", 2)
    registry.clients = [Site(name, "", 9, 0, []) for name in ("east", "west")]
    registry.gather(2, 400.0)
    assert early == pytest.approx([0.0, 305.0], abs=2.0)
    assert registry.connected() == {0: 7}
    clock.now = 20 * 24 * 3600.0
    grid.nodes[8] = saying("west", late, clock)
    registry.refresh()
    assert registry.connected() == {0: 7, 1: 8}


@pytest.mark.parametrize("bound", [True, False], ids=["sites.toml", "took part"])
def test_a_silent_node_is_named_by_its_key_and_is_to_be_restarted(clock, tmp_path, caplog, bound):
    (line, pem), path = public_key(), tmp_path / "sites.toml"
    path.write_text(f'[keys]\nwest = "{line}"\n')
    registry = SiteRegistry(FakeGrid({7: lambda _: None}, {7: pem}), "", 1, path if bound else None)
    if not bound:
        registry.clients = [Site("west", pem.hex(), 9, 0, [])]
    with contextlib.suppress(UserError):
        registry.gather(1, 400.0)
    sentence = (
        "node 7, with the name 'west', cannot take part: no answer within 300 s; if its log .* restart the"
    )
    assert re.search(sentence, caplog.text)


def test_a_second_node_with_a_name_takes_over_once_the_first_is_gone(clock):
    first, second = [], []
    grid = FakeGrid({7: saying("west", first, clock)})
    registry = SiteRegistry(grid, "", 1)
    registry.gather(1, 10.0)
    grid.nodes[8] = saying("west", second, clock)
    for _ in range(3):
        registry.refresh()
        assert registry.connected() == {0: 7}
        clock.sleep(20.0)
    del grid.nodes[7]
    registry.refresh()
    assert registry.connected() == {0: 8}
    assert len(registry.turned_away) == 1


def test_a_node_that_restarts_is_examined_again(clock):
    """A node with a registered key comes back under its number."""
    heard = []
    grid = FakeGrid({7: saying("west", heard, clock)})
    registry = SiteRegistry(grid, "", 1)
    registry.gather(1, 10.0)
    for train, connected in ((9, {0: 7}), (8, {}), (9, {0: 7})):
        del grid.nodes[7]
        registry.refresh()
        assert registry.connected() == {}
        grid.nodes[7] = saying("west", heard, clock, train=train)
        registry.refresh()
        assert registry.connected() == connected
    assert len(heard) == 4
    assert [one["reason"] for one in registry.turned_away] == [
        "'west' took part with 9 training and 0 held-out images, and has 8 training and 0 held-out images; "
        "restore its images, or start a new run"
    ]


def test_a_node_that_restarts_between_two_looks_is_examined_before_it_is_asked(clock):
    heard, silent = [], []
    grid = FakeGrid({7: saying("west", heard, clock)})
    registry = SiteRegistry(grid, "", 1)
    registry.gather(1, 10.0)
    grid.nodes[7], grid.activated[7] = saying("west", silent, clock, silent=1), "again"
    began = clock.now
    registry.refresh()
    assert clock.now - began == pytest.approx(60, abs=1)  # a node that does not answer is waited for so long
    assert registry.connected() == {}
    grid.nodes[7], grid.activated[7] = saying("west", heard, clock, train=8), "and again"
    registry.refresh()
    assert registry.connected() == {}
    assert "and has 8 training" in registry.turned_away[-1]["reason"]
    grid.nodes[7], grid.activated[7] = saying("west", heard, clock), "at last"
    registry.refresh()
    assert registry.connected() == {0: 7}
    assert len(heard) == 3


def test_a_node_that_leaves_before_it_has_answered_is_asked_once_it_is_back(clock):
    heard = []
    grid = FakeGrid({7: saying("west", heard, clock, silent=1)})
    registry = SiteRegistry(grid, "", 1)
    registry.clients = [Site("west", "", 9, 0, [])]
    registry.refresh()
    del grid.nodes[7]
    for clock.now in (1.0, 400.0, 401.0):  # its request is given up meanwhile
        registry.refresh()
    grid.nodes[7] = saying("west", heard, clock)
    registry.refresh()
    assert registry.connected() == {0: 7}


def test_a_node_that_restarts_while_others_are_waited_for_says_its_name_anew(clock, caplog):
    grid = FakeGrid({7: saying("west", [], clock)})

    def mended_later(message):
        if not grid.activated:
            grid.nodes[7], grid.activated[7] = saying("west", [], clock, train=8), "again"
            return Message(records({"lost": "its disk is not mounted"}), reply_to=message)
        return saying("east", [], clock)(message)

    grid.nodes[8] = mended_later
    registry = SiteRegistry(grid, "", 2)
    registry.gather(2, 400.0)
    assert [(site.name, site.train) for site in registry.clients] == [("east", 9), ("west", 8)]
    assert "another node already takes part as 'west'" not in caplog.text


def test_sites_of_a_run_that_never_began_are_not_held_against_the_next(place):
    (place / "run").mkdir()
    grid = sites(place)
    stale = {
        "federation": "0" * 32,
        "sites": [{"name": "gone", "key": "", "train": 9, "test": 0, "classes": []}],
    }
    (place / "run" / "sites.json").write_text(json.dumps({**stale, "turned_away": []}))
    run = play(grid, place, "train.rounds=1")
    assert [site["name"] for site in run.read_json("sites.json")["sites"]] == list(SITES)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": 7}, "its answer contains no valid name"),
        ({"name": "../west"}, "its answer contains no valid name"),
        ({"name": "w" * 101}, "its answer contains no valid name"),
        ({"train": -40}, "it reports -40 training and 20 held-out images"),
        ({"train": 10**12}, "it reports 1000000000000 training and 20 held-out images"),
        ({"train": True}, "it reports True training and 20 held-out images"),
        ({"test": None}, "it reports 40 training and None held-out images"),
        ({"classes": {"0": 1}}, "its classes are not a list of names"),
        ({"classes": ["\ud800"]}, "its classes are not a list of names"),
        ({"lost": "a\nb" + "x" * 5000}, "a b" + "x" * 997 + " …"),
    ],
)
def test_a_site_that_says_nonsense_of_itself_is_turned_away(changes, sentence):
    answer = {"name": "west", "train": 40, "test": 20, "classes": ["0"], **changes}
    grid = FakeGrid({7: lambda message: Message(records(answer), reply_to=message)})
    with pytest.raises(UserError, match="0 of 1 sites connected") as error:
        SiteRegistry(grid, "", 1).gather(1, 0.1)
    named = "west: " if answer["name"] == "west" else ""
    assert f"refused: {named}{sentence}); start" in str(error.value)
