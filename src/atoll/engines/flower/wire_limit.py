"""Limit on the size of an answer while it is fetched, so that a larger one is never completely in memory."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Array
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)

OVERHEAD_BYTES = 2**20  # Flower's own objects around the Arrays: message, records, names and hashes of pieces


class TooLargeError(Exception):
    """An answer is larger than allowed; the rest of it was not fetched."""


class _Size:
    """Size of an answer: of the pieces that were fetched, and of the Arrays that Flower will assemble from them.

    An Array may list a piece several times: a few bytes could stand for any number of copies.
    """

    def __init__(self) -> None:
        self._fetched = self._made = 0
        self._pieces: dict[str, int] = {}  # bytes of each piece
        self._uses: Counter[str] = Counter()  # how often the Arrays need each piece

    @property
    def largest(self) -> int:
        return max(self._fetched, self._made)

    def add(self, name: str, content: bytes) -> None:
        self._fetched += len(content)
        try:
            kind, children, _ = get_object_head_values_from_object_content(content)
            if kind == "ArrayChunk":
                self._pieces[name] = len(content)
                self._made += self._uses[name] * len(content)
            elif kind == "Array":
                uses = Counter(
                    children[i] for i in json.loads(get_object_body(content, Array))["arraychunk_ids"]
                )
                self._uses.update(uses)
                self._made += sum(count * self._pieces.get(piece, 0) for piece, count in uses.items())
        except (LookupError, TypeError, ValueError):
            return  # Flower cannot assemble it either


@contextmanager
def limited(grid: Grid, most_bytes: int | None) -> Iterator[None]:
    """Limit what `Grid.pull_messages` fetches inside the block.

    A SuperLink sends an answer in pieces (5 MB by default), and a thread for each core fetches them. As soon as
    their sum exceeds the limit, no more are fetched, and nothing is assembled. Flower has no public hook for this.
    A grid in the same process, as in Flower's simulation, fetches nothing; only the codec then refuses a large
    answer.

    Args:
        grid: Flower's grid.
        most_bytes: Maximum size of an answer's Arrays; None for no limit.

    Raises:
        TooLargeError: The answer was larger.
    """
    client = getattr(grid, "_runtime_client", None)
    fetch = getattr(client, "PullObject", None)
    if client is None or fetch is None or most_bytes is None:
        yield
        return
    most, size, lock = most_bytes + OVERHEAD_BYTES, _Size(), threading.Lock()

    def counted(request: PullObjectRequest) -> PullObjectResponse:
        with lock:
            if size.largest > most:
                raise TooLargeError
        response: PullObjectResponse = fetch(request)
        with lock:
            size.add(request.object_id, response.object_content)
            if size.largest > most:
                raise TooLargeError
        return response

    client.PullObject = counted
    try:
        yield
    except TooLargeError:
        raise TooLargeError(
            f"it has more than the {most_bytes:,} bytes that are allowed; the rest was not fetched"
        ) from None
    finally:
        del client.PullObject  # restores the method of the class
