"""Messages out, answers in as they arrive, until a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from atoll.core.tree import Tree
from atoll.engines.flower.codec import Encoder, tree

QUERY, TRAIN, EVALUATE = "query", "train", "evaluate"
SECONDS_BETWEEN_LOOKS = 0.05, 2.0  # the first and the longest wait for an answer
LONGEST = 1000  # characters of a reason that a node gives


@dataclass(frozen=True)
class Lost:
    """No answer, and why."""

    reason: str


class Exchange:
    """One exchange with some nodes.

    Args:
        grid: Flower's.
        seconds: until what has not been answered is lost. Flower drops a message that is older.
        most_bytes: of an answer; larger ones are not read. None: no limit.
    """

    def __init__(self, grid: Grid, seconds: float, most_bytes: int | None = None) -> None:
        self._grid = grid
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._most_bytes = most_bytes
        self._encoder = Encoder()
        self._pending: dict[str, int] = {}  # message ids and whom they were for
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
        """Each client's answer once, in the order of arrival; more may be sent meanwhile."""
        pause, longest = SECONDS_BETWEEN_LOOKS
        while self._pending or self._unsent:
            came = False
            for answer in self.look():
                came = True
                yield answer
            if came:
                pause = SECONDS_BETWEEN_LOOKS[0]
            elif self._pending:
                time.sleep(min(pause, max(self._ends - time.monotonic(), 0)))
                pause = min(1.5 * pause, longest)

    def look(self) -> Iterator[tuple[int, dict[str, Tree] | Lost]]:
        """The answers that have come since the last look; after the deadline, all that are left."""
        while self._unsent:
            yield self._unsent.pop(), Lost("the message could not be sent")
        late = time.monotonic() >= self._ends - 1  # from then on Flower may have dropped a message by itself
        # One at a time: all that have arrived at once might not fit in memory.
        for message_id in list(self._pending):
            answer = self._pull(message_id, late)
            if answer is not None:
                yield self._pending.pop(message_id), answer

    def _pull(self, message_id: str, late: bool) -> dict[str, Tree] | Lost | None:
        reply = next(iter(self._grid.pull_messages([message_id])), None)  # a second one is not read
        if reply is not None and not (late and reply.has_error()):
            return _read(reply, self._most_bytes)
        return Lost(f"no answer within {self._seconds:g} s") if late else None


def _read(reply: Message, most_bytes: int | None) -> dict[str, Tree] | Lost:
    if reply.has_error():
        return Lost(f"its node failed: {words(reply.error.reason)}")
    try:
        return tree(reply.content, most_bytes)
    except ValueError as error:
        return Lost(f"its answer cannot be read: {words(error)}")


def words(said: object) -> str:
    """What a node says, fit for a line of a log."""
    text = " ".join(str(said).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
