"""Secure aggregation at the coordinator: the four stages of a round, of which only the sum is kept.

Keys, shares, masked terms, and the shares that open the masks of the sum (`atoll.engines.flower.masks`). A client
that does not answer at a stage is lost for the round, as long as a threshold of them stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor

from atoll.aggregation.secure_sum import MODULUS, SecureSum
from atoll.core.errors import RunError
from atoll.core.text import one_line
from atoll.core.tree import Tree, num_bytes
from atoll.engines.flower.exchange import QUERY, TRAIN, Lost
from atoll.engines.flower.masks import to_numbers, unmask
from atoll.engines.jobs import Total

KEYS, SHARES, REVEAL = (f"{QUERY}.secure_{stage}" for stage in ("keys", "shares", "reveal"))
Requests = Mapping[int, dict[str, Tree]]
Ask = Callable[[str, Requests], Generator[tuple[int, dict[str, Tree] | Lost], None, None]]


def secure_total(ask: Ask, round: int, trains: Requests, aggregation: SecureSum, size: int) -> Total:
    """Run the stages of a round.

    Args:
        ask: Sends one request of a kind to each client; yields the answers.
        round: The round.
        trains: The clients' requests to train.
        aggregation: The sum's options.
        size: Number of whole numbers in a term.

    Raises:
        RunError: Clients revealed shares that do not open the masks.
    """
    result = Total()
    threshold = aggregation.least(len(trains))

    def stage(
        kind: str, requests: Requests, check: Callable[[int, dict[str, Tree]], Tree]
    ) -> dict[int, Tree]:
        """The checked answers by client; others are lost."""
        found = {}
        for client, answer in ask(kind, requests):
            value = None if isinstance(answer, Lost) else check(client, answer)
            if value is None:
                why = answer.reason if isinstance(answer, Lost) else answer.get("lost")
                result.lost[client] = one_line(why) if isinstance(why, str) else "its answer is invalid"
            else:
                found[client] = value
                result.bytes_up += num_bytes(value)
        return dict(sorted(found.items()))

    clients = sorted(trains)
    keys = stage(
        KEYS, {k: {"round": round, "client": k} for k in clients}, lambda _, answer: _keys(answer.get("keys"))
    )
    if len(keys) < threshold:
        return result
    known = {str(k): key for k, key in keys.items()}
    agreed = {"round": round, "keys": known, "threshold": threshold}
    boxes = stage(
        SHARES,
        {k: {**agreed, "client": k} for k in keys},
        lambda k, answer: _words(answer.get("shares"), known.keys() - {str(k)}),
    )
    if len(boxes) < threshold:
        return result
    incoming = {k: {str(other): box[str(k)] for other, box in boxes.items() if other != k} for k in boxes}
    total = torch.zeros(size, dtype=torch.int64)

    def add(client: int, answer: dict[str, Tree]) -> Tree:
        nonlocal total
        masked = _masked(answer.get("update"), size)
        if masked is not None:
            total = (total + to_numbers(masked)) % MODULUS
        return masked

    stayed = sorted(stage(TRAIN, {k: {**trains[k], "shares": incoming[k]} for k in boxes}, add))
    if len(stayed) < threshold:
        return result
    members = {str(k) for k in boxes}
    before = dict(result.lost)
    revealed = stage(
        REVEAL,
        {k: {"round": round, "client": k, "stayed": stayed} for k in stayed},
        lambda _, answer: _words(answer.get("shares"), members),
    )
    if len(revealed) < threshold:
        return result
    try:
        opened = list(revealed.values())[:threshold]
        result.numbers = unmask(total, known, list(boxes), stayed, opened)
    except ValueError as error:
        raise RunError(
            f"the masks of round {round} could not be opened ({error}), so a site did not follow the protocol; "
            "run again when the sites' logs have been compared"
        ) from None
    result.lost = before  # the term of a client that fell silent now is in the sum
    result.clients = stayed
    return result


def _keys(value: Tree) -> Tree:
    return _words(value, {"mask", "share"})


def _words(value: Tree, names: set[str]) -> Tree:
    """A table of exactly these names with hexadecimal words; None otherwise."""
    if not isinstance(value, dict) or value.keys() != names:
        return None
    right = all(isinstance(word, str) and re.fullmatch("(?:[0-9a-f]{2})+", word) for word in value.values())
    return value if right else None


def _masked(update: Tree, size: int) -> Tree:
    masked = update.get("masked") if isinstance(update, dict) else None
    fits = isinstance(masked, Tensor) and masked.dtype == torch.int32 and tuple(masked.shape) == (size,)
    return masked if fits else None


def train_requests(
    messages: Sequence[tuple[int, Tree]], needed: Mapping[int, int]
) -> dict[int, dict[str, Tree]]:
    """Requests to train, by client."""
    return {client: {"message": message, "needed": needed.get(client, 0)} for client, message in messages}
