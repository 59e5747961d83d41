"""An answer that is too large is not fetched as a whole; Flower's own grid fetches, from a SuperLink in memory."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from types import SimpleNamespace

import torch
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from atoll.engines.flower.codec import records
from atoll.engines.flower.exchange import TRAIN, Exchange, Lost
from atoll.engines.flower.wire_limit import OVERHEAD_BYTES
from atoll.engines.update_checks import SizeLimit
from tests.engines.flower.grid import be_a_task
from tests.trees import same

PIECE = 5 * 2**20  # Flower's


class SuperLink:
    """What a grid asks of a SuperLink: the tree of an answer's objects, and each object."""

    def __init__(self, answer):
        be_a_task()
        message = Message(records(answer), 1, "train")
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects = {name: made.deflate() for name, made in get_all_nested_objects(message).items()}
        self.tree, self.proto = get_object_tree(message), message_to_proto(message)
        self.fetched = 0

    def PullMessages(self, request):
        return SimpleNamespace(messages_list=[self.proto], message_object_trees=[self.tree])

    def PullObject(self, request):
        content = self.objects[request.object_id]
        self.fetched += len(content)
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        pass


def answer_of(link, limit):
    grid = HttpGrid(token="a token")
    grid._client = link
    grid.set_run(Run.create_empty(1))
    grid.push_messages = lambda messages: ["m"]
    exchange = Exchange(grid, 60, limit)
    exchange.send(0, 1, TRAIN, {})
    ((client, answer),) = exchange.look()
    assert client == 0
    return answer


@pytest.mark.parametrize("limit", [SizeLimit(2**23, 2**20), None])
def test_what_fits_arrives_to_the_bit(limit):
    sent = {"update": {"w": torch.randn(2**20)}}  # 4 MiB
    assert same(answer_of(SuperLink(sent), limit), sent)


def test_the_rest_of_what_does_not_fit_is_not_fetched(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)  # threads that fetch at a time
    link = SuperLink({"update": {"w": torch.randn(2**23)}})  # 32 MiB
    answer = answer_of(link, SizeLimit(2**22, 2**20))
    assert answer == Lost(
        "its answer cannot be read: it has more than the 4,194,304 bytes that are allowed; "
        "the rest was not fetched"
    )
    assert 2**22 < link.fetched <= 2**22 + OVERHEAD_BYTES + 3 * (PIECE + 1000)
    assert "PullObject" not in vars(link)  # the grid is as it was


def test_without_the_limit_all_of_it_is_fetched():
    link = SuperLink({"update": {"w": torch.randn(2**23)}})
    assert not isinstance(answer_of(link, None), Lost)
    assert link.fetched > 2**25


@pytest.mark.parametrize("kind", ["Array", "ArrayRecord", "Message"])
def test_an_answer_that_flower_cannot_put_together_is_lost(kind):
    """Flower raises whatever it stumbles over; other sites' answers count all the same."""
    link = SuperLink({"update": {"w": torch.zeros(4)}})
    name = next(name for name, content in link.objects.items() if content.startswith(f"{kind} ".encode()))
    link.objects[name] = link.objects[name] + b"x"
    answer = answer_of(link, SizeLimit(2**22, 2**20))
    assert isinstance(answer, Lost)
    assert answer.reason.startswith("its answer cannot be read: ")


def test_a_piece_that_is_listed_many_times_counts_each_time():
    """Flower shares equal pieces: 64 MiB of zeros travel as one piece of 5 MiB, and a rest."""
    link = SuperLink({"update": {"w": torch.zeros(2**24)}})
    assert sum(map(len, link.objects.values())) < 2**24
    lost = answer_of(link, SizeLimit(2**24, 2**20))
    assert isinstance(lost, Lost)
    assert "more than the 16,777,216 bytes that are allowed" in lost.reason
    assert same(answer_of(link, SizeLimit(2**26 + 2**20, 2**20)), {"update": {"w": torch.zeros(2**24)}})
