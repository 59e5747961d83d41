"""The two audit logs of a federation, and sites that leave."""

from __future__ import annotations

import json
import stat
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import torch

from atoll.commands.check import check_run
from atoll.commands.federate import verify_log
from atoll.core.audit_log import AuditLog
from atoll.core.errors import RunError, UserError
from atoll.core.tree import num_bytes
from atoll.engines.flower.codec import records, tree
from atoll.engines.flower.exchange import SMALL_ANSWER
from atoll.engines.flower.ledger import RoundLedger, received, record_answer, updates_sent
from atoll.engines.flower.site_registry import Site, SiteRegistry
from atoll.engines.server import TooFewUpdatesError
from tests.engines.flower.deployment import SITES
from tests.engines.flower.grid import FakeGrid
from tests.engines.flower.site_runs import keyed, play, site, sites  # noqa: F401
from tests.engines.flower.test_policy import place  # noqa: F401
from tests.engines.flower.test_site_registry import clock, saying  # noqa: F401

SETTINGS = ("train.rounds=3", "train.min_accepted=0.25", "evaluation.at_end=['geometry']")


def lines(path, event=""):
    found = [entry.fields for entry in AuditLog(path).entries()]
    return [line for line in found if event in ("", line["event"])]


def test_both_sides_write_what_left_the_site(place):  # noqa: F811
    heard = []

    def listen(reply):
        heard.append(tree(reply.content))
        return reply

    run = play(sites(place, north=listen), place, *SETTINGS)
    here, there = run.folder / "audit.jsonl", place / "state" / "audit-north.jsonl"
    updates = [answer["update"] for answer in heard if "update" in answer]
    sent = lines(there, "update")
    assert [line["round"] for line in sent] == [1, 2, 3]
    assert [line["bytes"] for line in sent] == [num_bytes(update) for update in updates]
    federation = run.read_json("sites.json")["federation"]
    assert {line["run"] for line in sent} == {federation}
    assert [line["round"] for line in lines(there, "evaluate")] == [0, 3]
    asked = [line for line in lines(here, "asked") if line["site"] == "north"]
    assert [line["round"] for line in asked if line["for"] == "evaluate"] == [0, 3]
    got = [line for line in lines(here, "received") if line["site"] == "north" and line["for"] == "train"]
    for mine, theirs in zip(got, sent, strict=True):
        assert (mine["bytes"], mine["tensors"]) == (theirs["bytes"], theirs["tensors"])
    heads = {entry.hash for entry in AuditLog(there).entries()}
    assert {line["site_log"] for line in got} < heads
    assert [line["accepted"] for line in lines(here, "round")] == [list(SITES)] * 3
    assert {line["site"] for line in lines(here, "joined")} == set(SITES)
    assert check_run(run).damaged == []
    for path in (here, there):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_a_site_keeps_is_readable_by_its_owner_alone(place):  # noqa: F811
    play(sites(place), place, *SETTINGS, "train.bn_buffers=local")
    kept = [path for path in (place / "state").rglob("*") if path.is_file()]
    assert any("states" in path.parts for path in kept)
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def test_a_refused_and_a_lost_update_are_written_with_the_reason(place):  # noqa: F811
    def huge(reply):
        answer = tree(reply.content)
        if "update" in answer:
            answer["update"]["samples"] = 10**6
            reply.content = __import__("atoll.engines.flower.codec", fromlist=["records"]).records(answer)
        return reply

    def silent(reply):
        return None if "update" in tree(reply.content) else reply

    run = play(sites(place, north=huge, south=silent), place, *SETTINGS, "train.rounds=1", deadline=1.5)
    (line,) = lines(run.folder / "audit.jsonl", "round")
    assert line["accepted"] == ["east", "west"]
    assert "'samples'" in line["refused"]["north"]
    assert line["lost"] == {"south": "no answer within 1.5 s"}
    lost = [one for one in lines(run.folder / "audit.jsonl", "lost") if one["for"] == "train"]
    assert [one["site"] for one in lost] == ["south"]


UPDATE = {"weights": {"w": torch.zeros(3)}, "samples": 4}  # of 20 bytes


@pytest.mark.parametrize(
    ("request_", "reply", "line"),
    [
        (
            {"message": {"round": 0}},
            {"update": UPDATE, "recipe": "r"},
            {
                "event": "update", "round": 0, "recipe": "r", "outcome": "sent", "bytes": 20,
                "tensors": {"weights.w": 12, "samples": 8}, "epsilon": 2.0,
            },
        ),
        (
            {"round": 2},
            {"results": {"knn": 0.5}},
            {
                "event": "kind", "round": 2, "outcome": "sent", "bytes": 8, "tensors": {"results.knn": 8},
                "epsilon": 2.0,
            },
        ),
        ({"message": {}}, {"lost": "no"}, {"event": "kind", "outcome": "refused", "why": "no"}),
        (
            {"reason": "revoked", "message": "a text"},
            {"farewell": True},
            {
                "event": "kind", "why": "revoked", "outcome": "sent", "bytes": 8, "tensors": {"farewell": 8},
                "epsilon": 2.0,
            },
        ),
    ],
    ids=["update", "evaluate", "lost", "farewell"],
)  # fmt: skip
def test_a_sites_line_says_what_left_or_why_nothing_did(tmp_path, request_, reply, line):
    log = AuditLog(tmp_path / "audit.jsonl")
    head = record_answer(log, "kind", {**request_, "federation": "f"}, reply, {"epsilon": 2.0})
    (entry,) = log.entries()
    assert entry.hash == head
    entry.fields.pop("at")
    assert entry.fields == {"run": "f", **line}


def test_only_the_updates_of_the_recipe_that_left_are_counted(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    assert record_answer(log, "train", {}, {"unprepared": True}) is None
    assert not log.path.exists()
    for recipe in ("mine", "other", "mine"):
        record_answer(log, "train", {}, {"update": UPDATE, "recipe": recipe})
    record_answer(log, "train", {}, {"lost": "no", "recipe": "mine"})
    record_answer(log, "evaluate", {}, {"results": {}, "recipe": "mine"})
    log.append("update", recipe="mine", outcome="refused")
    log.append("evaluate", recipe="mine", outcome="sent")
    assert updates_sent(log, "mine") == 2
    assert updates_sent(None, "mine") == 0


@pytest.mark.parametrize(
    ("line", "kept"), [("a" * 64, True), ("a" * 63, False), ("A" * 64, False), (7, False)]
)
def test_the_coordinator_keeps_a_sites_hash_and_the_size_of_its_answer(line, kept):
    expected = {"site_log": line} if kept else {}
    size = {"bytes": 20, "tensors": {"weights.w": 12, "samples": 8}}
    assert received({"update": UPDATE, "recipe": "r", "log": line}) == {**size, **expected}
    assert received({**UPDATE, "log": line}) == {**size, **expected}
    assert received(UPDATE) == size


def test_names_beyond_the_limit_are_one_entry_with_the_remaining_bytes():
    limit = 2**20
    fits, more = received({"a" * limit: 1}), received({"a" * limit: 1, "b": [1, 2]})
    assert fits["tensors"] == {"a" * limit: 8}
    assert more["tensors"] == {"a" * limit: 8, "…": 16}


def test_places_that_join_to_one_name_hide_no_bytes():
    body = {"a.b": torch.zeros(3), "a": {"b": torch.zeros(5)}, "c": 1}
    assert received(body)["tensors"] == {"a.b": 32, "c": 8}


def test_a_rounds_line_names_the_sites(tmp_path):
    """Of the updates that were ever accepted, only those of this round are its own."""
    log = AuditLog(tmp_path / "audit.jsonl")
    ledger = RoundLedger(log.append, ["east", "north", "south", "west"])
    ledger.begin(None, SimpleNamespace(round=4, valid={3: 5, 0: 5, 1: 4}))
    ledger.round(SimpleNamespace(round=5, refused={1: "too large"}, lost={2: "no answer"}), {})
    with pytest.raises(RunError), ledger.failures():
        raise RunError("too few")
    found = lines(log.path)
    for line in found:
        line.pop("at")
    assert found == [
        {"event": "begun", "after_round": 4},
        {
            "event": "round", "round": 5, "accepted": ["east", "west"], "refused": {"north": "too large"},
            "lost": {"south": "no answer"},
        },
        {"event": "failed", "why": "too few"},
    ]  # fmt: skip


def test_a_small_answer_makes_no_long_line():
    """Each of 10,000 numbers would repeat the 40,000 letters of the name that leads to it."""
    answer = tree(records({"name": "east", "long" * 10_000: [0] * 10_000}), SMALL_ANSWER)
    line = received(answer)
    assert sum(map(len, line["tensors"])) < 2**20
    assert sum(line["tensors"].values()) == line["bytes"] == 4 + 8 * 10_000
    assert received({"name": "east", "classes": ["0", "1"]})["tensors"] == {
        "name": 4, "classes.0": 1, "classes.1": 1,
    }  # fmt: skip


def test_a_run_that_fails_is_written(place):  # noqa: F811
    silent = dict.fromkeys(SITES, lambda reply: None if "update" in tree(reply.content) else reply)
    with pytest.raises(TooFewUpdatesError):
        play(sites(place, **silent), place, *SETTINGS, deadline=1.5)
    (line,) = lines(place / "run" / "audit.jsonl", "failed")
    assert line["why"].startswith("round 1 failed: 0 of 4 updates")


def test_the_command_verifies_a_log_and_what_others_have_kept_of_it(place):  # noqa: F811
    run = play(sites(place), place, *SETTINGS)
    there = place / "state" / "audit-north.jsonl"
    kept = [
        line["site_log"] for line in lines(run.folder / "audit.jsonl", "received") if line["site"] == "north"
    ]
    assert "lines from 20" in verify_log(run.folder)
    assert f"last hash {kept[-1]}" in verify_log(there, kept)
    short = there.read_bytes().splitlines(keepends=True)[:-1]
    there.write_bytes(b"".join(short))
    verify_log(there)
    with pytest.raises(UserError, match=f"does not contain the line with the hash {kept[-1]}"):
        verify_log(there, kept)
    with pytest.raises(UserError, match="has 64 hexadecimal digits; copy all of it"):
        verify_log(there, [kept[0][:40]])  # no reason to say that lines were cut off
    with pytest.raises(UserError, match="is no audit log"):
        verify_log(place / "nothing")


# Sites that leave, and sites that come back.


def test_a_site_that_withdraws_in_mid_run_is_asked_no_more_also_after_a_restart(place):  # noqa: F811
    path = place / "policy.toml"
    path.write_text("")
    grid = sites(place)
    west, asked = site(13, "west", place, policy=str(path)), []

    def withdraw_after_one_round(message):
        asked.append(message.metadata.message_type)
        reply = west(message)
        if message.metadata.message_type == "train":
            path.write_text("withdrawn = true")
        return reply

    grid.nodes[13] = withdraw_after_one_round
    run = play(grid, place, *SETTINGS)
    assert asked == ["query.hello", "evaluate", "train", "train"]
    assert [line["clients"] for line in run.metrics[1:]] == [4, 3, 3]
    assert [line.get("lost") for line in run.metrics[2:]] == [
        {"3": "the site has withdrawn"},
        {"3": "'west' has withdrawn"},
    ]
    assert [line["site"] for line in lines(run.folder / "audit.jsonl", "withdrawn")] == ["west"]
    path.write_text("")
    again = play(grid, place, *SETTINGS, "train.rounds=4", resume=True)
    assert again.metrics[-1]["lost"] == {"3": "'west' has withdrawn"}
    assert "train" not in asked[4:]


def test_a_site_that_withdraws_between_two_starts_is_not_waited_for(place, keyed):  # noqa: F811
    path = place / "policy.toml"
    path.write_text("")

    def grid(withdrawing="west"):
        made = sites(place)
        made.keys = keyed[0].keys
        made.nodes[13] = site(13, withdrawing, place, policy=str(path))
        return made

    play(grid(), place, *SETTINGS, "train.rounds=1")
    path.write_text("withdrawn = true")
    run = play(grid("east"), place, *SETTINGS, "train.rounds=2", resume=True, wait=1.0)
    assert [one["withdrawn"] for one in run.read_json("sites.json")["sites"]] == [False] * 4  # another's key
    began = time.monotonic()
    run = play(grid(), place, *SETTINGS, "train.rounds=3", resume=True, wait=40.0)
    assert time.monotonic() - began < 30
    assert run.metrics[-1]["lost"] == {"3": "'west' has withdrawn"}
    path.write_text("")
    again = play(grid(), place, *SETTINGS, "train.rounds=4", resume=True)
    assert again.metrics[-1]["lost"] == {"3": "'west' has withdrawn"}
    assert [line["site"] for line in lines(run.folder / "audit.jsonl", "withdrawn")] == ["west"]


def test_another_version_is_refused_at_enrolment_with_one_sentence(place, monkeypatch):  # noqa: F811
    monkeypatch.setattr("atoll.engines.flower.site.VERSION", "9.9")
    with pytest.raises(
        UserError, match=r"the coordinator runs Atoll [\w.]+, and this site 9\.9; install the same"
    ):
        play(FakeGrid({13: site(13, "west", place)}), place, *SETTINGS, sites=1, wait=1.0)


def test_another_commit_is_said(place, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr("atoll.engines.flower.site.version", lambda: "0.1.0+g1234567")
    play(sites(place), place, *SETTINGS, "train.rounds=1")
    assert "west runs Atoll 0.1.0+g1234567, and the coordinator " in caplog.text


def test_a_site_in_another_environment_is_refused_when_a_run_is_resumed(place, monkeypatch):  # noqa: F811
    play(sites(place), place, *SETTINGS, "train.rounds=1")
    real = __import__("atoll.engines.flower.site", fromlist=["environment"]).environment
    monkeypatch.setattr("atoll.engines.flower.site.environment", lambda *a: {**real(*a), "cpu": "OTHER"})
    with pytest.raises(TooFewUpdatesError):
        play(sites(place), place, *SETTINGS, "train.rounds=2", resume=True, wait=1.0)
    turned = json.loads((place / "run" / "audit.jsonl").read_text().splitlines()[-1])
    reasons = [line["reason"] for line in lines(place / "run" / "audit.jsonl", "refused")]
    assert reasons
    assert all("took part with cpu = " in reason and "here it is OTHER" in reason for reason in reasons)
    assert turned["event"] == "failed"
    run = play(
        sites(place), place, *SETTINGS, "train.rounds=2", resume=True, wait=1.0, other_environment=True
    )
    assert run.metrics[-1]["clients"] == 4


def test_missing_sites_are_named_every_30_seconds(clock, caplog):  # noqa: F811
    caplog.set_level("INFO")
    registry = SiteRegistry(FakeGrid({7: saying("east", [], clock)}), "", 3)
    registry.clients = [Site(name, "", 9, 0, []) for name in ("east", "north", "west")]
    registry.gather(3, 100.0)
    said = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert said == ["waiting for north, west"] * 3
    assert "continuing without north, west" in caplog.text


def test_the_first_start_says_how_many_are_missing(clock, caplog):  # noqa: F811
    caplog.set_level("INFO")
    registry = SiteRegistry(FakeGrid({7: saying("east", [], clock)}), "", 2)
    with pytest.raises(UserError):
        registry.gather(2, 65.0)
    assert caplog.text.count("waiting for 1 of 2 sites") == 2
