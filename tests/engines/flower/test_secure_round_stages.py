"""The stages of a secure round, with clients in this process: what the coordinator asks, and what it keeps."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import torch

from atoll.aggregation.secure_sum import MODULUS, SecureSum
from atoll.core.tree import num_bytes
from atoll.engines.flower.exchange import TRAIN, Lost
from atoll.engines.flower.masks import make_keys, mask, reveal, share_secrets
from atoll.engines.flower.secure_round import KEYS, REVEAL, SHARES, SecureRound

STAGES = [KEYS, SHARES, TRAIN, REVEAL]
SIZE = 5
SILENT = Lost("no answer")


class Clients:
    """Clients that answer each stage in reverse order, except where ``other`` replaces an answer."""

    def __init__(self, count=4, other=None):
        draw = torch.Generator().manual_seed(count)
        self.terms = torch.randint(MODULUS - 9, MODULUS, (count, SIZE), generator=draw)
        self.other = other or {}
        self.asked = []
        self.answers = []
        self._states = {}

    def ask(self, kind, requests):
        self.asked.append((kind, list(requests)))
        for k in reversed(requests):
            answer = self._answer(kind, k, requests[k])
            change = self.other.get((kind, k))
            answer = change(answer) if callable(change) else change or answer
            if not isinstance(answer, Lost):
                self.answers.append(answer)
            yield k, answer

    def _answer(self, kind, k, request):
        if kind == KEYS:
            self._states[k], public = make_keys()
            return {"keys": public}
        if kind == SHARES:
            agreed = request["keys"], request["threshold"]
            self._states[k], shares, commitments = share_secrets(self._states[k], k, *agreed)
            return {"shares": shares, "commitments": commitments}
        if kind == TRAIN:
            self._states[k], masked = mask(self._states[k], k, request["shares"], self.terms[k])
            return {"update": {"masked": masked}}
        return {"shares": reveal(self._states[k], k, request["stayed"])}

    def total(self, least=1.0):
        """A round over all clients."""
        trains = {k: {"message": k} for k in range(len(self.terms))}
        return SecureRound(self.ask, 3, trains, SecureSum(), SIZE, least).total()


def test_the_sum_is_that_of_the_terms_and_every_answers_bytes_are_counted():
    clients = Clients()
    total = clients.total()
    assert torch.equal(total.numbers, clients.terms.sum(0) % MODULUS)
    assert (total.clients, total.lost, total.sent) == ([0, 1, 2, 3], {}, {0, 1, 2, 3})
    assert clients.asked == [(kind, [0, 1, 2, 3]) for kind in STAGES]
    assert total.bytes_up == sum(map(num_bytes, clients.answers))


@pytest.mark.parametrize("stage", range(4))
def test_after_a_stage_that_too_few_clients_complete_no_one_is_asked_again(stage):
    """Two of four stay, and three are needed."""
    clients = Clients(other={(STAGES[stage], k): SILENT for k in (1, 2)})
    total = clients.total()
    assert total.numbers is None
    assert total.clients == []
    assert total.lost == {1: "no answer", 2: "no answer"}
    assert [kind for kind, _ in clients.asked] == STAGES[: stage + 1]


@pytest.mark.parametrize("stage", range(3))
def test_no_mask_is_opened_for_fewer_clients_than_the_recipe_accepts(stage):
    """Three of four are enough to open the masks."""
    clients = Clients(other={(STAGES[stage], 2): SILENT})
    assert clients.total(least=4.0).numbers is None
    assert [kind for kind, _ in clients.asked] == STAGES[: stage + 1]


def test_as_many_clients_as_the_threshold_open_the_sum_of_all():
    clients = Clients(other={(REVEAL, 2): SILENT})
    total = clients.total(least=4.0)
    assert torch.equal(total.numbers, clients.terms.sum(0) % MODULUS)
    assert (total.clients, total.lost) == ([0, 1, 2, 3], {})


@pytest.mark.parametrize("stage", range(3))
def test_a_lost_client_is_out_of_the_sum_and_of_the_later_stages(stage):
    clients = Clients(other={(STAGES[stage], 1): SILENT})
    total = clients.total()
    rest = [0, 2, 3]
    assert torch.equal(total.numbers, clients.terms[rest].sum(0) % MODULUS)
    assert (total.clients, total.lost) == (rest, {1: "no answer"})
    assert [asked for _, asked in clients.asked] == [[0, 1, 2, 3]] * (stage + 1) + [rest] * (3 - stage)
    assert total.sent == ({0, 1, 2, 3} if stage == 2 else {*rest})


@pytest.mark.parametrize("kind", [TRAIN, REVEAL])
def test_only_the_model_that_was_not_sent_is_no_download(kind):
    total = Clients(other={(kind, 1): Lost("no node", sent=False)}).total()
    assert total.sent == ({0, 2, 3} if kind == TRAIN else {0, 1, 2, 3})


def other_word(field, name, word):
    """An answer with one changed word of a table."""
    return lambda answer: {**answer, field: {**answer[field], name: word}}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (KEYS, other_word("keys", "share", "00" * 120)),
        (KEYS, other_word("keys", "third", "00")),
        (SHARES, other_word("shares", "1", "00")),
        (SHARES, other_word("commitments", "4", "00")),
        (SHARES, other_word("shares", "0", "0")),
        (SHARES, other_word("shares", "0", "")),
        (SHARES, other_word("shares", "0", "00\n")),
        (SHARES, other_word("shares", "0", "0G")),
        (SHARES, other_word("shares", "0", 7)),
        (SHARES, other_word("commitments", "0", "00" * 2049)),
        (SHARES, lambda answer: {**answer, "shares": {"0": "00"}}),
        (SHARES, lambda answer: {**answer, "commitments": {"1": "00"}}),
        (SHARES, lambda answer: {"shares": answer["shares"]}),
        (SHARES, lambda answer: {"commitments": answer["commitments"]}),
        (TRAIN, lambda answer: {"update": {"masked": answer["update"]["masked"].long()}}),
        (TRAIN, lambda answer: {"update": {"masked": answer["update"]["masked"][:1]}}),
        (TRAIN, lambda answer: {"update": {"masked": answer["update"]["masked"].tolist()}}),
        (TRAIN, lambda answer: answer["update"]),
        (TRAIN, lambda answer: {"update": answer["update"]["masked"]}),
    ],
)
def test_an_answer_of_another_form_loses_its_client_alone(kind, change):
    clients = Clients(other={(kind, 1): change})
    total = clients.total()
    assert total.lost == {1: "its answer is invalid"}
    assert torch.equal(total.numbers, clients.terms[[0, 2, 3]].sum(0) % MODULUS)


@pytest.mark.parametrize("change", [lambda answer: {"shares": {"1": "00"}}, other_word("shares", "0", "x")])
def test_shares_of_another_form_are_not_used_to_open_the_sum(change):
    clients = Clients(other={(REVEAL, 1): change})
    total = clients.total()
    assert torch.equal(total.numbers, clients.terms.sum(0) % MODULUS)
    assert (total.clients, total.lost) == ([0, 1, 2, 3], {})


def test_a_reason_is_one_line_of_text():
    total = Clients(other={(KEYS, 1): lambda _: {"lost": "no\nkeys"}}).total()
    assert total.lost == {1: "no keys"}
    assert Clients(other={(KEYS, 1): lambda _: {"lost": 7}}).total().lost == {1: "its answer is invalid"}


@pytest.mark.parametrize("mine", ["mask", "share"])
@pytest.mark.parametrize("theirs", ["mask", "share"])
@pytest.mark.parametrize("first", [3, 2])
def test_no_key_has_two_owners(mine, theirs, first):
    """The key of a lost client's masks is opened, and nothing else may be encrypted for it."""
    seen = {}

    def keep(answer):
        return seen.setdefault("first", answer)

    def copy(answer):
        return other_word("keys", mine, seen["first"]["keys"][theirs])(answer)

    clients = Clients(other={(KEYS, first): keep, (KEYS, 0): copy})
    assert clients.total().lost == {0: "its answer is invalid"}


@pytest.mark.parametrize("opener", [1, 3, 5])
def test_a_wrong_share_of_a_lost_clients_key_is_left_out(opener):
    """Four of the five others are needed to open it."""

    def wrong(answer):
        share = answer["shares"]["0"]
        return other_word("shares", "0", f"{int(share[:2], 16) ^ 1:02x}{share[2:]}")(answer)

    clients = Clients(6, other={(TRAIN, 0): SILENT, (REVEAL, opener): wrong})
    total = clients.total()
    assert torch.equal(total.numbers, clients.terms[1:].sum(0) % MODULUS)
    assert total.lost == {0: "no answer"}
