"""Words for clients that are too small to train."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.core.text import few, plural


def sit_out_words(clients: Mapping[str, int]) -> str:
    """Say which clients are too small to take part, all of them, and how many images each has.

    Example:
        >>> from atoll.data.partition.small_clients import sit_out_words
        >>> sit_out_words({"7": 1, "31": 3})
        '2 clients are too small to train and sit out: 7 (1 image), 31 (3 images)'
    """
    return f"{_too_small(clients)} and sit{'s' * (len(clients) == 1)} out: {', '.join(_sizes(clients))}"


def too_small_words(clients: Mapping[str, int]) -> str:
    """Say which clients are too small to train, the first of them, and how many images each has.

    Example:
        >>> from atoll.data.partition.small_clients import too_small_words
        >>> too_small_words({"7": 1})
        '1 client is too small to train: 7 (1 image)'
    """
    return f"{_too_small(clients)}: {few(_sizes(clients))}"


def _too_small(clients: Mapping[str, int]) -> str:
    return f"{plural(len(clients), 'client')} {'is' if len(clients) == 1 else 'are'} too small to train"


def _sizes(clients: Mapping[str, int]) -> list[str]:
    return [f"{name} ({plural(size, 'image')})" for name, size in clients.items()]
