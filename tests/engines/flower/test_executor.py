"""Answers that the coordinator refuses, or that do not come: the round goes on without them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from atoll.core.tree import map_tensors
from atoll.engines.flower.codec import RECORD, REST, records, tree
from atoll.engines.flower.executor import FlowerExecutor, RemoteStates, measure_sites
from atoll.engines.flower.site_registry import Site
from atoll.engines.jobs import Result
from tests.engines.flower.site_runs import play, sites
from tests.harness import final_models
from tests.versions import since


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
        ({"results": {"knn/accuracy": 1e6}}, "it reports 1e+06 as knn/accuracy, which cannot be"),
        ({"results": {"knn/accuracy": -0.1}}, "it reports -0.1 as knn/accuracy"),
        ({"results": {"knn/last_accuracy": 1.5}}, "it reports 1.5 as knn/last_accuracy"),
        ({"results": {"knn/test_images": 0}}, "it reports 0 as knn/test_images"),
        ({"results": {"geometry/of_test_images": 10**29}}, "it reports 1e+29 as geometry/of_test_images"),
        ({"results": {"knn/train_images": -5}}, "it reports -5 as knn/train_images"),
        ({"results": {"knn/labels": 0.5}}, "it reports 0.5 as knn/labels"),
        ({"results": {"geometry/uniformity": 1e30}}, "it reports 1e+30 as geometry/uniformity"),
        ({"results": {"geometry/alignment": -1}}, "it reports -1 as geometry/alignment"),
        ({"results": {"geometry/effective_rank": 21}}, "it reports 21 as geometry/effective_rank"),
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


def test_what_the_users_code_measures_may_have_any_value_but_no_accuracy_may(caplog):
    found = {
        "mine:m/alignment": 7.5,
        "mine:m/hard_images": 0.25,
        "mine:m/test_images": 3,
        "mine:m/accuracy": 1,
    }
    clients = [Site(name, "", 40, 20, []) for name in ("east", "north")]
    answers = [(0, {"results": found, "images": 20}), (1, {"results": {"mine:m/accuracy": 2}, "images": 20})]
    executor = SimpleNamespace(ask=lambda kind, requests: answers, site=clients.__getitem__)
    assert measure_sites(executor, {}, ["mine:m"]) == {0: (found, 20)}
    assert "north is left out of the evaluation: it reports 2 as mine:m/accuracy" in caplog.text


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


@since(safetensors, 0, 8, reason="cannot write these")
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
