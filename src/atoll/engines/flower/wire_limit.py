"""Limit on the size of an answer while it is fetched, so that a larger one is never in memory as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.serverapp import Grid

OVERHEAD_BYTES = 2**20  # Flower's own objects around the Arrays: message, records, names and hashes of pieces


class TooLargeError(Exception):
    """An answer is larger than allowed; the rest of it was not fetched."""


@contextmanager
def limited(grid: Grid, most_bytes: int | None) -> Iterator[None]:
    """Limit what `Grid.pull_messages` fetches inside the block.

    A SuperLink sends an answer in pieces (5 MB by default), and a thread for each core fetches them. As soon as the
    sum exceeds the limit, no more are fetched. Flower has no public hook for this; a grid in the same process, as
    in Flower's simulation, fetches nothing, and the codec alone refuses a large answer.

    Args:
        grid: Flower's grid.
        most_bytes: Largest size of an answer's Arrays; None for no limit.

    Raises:
        TooLargeError: The answer was larger.
    """
    client = getattr(grid, "_runtime_client", None)
    fetch = getattr(client, "PullObject", None)
    if client is None or fetch is None or most_bytes is None:
        yield
        return
    left, lock = most_bytes + OVERHEAD_BYTES, threading.Lock()

    def counted(request: object) -> object:
        nonlocal left
        with lock:
            if left < 0:
                raise TooLargeError
        response = fetch(request)
        with lock:
            left -= len(response.object_content)
            if left < 0:
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
        del client.PullObject  # the class's own again
