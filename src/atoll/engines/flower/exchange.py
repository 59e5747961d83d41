"""Exchange of messages with nodes: sends requests and receives answers as they arrive, until a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from atoll.core.text import one_line
from atoll.core.tree import Tree, leaves
from atoll.engines.flower.codec import Encoder, tree
from atoll.engines.flower.wire_limit import TooLargeError, limited
from atoll.engines.update_checks import DTYPES, SizeLimit

QUERY, TRAIN, EVALUATE = "query", "train", "evaluate"
SMALL_ANSWER = SizeLimit(2**24, 2**24)  # limit of an answer without tensors: a site's classes, or its results
# What Flower raises if an answer cannot be assembled from its objects, but not if no server responds.
UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, DecodeError)
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two looks for answers


@dataclass(frozen=True)
class Lost:
    """Reason why there is no answer, whether the request was sent, and whether the time ran out."""

    reason: str
    sent: bool = True
    late: bool = False


class Exchange:
    """One exchange with several nodes.

    Args:
        grid: Flower's grid.
        seconds: Seconds until a request without an answer is lost; Flower drops older messages.
        limit: Largest size of an answer; larger ones are not fetched, and not decoded. None for no limit.
    """

    def __init__(self, grid: Grid, seconds: float, limit: SizeLimit | None = SMALL_ANSWER) -> None:
        self._grid = grid
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._limit = limit
        self._encoder = Encoder()
        self._pending: dict[str, int] = {}  # client of each message id
        self._unsent: list[int] = []

    def send(self, client: int, node: int, kind: str, body: dict[str, Tree]) -> None:
        """Send a tree to a client's node; ``kind`` names the ClientApp's function."""
        left = max(self._ends - time.monotonic(), 1.0)
        message = Message(self._encoder.records(body), node, kind, ttl=left)
        ids = list(self._grid.push_messages([message]))
        if ids and ids[0]:
            self._pending[ids[0]] = client
        else:
            self._unsent.append(client)

    def answers(self) -> Iterator[tuple[int, dict[str, Tree] | Lost]]:
        """Yield each client's answer once, in the order of arrival; meanwhile, more requests may be sent."""
        pause = SHORTEST_PAUSE
        while self._pending or self._unsent:
            received = False
            for answer in self.look():
                received = True
                yield answer
            if received:
                pause = SHORTEST_PAUSE
            elif self._pending:
                time.sleep(min(pause, max(self._ends - time.monotonic(), 0)))
                pause = min(1.5 * pause, LONGEST_PAUSE)

    def look(self) -> Iterator[tuple[int, dict[str, Tree] | Lost]]:
        """Yield the answers that have arrived since the last look; after the deadline, the missing ones as lost."""
        while self._unsent:
            yield self._unsent.pop(), Lost("the message could not be sent", sent=False)
        late = time.monotonic() >= self._ends - 1  # after this time, Flower itself may have dropped a message
        # One at a time, because all arrived answers together might not fit in memory.
        for message_id in list(self._pending):
            answer = self._pull(message_id, late)
            if answer is not None:
                yield self._pending.pop(message_id), answer

    def _pull(self, message_id: str, late: bool) -> dict[str, Tree] | Lost | None:
        try:
            with limited(self._grid, self._limit and self._limit.total):
                # Further replies are ignored.
                reply = next(iter(self._grid.pull_messages([message_id])), None)
        except TooLargeError as error:
            return Lost(f"its answer cannot be read: {error}")
        except UNREADABLE as error:
            return Lost(f"its answer cannot be read: {one_line(repr(error))}")
        if reply is not None and not (late and reply.has_error()):
            return _read(reply, self._limit)
        return Lost(f"no answer within {self._seconds:g} s", late=True) if late else None


def _read(reply: Message, limit: SizeLimit | None) -> dict[str, Tree] | Lost:
    if reply.has_error():
        return Lost(f"its node failed: {one_line(reply.error.reason)}")
    try:
        answer = tree(reply.content, limit)
    except ValueError as error:
        return Lost(f"its answer cannot be read: {one_line(error)}")
    other = next((tensor.dtype for tensor in leaves(answer) if tensor.dtype not in DTYPES), None)
    return answer if other is None else Lost(f"its answer contains {other}, which is not supported")
