"""Sites with folders of their own, on the fake grid."""

from __future__ import annotations

import json
import shutil
import unicodedata
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from atoll.commands.evaluate import evaluate_run, measure_run
from atoll.commands.export import provenance
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.core.tree import map_tensors, same
from atoll.data.options import DataOptions
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.flower.codec import RECORD, REST, records, tree
from atoll.engines.flower.engine import FlowerEngine
from atoll.engines.flower.executor import FlowerExecutor, RemoteStates, measure_sites
from atoll.engines.flower.site import SiteSide
from atoll.engines.flower.site_options import SiteOptions
from atoll.engines.flower.site_registry import Site
from atoll.engines.jobs import Result
from atoll.engines.server import TooFewUpdatesError
from atoll.report.comparison import comparison_cells
from atoll.report.page import write_report
from tests.engines.flower.deployment import SITES, one_folder
from tests.engines.flower.grid import FakeGrid, node
from tests.engines.flower.test_engine import FEDCA
from tests.harness import final_models, run_tiny, tiny
from tests.report.pages import Page

FOLDERS = ("data.source=clients", "data.channels=1", "partition.kind=natural", "evaluation.during=['knn']")


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


def test_a_class_that_only_held_out_images_have_is_a_class_of_the_run(place):
    for name in ("x.png", "y.png"):
        rare = place / "images" / "north" / "test" / "rare" / name
        rare.parent.mkdir(exist_ok=True)
        shutil.copy(next((place / "images" / "north" / "test").glob("[0-9]*/*.png")), rare)
    run = play(sites(place), place)
    assert run.metrics[-1]["clients"] == 4
    assert run.read_json("partition.json")["classes"][-1] == "rare"
    assert run.read_json("evaluation.json")["sites"]["north"]["knn/test_images"] == 22


def test_a_class_that_two_sites_write_in_two_forms_of_unicode_is_told(place, caplog):
    for name, form in (("north", "NFC"), ("south", "NFD")):
        for split in ("train", "test"):
            folder = place / "images" / name / split
            (folder / "0").rename(folder / unicodedata.normalize(form, "Hände"))
    play(sites(place), place, "train.rounds=0")
    (told,) = [
        record.getMessage() for record in caplog.records if "two forms of Unicode" in record.getMessage()
    ]
    assert told.startswith(r"the classes 'Ha\u0308nde' and 'H\xe4nde' count as two")


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


def test_the_recipes_images_and_partition_are_not_said_to_be_the_sites(place):
    simulated = ("data.source=digits", "data.path=", "partition.kind=dirichlet", "title=")
    run = play(sites(place), place, *simulated, "train.rounds=1")
    (note, _) = comparison_cells([run])[2]
    assert note.startswith("4 sites, their own images; sites' own split; ")
    about = provenance(run)
    assert (about["setting"], about["clients"]) == ("4 sites, their own images", 4)
    page = Page(write_report([run.folder], place / "report.html"))
    _, (_, clients, partition, *_, distance) = page.tables["Partition of the training images"]
    assert (clients, partition, distance) == ("4", "sites' own images", "unknown")
    told = page.text.split("Recipe of")[0]
    assert "digits" not in told
    assert "dirichlet" not in told


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


def test_the_site_decides_what_it_trains_on(place):
    expected = play(sites(place), place, "train.rounds=1")
    there = play(
        sites(place), place, "train.rounds=1", "data.train_split=test", "data.test_split=train", out="swapped"
    )
    assert same(final_models(expected), final_models(there))


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
    side = SiteSide(SiteOptions.read({"site": "east", "data": "images", "state": str(tmp_path)}))
    with pytest.raises(UserError) as error:
        side.train({"federation": "0" * 32, "digest": "0" * 32, **changes})
    assert f"the coordinator's request {words}; install the coordinator's version" in str(error.value)


def test_the_old_word_for_a_reset_still_works():
    options = SiteOptions.read({"site": "east", "data": "images", "afresh": "59b8"})
    assert options.reset == "59b8"
