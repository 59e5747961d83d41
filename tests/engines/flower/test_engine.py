"""The same recipe gives the same weights, and the round survives what nodes do."""

from __future__ import annotations

import json
import shutil
import weakref
from itertools import count
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.process_state import settings_kept
from atoll.core.run_folder import Run
from atoll.core.tree import load, num_bytes
from atoll.engines.flower import codec as codec
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.flower.engine import FlowerEngine
from atoll.engines.server import TooFewUpdatesError
from tests.engines.flower.grid import FakeGrid, node, shares
from tests.harness import final_models, run_tiny, tiny
from tests.trees import same


def play(grid: FakeGrid, folder: Path, *settings: str, resume: bool = False, **options) -> Run:
    recipe = tiny(*settings)
    options = {"wait": 5.0, "deadline": 30.0, **options}
    engine = FlowerEngine(grid, FlowerOptions(**options), recipe.to_toml())
    return run_recipe(recipe, folder, resume, None, engine)


FEDCA = (
    "options.fedca_alignment.data.source=digits",
    "options.fedca_alignment.size=50",
    "options.fedca_alignment.train_epochs=1",
)


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("fed_align_uniform", "l_dawa", "featarc", "peer_to_peer", "per_ssfl")
]


@pytest.mark.parametrize("method", ["ssd", "fedca", "fedema", *SLOW])
def test_the_weights_are_those_of_our_engine(tmp_path, monkeypatch, method):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    settings = (f"method.name={method}", *(FEDCA if method == "fedca" else ()))
    ours = run_tiny(tmp_path / "ours", *settings)
    theirs = play(shares(4), tmp_path / "theirs", *settings)
    assert same(final_models(ours), final_models(theirs))


def test_sites_train_under_the_settings_of_a_run(tmp_path, monkeypatch):
    """A user's module may have set others when the site imported it."""
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))

    def meddling(handler):
        def answer(message):
            with settings_kept():
                torch.set_grad_enabled(False)
                torch.set_default_dtype(torch.float64)
                return handler(message)

        return answer

    settings = ("method.name=fed_simclr", "evaluation.at_end=['probe']")
    ours = run_tiny(tmp_path / "ours", *settings)
    grid = shares(4)
    grid.nodes = {name: meddling(handler) for name, handler in grid.nodes.items()}
    theirs = play(grid, tmp_path / "theirs", *settings)
    assert same(final_models(ours), final_models(theirs))


def test_results_of_an_untrained_model_are_said_to_be_that(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    with pytest.warns(
        UserWarning, match="at the clients; the encoder and results here are the untrained model's"
    ):
        theirs = play(shares(4), tmp_path / "theirs", "method.name=local_only")
    untrained = run_tiny(tmp_path / "untrained", "method.name=local_only", "train.rounds=0")
    assert theirs.encoder_path.read_bytes() == untrained.encoder_path.read_bytes()


def test_answers_are_folded_in_client_order_whatever_the_order_of_arrival(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    grid = shares(4)
    grid.late_first = True
    late = play(grid, tmp_path / "late", "method.name=ssd")
    assert same(final_models(late), final_models(run_tiny(tmp_path / "ours", "method.name=ssd")))
    assert not list((late.folder / "checkpoints").glob("early/*"))


def test_a_resumed_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    settings = ("method.name=fed_align_uniform", "train.bn_buffers=local")  # so that clients keep something
    whole = play(shares(4), tmp_path / "whole", *settings, "train.rounds=3")
    play(shares(4), tmp_path / "cut", *settings, "train.rounds=2")
    # Other nodes, with other ids: only their names are the same.
    grid = FakeGrid({node + 7: handler for node, handler in shares(4).nodes.items()})
    cut = play(grid, tmp_path / "cut", *settings, "train.rounds=3", resume=True)
    assert same(final_models(whole), final_models(cut))
    assert [line["round"] for line in cut.metrics] == [0, 1, 2, 3]


def test_the_shared_model_is_evaluated_once_where_the_personal_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    run = play(shares(4), tmp_path / "run", "train.bn_buffers=local", "train.rounds=1")
    assert run.results["model"] == "global"
    assert "by_model" not in run.results
    assert [path.name for path in run.folder.glob("encoder*")] == ["encoder.safetensors"]


def test_constants_and_recipe_go_to_each_client_once(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    grid = shares(4)
    run = play(grid, tmp_path / "run", "train.rounds=3")
    kinds = [kind for _, kind, _ in grid.sent]
    assert kinds.count("query.hello") == 4
    assert kinds.count("train") == 3 * 4
    agreed = [content for _, _, content in grid.sent if "agreed" in codec.tree(content)]
    assert len(agreed) == 4
    assert json.loads((run.folder / "sites.json").read_text())["turned_away"] == []


def test_a_site_whose_disk_was_lost_is_told_again(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    grid = shares(4)
    trained = []
    first = grid.nodes[100]

    def forgetful(message):
        if message.metadata.message_type == "train":
            trained.append(message)
            if len(trained) == 2:
                shutil.rmtree(tmp_path / "state")
        return first(message)

    grid.nodes[100] = forgetful
    run = play(grid, tmp_path / "run", "train.rounds=3")
    assert [line["clients"] for line in run.metrics[1:]] == [4, 4, 4]
    assert same(final_models(run), final_models(run_tiny(tmp_path / "ours", "train.rounds=3")))


@pytest.mark.parametrize("method", ["fed_align_uniform", "ssd", "featarc", "fedca"])
def test_the_models_of_a_round_are_one_object_for_all_clients(tmp_path, monkeypatch, method):
    """Whatever each client gets beside them: its number, its own rows of a dictionary."""
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    grid = shares(4)
    play(grid, tmp_path / "run", f"method.name={method}", *(FEDCA if method == "fedca" else ()))
    trained = [content for _, kind, content in grid.sent if kind == "train"]
    assert len(trained) == 8
    for round in (trained[:4], trained[4:]):
        records = [content.array_records[codec.RECORD] for content in round]
        common = set.intersection(*({id(array) for array in record.values()} for record in records))
        shared = sum(len(array.data) for array in records[0].values() if id(array) in common)
        models = codec.tree(round[0])["message"]["models"]
        assert shared >= num_bytes(models)


def test_a_share_must_be_a_number(tmp_path):
    grid = shares(4)
    grid.nodes[103] = node(103, {"partition-id": 3}, renamed)
    with pytest.raises(UserError, match=r"3 of 4 sites connected .* its answer contains no valid name"):
        play(grid, tmp_path / "run", wait=1.0)


def renamed(reply):
    reply.content = codec.records({**codec.tree(reply.content), "name": "three"})
    return reply


def answering(spoil):
    """Four shares; ``spoil`` gets client, round and answer, and says what is answered."""
    grid = shares(4)

    def spoiler(client):
        rounds = count(1)

        def change(reply):
            return spoil(client, next(rounds), reply) if "update" in codec.tree(reply.content) else reply

        return change

    for k in range(4):
        grid.nodes[100 + k] = node(100 + k, {"partition-id": k}, spoiler(k))
    return grid


def dropping(rounds):
    """Four shares, some of which do not answer at their so-manieth turns."""
    return answering(lambda client, turn, reply: None if client in rounds.get(turn, ()) else reply)


def test_a_reply_counts_once_and_in_its_own_round(tmp_path, monkeypatch):
    """Client 1's answer of round 2 comes in round 3, and everything that it says comes twice."""
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    settings = ("train.rounds=3", "train.bn_buffers=local")
    kept = []

    def late_and_double(client, turn, reply):
        if client != 1:
            return reply
        kept.append(reply)
        return [] if turn == 2 else [*kept, *kept]

    theirs = play(answering(late_and_double), tmp_path / "theirs", *settings, deadline=1.0)
    assert [line["clients"] for line in theirs.metrics[1:]] == [4, 3, 4]
    assert theirs.metrics[2]["lost"] == {"1": "no answer within 1 s"}
    silent = play(dropping({2: [1]}), tmp_path / "silent", *settings, deadline=1.0)
    assert same(final_models(theirs), final_models(silent))


def test_one_more_update_is_in_memory_while_early_ones_wait_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    held, most = [], []

    def watched(read):
        def reading(source, *limit):
            most.append(sum(one() is not None for one in held))  # beside the one that comes
            answer = read(source, *limit)
            if "update" in answer:
                held.append(weakref.ref(answer["update"]["weights"]["encoder.conv1.weight"]))
            return answer

        return reading

    monkeypatch.setattr("atoll.engines.flower.exchange.tree", watched(codec.tree))
    monkeypatch.setattr("atoll.engines.flower.executor.load", watched(load))
    grid = shares(4)
    grid.late_first = True
    play(grid, tmp_path / "run")
    assert len(held) == 2 * (4 + 3)  # each as it came, and three of a round once more, from disk
    assert max(most) == 1


def test_a_round_with_too_few_answers_leaves_the_model_and_is_played_again(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    settings = ("train.min_accepted=0.75", "train.bn_buffers=local")
    whole = play(dropping({1: [0]}), tmp_path / "whole", *settings, deadline=1.0)  # three are enough
    with pytest.raises(TooFewUpdatesError, match=r"round 2 failed: 2 of 4 updates .* requires 75%"):
        play(dropping({1: [0], 2: [0, 3]}), tmp_path / "cut", *settings, deadline=1.0)
    assert Run(tmp_path / "cut").latest()["round"] == 1
    cut = play(shares(4), tmp_path / "cut", *settings, resume=True)
    assert [line["clients"] for line in cut.metrics[1:]] == [3, 4]
    assert same(final_models(whole), final_models(cut))


SECRET = (
    "method.name=fed_align_uniform",
    "method.aggregation=private_fedavg",
    "options.private_fedavg.secret=7",
    "train.bn_buffers=leave",
    "train.participation=0.8",
    "train.min_accepted=0.25",
)


def test_a_private_run_is_that_of_our_engine(tmp_path, monkeypatch):
    """Noise and cohorts are the server's: a secret makes them the same here and there."""
    pytest.importorskip("dp_accounting", reason="the extra atoll[dp] is not installed")
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    ours, theirs = run_tiny(tmp_path / "ours", *SECRET), play(shares(4), tmp_path / "theirs", *SECRET)
    assert same(final_models(ours), final_models(theirs))
    spent = [line["privacy"] for line in theirs.metrics[1:]]
    assert spent == [line["privacy"] for line in ours.metrics[1:]]
    assert spent[0]["epsilon"] < spent[1]["epsilon"]
    assert {line["clients"] for line in theirs.metrics[1:]} != {4}  # a sample, not all
