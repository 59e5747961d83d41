"""Secure aggregation on the fake grid: the same weights as a simulation, from sums alone."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import torch

from atoll.aggregation.secure_sum import MODULUS, SecureSum
from atoll.core.audit_log import AuditLog
from atoll.core.errors import RunError, UserError
from atoll.core.run_folder import Run
from atoll.core.tree import leaves
from atoll.engines.flower.codec import records, tree
from atoll.engines.flower.masks import to_numbers
from atoll.engines.server import TooFewUpdatesError
from tests.engines.flower.deployment import SITES, one_folder, write_digits
from tests.engines.flower.grid import FakeGrid
from tests.engines.flower.site_runs import FOLDERS, play, sites
from tests.harness import final_models, run_tiny
from tests.trees import same

SECURE = (
    "method.name=fed_align_uniform",
    "method.aggregation=secure_sum",
    "train.bn_buffers=leave",
    "train.min_accepted=0.25",
    "evaluation.at_end=['geometry']",
    "evaluation.during=['geometry']",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_digits(tmp_path / "images", each=20, held=5)
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def terms(monkeypatch):
    """All terms that sites computed, before the masks."""
    found = []
    original = SecureSum.encode

    def watched(self, *arguments):
        found.append(original(self, *arguments))
        return found[-1]

    monkeypatch.setattr(SecureSum, "encode", watched)
    return found


@pytest.fixture
def totals(monkeypatch):
    """All sums that the coordinator decoded."""
    found = []
    original = SecureSum.decode

    def watched(self, total, *arguments):
        found.append(total)
        return original(self, total, *arguments)

    monkeypatch.setattr(SecureSum, "decode", watched)
    return found


def ours(place, *settings):
    folder = one_folder(place / "together", place / "images")
    return run_tiny(place / "ours", f"data.path={folder}", "data.limit=1000000", *FOLDERS, *SECURE, *settings)


@pytest.mark.parametrize(
    "options",
    [
        (),
        (
            "options.secure_sum.weights=uniform",
            "options.secure_sum.divergence=layers",
            "method.server=fedadam",
        ),
        ("options.secure_sum.weights=loss", "options.secure_sum.divergence=model", "method.name=ssd"),
    ],
    ids=["fedavg", "l_dawa", "loss"],
)
def test_the_weights_are_those_of_a_simulation_and_the_sum_is_that_of_the_terms(
    place, terms, totals, options
):
    theirs = play(sites(place), place, *SECURE, *options)
    assert [line["clients"] for line in theirs.metrics[1:]] == [4, 4]
    for round in (0, 1):
        expected = sum(terms[4 * round : 4 * round + 4]) % MODULUS
        assert torch.equal(totals[2 * round], expected)  # decoded twice: for the loss, and for the models
    alone = ours(place, *options)
    assert same(final_models(theirs), final_models(alone))
    for mine, one in zip(theirs.metrics[1:], alone.metrics[1:], strict=True):
        assert mine["loss"] == pytest.approx(one["loss"], abs=1e-3)


def test_nothing_but_masked_numbers_leaves_a_site(place, terms):
    heard = []

    def listen(reply):
        heard.append(tree(reply.content))
        return reply

    play(sites(place, **dict.fromkeys(SITES, listen)), place, *SECURE, "train.rounds=1")
    trained = [answer for answer in heard if "update" in answer]
    assert len(trained) == 4
    for answer, term in zip(trained, terms, strict=True):
        assert answer["update"].keys() == {"masked"}
        masked = to_numbers(answer["update"]["masked"])
        assert not torch.equal(masked, term)
        assert int((masked == term).sum()) < 3
    others = [answer for answer in heard if "update" not in answer]
    assert [list(leaves(answer)) for answer in others] == [[]] * len(others)
    log = AuditLog(place / "state" / "audit-west.jsonl")
    (line,) = [entry.fields for entry in log.entries() if entry.fields["event"] == "update"]
    assert line["tensors"].keys() == {"masked"}


def falling_silent(kind, times=1):
    """A node that does not answer the second round's requests of a kind."""

    def wrap(handle):
        asked = Counter()

        def node(message):
            asked[message.metadata.message_type] += 1
            late = asked[message.metadata.message_type] > times
            return None if message.metadata.message_type == kind and late else handle(message)

        return node

    return wrap


@pytest.mark.parametrize("kind", ["query.secure_keys", "query.secure_shares", "train", "query.secure_reveal"])
def test_a_site_may_fall_silent_at_any_stage(place, terms, totals, kind):
    grid = sites(place)
    grid.nodes[13] = falling_silent(kind)(grid.nodes[13])
    run = play(grid, place, *SECURE, deadline=1.5)
    stays = kind == "query.secure_reveal"
    assert [line["clients"] for line in run.metrics[1:]] == [4, 4 if stays else 3]
    assert run.metrics[-1].get("lost") == (None if stays else {"3": "no answer within 1.5 s"})
    assert torch.equal(totals[2], sum(terms[4 : 8 if stays else 7]) % MODULUS)
    first, second = (line["bytes_down"] for line in run.metrics[1:])
    received = 4 if kind in ("train", "query.secure_reveal") else 3  # the others were not sent the model
    assert second / first == pytest.approx(received / 4, rel=1e-3)


def test_too_few_sites_learn_the_coordinator_nothing(place, totals):
    grid = sites(place)
    for number in (12, 13):
        grid.nodes[number] = falling_silent("train", 0)(grid.nodes[number])
    with pytest.raises(TooFewUpdatesError, match="0 of 4 updates were usable"):
        play(grid, place, *SECURE, deadline=1.5)
    assert totals == []
    assert "query.secure_reveal" not in [kind for _, kind, _ in grid.sent]


def test_the_threshold_is_named_where_more_sites_stay_than_the_recipe_accepts(place):
    grid = sites(place)
    for number in (12, 13):
        grid.nodes[number] = falling_silent("train", 0)(grid.nodes[number])
    with pytest.raises(
        TooFewUpdatesError,
        match=r"usable and options\.secure_sum\.threshold requires 3; clients 2, 3: no answer",
    ):
        play(grid, place, *SECURE, "train.min_accepted=0.5", deadline=1.5)


def test_a_single_site_is_refused_before_it_is_asked(place):
    grid = FakeGrid({10: sites(place).nodes[10]})
    with pytest.raises(UserError, match="'secure_sum' needs at least 2 updates in a round, and there are 1"):
        play(grid, place, *SECURE, sites=1)
    assert not grid.sent


def test_a_sum_of_fewer_sites_than_the_recipe_accepts_is_not_opened(place, totals):
    """Three of four are enough to open the masks, and the round would be discarded."""
    grid = sites(place)
    grid.nodes[13] = falling_silent("train", 0)(grid.nodes[13])
    with pytest.raises(TooFewUpdatesError, match="requires 100%"):
        play(grid, place, *SECURE, "train.min_accepted=1.0", deadline=1.5)
    assert totals == []
    assert "query.secure_reveal" not in [kind for _, kind, _ in grid.sent]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("keys", {"mask": "00"}),
        ("keys", {"mask": 1, "share": "00"}),
        ("keys", {"mask": "00", "share": "00"}),
        ("shares", {"0": "zz"}),
        ("commitments", {"0": "00"}),
        ("update", {"masked": torch.zeros(3, dtype=torch.int32)}),
        ("update", {"masked": torch.zeros(3)}),
        ("update", {"weights": {}}),
    ],
)
def test_an_answer_of_another_form_is_lost_and_the_round_goes_on(place, key, value):
    def spoil(reply):
        answer = tree(reply.content)
        if key in answer:
            reply.content = records({**answer, key: value})
        return reply

    run = play(sites(place, west=spoil), place, *SECURE, "train.rounds=1")
    assert run.metrics[-1]["clients"] == 3
    assert run.metrics[-1]["lost"] == {"3": "its answer is invalid"}


@pytest.mark.parametrize("key", ["shares", "commitments"])
def test_a_word_of_megabytes_loses_its_site(place, key):
    """The coordinator would combine shares of any length, in pure Python."""

    def spoil(reply):
        answer = tree(reply.content)
        if answer.get(key):
            reply.content = records({**answer, key: {**answer[key], "0": "00" * 10**6}})
        return reply

    run = play(sites(place, west=spoil), place, *SECURE, "train.rounds=1")
    assert run.metrics[-1]["lost"] == {"3": "its answer is invalid"}


def test_a_key_that_another_site_has_sent_loses_one_of_them(place):
    sent = []

    def copy(reply):
        answer = tree(reply.content)
        if "keys" in answer:
            sent.append(answer["keys"])
            reply.content = records({**answer, "keys": sent[0]})
        return reply

    run = play(sites(place, south=copy, west=copy), place, *SECURE, "train.rounds=1")
    assert run.metrics[-1]["clients"] == 3
    assert run.metrics[-1]["lost"] == {"3": "its answer is invalid"}


def test_a_key_for_both_purposes_loses_its_site(place):
    def double(reply):
        answer = tree(reply.content)
        if "keys" in answer:
            reply.content = records(
                {**answer, "keys": dict.fromkeys(("mask", "share"), answer["keys"]["mask"])}
            )
        return reply

    run = play(sites(place, west=double), place, *SECURE, "train.rounds=1")
    assert run.metrics[-1]["lost"] == {"3": "its answer is invalid"}


def opening_wrong(clients):
    """A site that opens wrong shares of these clients' secrets."""

    def spoil(reply):
        answer = tree(reply.content)
        if "shares" in answer and "commitments" not in answer:
            shares = answer["shares"]
            wrong = {k: shares[k][:-2] + f"{int(shares[k][-2:], 16) ^ 1:02x}" for k in clients}
            reply.content = records({**answer, "shares": {**shares, **wrong}})
        return reply

    return spoil


def test_a_wrong_share_is_left_out_of_the_opening(place, terms, totals, caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        run = play(sites(place, south=opening_wrong("03")), place, *SECURE, "train.rounds=1")
    assert "lost" not in run.metrics[-1]
    assert torch.equal(totals[0], sum(terms) % MODULUS)
    south = list(SITES).index("south")
    found = [line for line in caplog.messages if "committed to other shares" in line]
    assert [line.split("; ")[0] for line in found] == [
        f"round 1: client {k} committed to other shares than these clients opened: {south}" for k in (0, 3)
    ]


def test_a_share_that_its_receiver_cannot_read_is_left_out_and_its_sender_named(place, terms, totals, caplog):
    def garble(reply):
        answer = tree(reply.content)
        if "commitments" in answer:
            reply.content = records({**answer, "shares": {**answer["shares"], "0": "00"}})
        return reply

    with caplog.at_level("WARNING", logger="flwr"):
        run = play(sites(place, west=garble), place, *SECURE, "train.rounds=1")
    assert "lost" not in run.metrics[-1]
    assert torch.equal(totals[0], sum(terms) % MODULUS)
    assert "client 3 committed to other shares than these clients opened: 0" in caplog.text


def test_too_few_right_shares_name_the_client_whose_mask_stays_closed(place):
    def otherwise(reply):
        answer = tree(reply.content)
        if "commitments" in answer:
            wrong = {k: word if k in "01" else "00" for k, word in answer["commitments"].items()}
            reply.content = records({**answer, "commitments": wrong})
        return reply

    with pytest.raises(
        RunError, match="client 3 committed to only 2 of its 4 opened shares, and 3 are needed"
    ):
        play(sites(place, west=otherwise), place, *SECURE)
    assert Run(place / "run").completed_rounds() == 0


def test_a_site_that_does_not_clip_is_noticed_in_the_sum(place):
    def huge(reply):
        answer = tree(reply.content)
        if "update" in answer:
            moved = answer["update"]["masked"].clone()
            moved += 2**26
            reply.content = records({**answer, "update": {"masked": moved}})
        return reply

    with pytest.raises(RunError, match="so a client did not clip its own"):
        play(sites(place, west=huge), place, *SECURE, "options.secure_sum.clip=1.0")
    assert Run(place / "run").completed_rounds() == 0
