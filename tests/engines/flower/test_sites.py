"""Sites with folders of their own, on the fake grid."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from atoll.commands.evaluate import evaluate_run, measure_run
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.tree import map_tensors, same
from atoll.data.options import DataOptions
from atoll.engines.flower.codec import RECORD, REST, records, tree
from atoll.engines.flower.engine import FlowerEngine, FlowerOptions
from atoll.engines.flower.executor import FlowerExecutor, RemoteStates, measure_sites
from atoll.engines.flower.site import SiteSide
from atoll.engines.flower.site_options import SiteOptions
from atoll.engines.flower.site_registry import Site, SiteRegistry
from atoll.engines.jobs import Result
from tests.engines.flower.deployment import SITES, one_folder, write_digits
from tests.engines.flower.grid import FakeGrid, node
from tests.engines.flower.test_engine import FEDCA
from tests.harness import final_models, run_tiny, tiny

FOLDERS = ("data.source=clients", "data.channels=1", "partition.kind=natural", "evaluation.during=['knn']")


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_digits(tmp_path / "images")
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    return tmp_path


def site(number, name, place, spoil=None, **config):
    given = {"site": name, "data": str(place / "images" / name), "source": "folder", **config}
    return node(number, given, spoil)


def sites(place, **spoil):
    return FakeGrid({10 + k: site(10 + k, name, place, spoil.get(name)) for k, name in enumerate(SITES)})


def play(grid, place, *settings, resume=False, out="run", **options):
    recipe = tiny("data.path=nowhere", *FOLDERS, *settings)
    options = {"sites": 4, "wait": 3.0, "deadline": 10.0, **options}
    return run_recipe(
        recipe, place / out, resume, None, FlowerEngine(grid, FlowerOptions(**options), recipe.to_toml())
    )


@pytest.mark.parametrize("method", ["ssd", "fed_sl"])
def test_the_weights_are_those_of_our_engine_over_the_same_folders(place, method):
    folder = one_folder(place / "together", place / "images")
    settings = (f"method.name={method}", "evaluation.every=1")
    ours = run_tiny(place / "ours", f"data.path={folder}", "data.limit=1000000", *FOLDERS, *settings)
    theirs = play(sites(place), place, *settings)
    assert same(final_models(ours), final_models(theirs))
    sizes = [client["size"] for client in theirs.read_json("partition.json")["clients"]]
    assert sizes == [40, 40, 40, 40]


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


def test_a_site_enrols_with_the_number_of_images_that_it_measures_on(place):
    """With a validation split, that is the split's."""
    settings = ("data.validation_fraction=0.1", "train.rounds=1")
    run = play(sites(place), place, *settings)
    assert [site["test"] for site in run.read_json("sites.json")["sites"]] == [4] * 4
    assert run.read_json("evaluation.json")["sites_mean"]["knn/test_images"] == 4 * 4


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


def spoiled(change):
    """The updates of round 2 changed."""
    seen = []

    def spoil(reply):
        answer = tree(reply.content)
        if "update" in answer:
            seen.append(1)
            if len(seen) == 2:
                answer["update"]["weights"] = change(answer["update"]["weights"])
                reply.content = records(answer)
        return reply

    return spoil


FAULTS = {
    "nan": (
        lambda w: map_tensors(lambda t: t * float("nan") if t.is_floating_point() else t, w),
        "not finite",
    ),
    "shape": (lambda w: {**w, "encoder.conv1.weight": torch.zeros(1)}, "shape"),
    "huge": (
        lambda w: map_tensors(lambda t: t * 1000 if t.is_floating_point() else t, w),
        "beyond the bound",
    ),
    "missing": (lambda w: {}, "lacks"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_update_is_refused_and_named_and_the_run_ends(place, fault):
    change, words = FAULTS[fault]
    run = play(sites(place, north=spoiled(change)), place, "train.rounds=3", "evaluation.at_end=['geometry']")
    lines = {line["round"]: line for line in run.metrics}
    assert words in lines[2]["refused"]["1"]
    assert [lines[k]["clients"] for k in (1, 2, 3)] == [4, 3, 4]
    weights = final_models(run)["global"]
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_no_answer_is_a_loss_and_the_site_goes_on_with_its_last_valid_state(place):
    trained = []

    def silent_once(reply):
        if "update" in tree(reply.content):
            trained.append(1)
            if len(trained) == 2:
                return None
        return reply

    settings = ("train.rounds=3", "train.bn_buffers=local")
    grid = sites(place, north=silent_once)
    run = play(grid, place, *settings, deadline=2.0)
    lines = {line["round"]: line for line in run.metrics}
    assert lines[2]["lost"] == {"1": "no answer within 2 s"}
    assert lines[3]["clients"] == 4
    asked = [tree(content) for at, kind, content in grid.sent if kind == "train" and at == 11]
    assert [request["message"]["kept"] for request in asked] == [0, 1, 1]  # not the state of the lost round


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


def test_a_folder_that_vanishes_is_named(place):
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
    assert "there is no file or folder" in run.metrics[-1]["lost"]["3"]
    assert "west" not in run.read_json("evaluation.json")["sites"]


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


def test_a_site_that_lost_its_state_is_reset_only_if_it_says_so(place):
    settings = ("train.bn_buffers=local", "train.min_accepted=0.25")
    play(sites(place), place, *settings, "train.rounds=1")
    (states,) = (place / "state").glob("*/west/states")
    federation = states.parts[-3]
    states.rename(place / "lost")

    forbidden = play(sites(place), place, *settings, "train.rounds=2", resume=True)
    reason = forbidden.metrics[-1]["lost"]["3"]
    assert "the client state of 'west' after round 1 is lost" in reason
    assert f'reset="{federation}"' in reason

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
    said = [record for record in caplog.records if "node 13 cannot take part" in record.getMessage()]
    assert len(said) == 1
    assert "there is no file or folder" in said[0].getMessage()


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in sleep."""
    made = SimpleNamespace(now=0.0)
    made.monotonic = lambda: made.now
    made.sleep = lambda seconds: setattr(made, "now", made.now + seconds)
    monkeypatch.setattr("atoll.engines.flower.site_registry.time", made)
    monkeypatch.setattr("atoll.engines.flower.exchange.time", made)
    return made


def saying(name, heard, clock, silent=0):
    """A node that says its name and nothing else, after it has been silent so many times."""

    def handle(message):
        heard.append(clock.now)
        answer = {"name": name, "train": 9, "test": 0, "classes": [], "version": "1", "environment": {}}
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


def test_a_wrong_folder_of_the_coordinator_is_said_before_anybody_is_waited_for(place):
    with pytest.raises(UserError, match="nowhere-at-all"):
        play(FakeGrid({}), place, images=str(place / "nowhere-at-all"), wait=60.0)


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


def answering(key, **changes):
    """A node whose answers that hold ``key`` are other ones."""

    def spoil(reply):
        answer = tree(reply.content)
        if key in answer:
            reply.content = records({**answer, **changes})
        return reply

    return spoil


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"images": None}, "it reports results on None images"),
        ({"images": 0}, "it reports results on 0 images"),
        ({"images": 20_000_000}, "it reports results on 20000000 images, and it enrolled with 20"),
        ({"images": torch.tensor([20, 20])}, "it reports results on tensor([20, 20]) images"),
        ({"images": 20.0}, "it reports results on 20.0 images"),
        ({"results": [1.0]}, "its answer is invalid"),
        ({"results": None, "lost": ["a"]}, "its answer is invalid"),
        ({"results": None, "lost": "two\nlines " + "x" * 5000}, f"two lines {'x' * 990} …"),
    ],
)
def test_a_site_whose_numbers_cannot_be_used_is_left_out_and_named(caplog, changes, sentence):
    good = {"results": {"knn/accuracy": 0.5}, "images": 20}
    clients = [Site(name, "", 40, 20, []) for name in ("east", "north")]
    executor = SimpleNamespace(
        ask=lambda kind, requests: [(0, good), (1, {**good, **changes})], site=clients.__getitem__
    )
    assert measure_sites(executor, {}, ["knn"]) == {0: ({"knn/accuracy": 0.5}, 20)}
    assert f"north is left out of the evaluation: {sentence}" in caplog.text


def test_a_run_goes_on_without_what_sites_answer_amiss(place):
    numbers = {"knn/accuracy": 0.5, "knn/k": 10**400, "knn/x": float("nan"), "round": 999, "knn/y": True}
    numbers |= {"probe/accuracy": 1.0, "seconds/round": 5, "knn/a\x1b[2J": 1.0, "knn/" + "a" * 1000: 1.0}
    grid = sites(
        place,
        east=answering("results", images=None),
        north=answering("update", update=None),
        south=answering("update", update={"weights": {}}),
        west=answering("results", results=numbers),
    )
    run = play(grid, place, "train.rounds=1", "train.min_accepted=0.25")
    assert run.metrics[-1]["refused"] == {
        "1": "it is not an update",
        "2": "it lacks its components' slices",
    }
    results = run.read_json("evaluation.json")
    assert set(results["sites"]) == {"north", "south", "west"}
    assert results["sites"]["west"] == {"knn/accuracy": 0.5}  # finite, and of a requested protocol
    assert results["round"] == 1
    json.dumps(results, allow_nan=False)


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
    assert f"refused: {sentence}); start" in str(error.value)


def test_an_update_that_is_larger_than_the_method_declares_is_lost(place):
    huge = {"weights": {"w": torch.zeros(10**6)}, "losses": {}, "parts": {}, "samples": 40}
    grid = sites(place, north=answering("update", update=huge))
    run = play(grid, place, "train.rounds=1")
    (lost,) = run.metrics[-1]["lost"].values()
    assert lost.startswith("its answer cannot be read: it has 4,00")
    assert "bytes, and answers in this run have at most" in lost
    assert run.metrics[-1]["clients"] == 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_numbers_that_no_file_can_store_lose_one_answer(place, dtype):
    """safetensors reads these types, and the coordinator's buffer of early answers cannot write them."""
    data = safetensors.torch.save(
        {"0": torch.zeros(4).to(dtype)}, metadata={"atoll": '{"update":{"weights":{"w":{"§":"0"}}}}'}
    )

    def spoil(reply):
        if "update" in tree(reply.content):
            array = Array("uint8", (len(data),), "x", data)
            reply.content = RecordDict({RECORD: ArrayRecord({REST: array})})
        return reply

    grid = sites(place, west=spoil)
    grid.late_first = True
    run = play(grid, place, "train.rounds=1")
    assert run.metrics[-1]["lost"] == {"3": f"its answer contains {dtype}, which is not supported"}
    assert run.metrics[-1]["clients"] == 3


def test_an_answer_that_cannot_wait_on_disk_is_lost(tmp_path):
    executor = FlowerExecutor(SimpleNamespace(), RemoteStates(), tmp_path, 1.0, [])
    waiting = executor._buffer(3, {"update": {"w": torch.zeros(4, dtype=torch.float8_e5m2fnuz)}})
    assert isinstance(waiting, Result)
    assert waiting.lost.startswith("its answer cannot be stored: ")


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
    side = SiteSide(SiteOptions.read({"site": "east", "data": "images", "state": str(tmp_path)}), None)
    with pytest.raises(UserError) as error:
        side.train({"federation": "0" * 32, "digest": "0" * 32, **changes})
    assert f"the coordinator's request {words}; install the coordinator's version" in str(error.value)


def test_the_old_word_for_a_reset_still_works():
    options = SiteOptions.read({"site": "east", "data": "images", "afresh": "59b8"})
    assert options.reset == "59b8"
