"""Secure aggregation at the coordinator: the four stages of a round; only the sum is kept.

The stages collect keys, shares, masked terms, and the shares that open the masks of the sum
(`atoll.engines.flower.masks`). A client that does not answer at a stage is lost; the round continues as long as a
threshold of clients stays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterable, Mapping

import torch
from torch import Tensor

from atoll.aggregation.secure_sum import MODULUS, SecureSum
from atoll.core.errors import RunError
from atoll.core.text import one_line
from atoll.core.tree import Tree, num_bytes
from atoll.engines.flower.exchange import QUERY, TRAIN, Lost
from atoll.engines.flower.masks import PublicKeys, Shares, is_committed, is_public_key, to_numbers, unmask
from atoll.engines.jobs import Total

KEYS, SHARES, REVEAL = (f"{QUERY}.secure_{stage}" for stage in ("keys", "shares", "reveal"))
LONGEST = 4_096  # digits of a word; the longest, an encrypted share, has 1,224
Requests = Mapping[int, dict[str, Tree]]
log = logging.getLogger("flwr")
Ask = Callable[[str, Requests], Generator[tuple[int, dict[str, Tree] | Lost], None, None]]


class SecureRound:
    """The stages of a round, in their order.

    Args:
        ask: Sends one request of a kind to each client; yields the answers.
        round: The round.
        trains: The clients' requests to train.
        aggregation: The sum's options.
        size: Number of whole numbers in a term.
        least: Minimum number of terms in a sum that is used; with fewer, the masks are not opened.
    """

    def __init__(
        self, ask: Ask, round: int, trains: Requests, aggregation: SecureSum, size: int, least: float
    ) -> None:
        self._ask = ask
        self._round = round
        self._trains = trains
        self._threshold = aggregation.least(len(trains))
        self._least = max(self._threshold, least)
        self._result = Total()
        self._keys: PublicKeys = {}
        self._commitments: dict[int, Shares] = {}
        self._taken: set[str] = set()  # single public keys
        self._sum = torch.zeros(size, dtype=torch.int64)

    def total(self) -> Total:
        """Run the stages; the result has no numbers if too few clients stay.

        Raises:
            RunError: The shares of a client do not open its masks.
        """
        result, clients = self._result, self._exchange_keys()
        if len(clients) < self._least:
            return result
        boxes = self._exchange_shares(clients)
        if len(boxes) < self._least:
            return result
        stayed = self._train(boxes)
        if len(stayed) < self._least:
            return result
        lost = dict(result.lost)
        revealed = self._reveal(boxes, stayed)
        if len(revealed) < self._threshold:
            return result
        result.numbers = self._open(revealed, stayed)
        result.lost = lost  # the sum contains the term of a client that did not answer at the last stage
        result.clients = stayed
        return result

    def _exchange_keys(self) -> list[int]:
        """Stage 0: the clients that drew keys."""
        requests = {k: {"round": self._round, "client": k} for k in sorted(self._trains)}
        keys = self._stage(KEYS, requests, lambda _, answer: self._new_keys(answer.get("keys")))
        self._keys = {str(k): key for k, key in keys.items()}
        return list(keys)

    def _exchange_shares(self, clients: list[int]) -> dict[int, Shares]:
        """Stage 1: the encrypted shares of each client's secrets for the others; keeps their commitments."""
        agreed = {"round": self._round, "keys": self._keys, "threshold": self._threshold}
        requests = {k: {**agreed, "client": k} for k in clients}
        found = self._stage(SHARES, requests, self._new_shares)
        self._commitments = {k: answer["commitments"] for k, answer in found.items()}
        return {k: answer["shares"] for k, answer in found.items()}

    def _train(self, boxes: dict[int, Shares]) -> list[int]:
        """Stage 2: the clients whose masked terms are in the sum."""
        requests = {
            k: {
                **self._trains[k],
                "shares": {str(other): box[str(k)] for other, box in boxes.items() if other != k},
            }
            for k in boxes
        }
        self._result.sent = set(requests)
        return list(self._stage(TRAIN, requests, lambda _, answer: self._add(answer.get("update"))))

    def _reveal(self, members: Iterable[int], stayed: list[int]) -> dict[int, Shares]:
        """Stage 3: the shares that open the masks of the sum, by the client that opened them."""
        requests = {k: {"round": self._round, "client": k, "stayed": stayed} for k in stayed}
        names = set(map(str, members))
        return self._stage(REVEAL, requests, lambda _, answer: _words(answer.get("shares"), names))

    def _open(self, revealed: dict[int, Shares], stayed: list[int]) -> Tensor:
        """The sum without masks."""
        try:
            opened = {k: self._right(k, k in stayed, revealed) for k in self._commitments}
            return unmask(self._sum, self._keys, stayed, opened)
        except ValueError as error:
            raise RunError(
                f"the masks of round {self._round} cannot be opened: {error}; if it happens again, revoke "
                "that client's site"
            ) from None

    def _right(self, client: int, stays: bool, revealed: dict[int, Shares]) -> list[str]:
        """A threshold of a client's opened shares, all of which match the client's commitments."""
        right, wrong = [], []
        for other, shares in revealed.items():
            share = shares[str(client)]
            if is_committed(share, self._commitments[client][str(other)], stays):
                right.append(share)
            else:
                wrong.append(other)
        if wrong:
            log.warning(
                "round %d: client %d committed to other shares than these clients opened: %s; it or they do not "
                "follow secure aggregation's protocol",
                self._round,
                client,
                ", ".join(map(str, wrong)),
            )
        if len(right) < self._threshold:
            raise ValueError(
                f"client {client} committed to only {len(right)} of its {len(revealed)} opened shares, and "
                f"{self._threshold} are needed"
            )
        return right[: self._threshold]

    def _stage(
        self, kind: str, requests: Requests, check: Callable[[int, dict[str, Tree]], Tree]
    ) -> dict[int, Tree]:
        """The checked answers by client; others are lost."""
        found = {}
        for client, answer in self._ask(kind, requests):
            value = None if isinstance(answer, Lost) else check(client, answer)
            if value is None:
                why = answer.reason if isinstance(answer, Lost) else answer.get("lost")
                self._result.lost[client] = one_line(why) if isinstance(why, str) else "its answer is invalid"
                if kind == TRAIN and isinstance(answer, Lost) and not answer.sent:
                    self._result.sent.discard(client)
            else:
                found[client] = value
                self._result.bytes_up += num_bytes(value)
        return dict(sorted(found.items()))

    def _new_keys(self, value: Tree) -> Tree:
        """A client's public keys; None if they are invalid, or if one has two roles."""
        keys = _words(value, {"mask", "share"})
        if keys is None or not all(map(is_public_key, keys.values())):
            return None
        if keys["mask"] == keys["share"] or self._taken & {*keys.values()}:
            return None
        self._taken |= {*keys.values()}
        return keys

    def _new_shares(self, client: int, answer: dict[str, Tree]) -> Tree:
        """A client's encrypted shares and the commitments to them; None if one of them is invalid."""
        shares = _words(answer.get("shares"), self._keys.keys() - {str(client)})
        commitments = _words(answer.get("commitments"), {*self._keys})
        return shares and commitments and {"shares": shares, "commitments": commitments}

    def _add(self, update: Tree) -> Tree:
        """Add a masked term to the sum; None if the update is not a masked term."""
        masked = update.get("masked") if isinstance(update, dict) else None
        if not isinstance(masked, Tensor) or masked.dtype != torch.int32 or masked.shape != self._sum.shape:
            return None
        self._sum = (self._sum + to_numbers(masked)) % MODULUS
        return masked


def _words(value: Tree, names: set[str]) -> Tree:
    """A table of exactly these names with hexadecimal words of at most `LONGEST` digits; None otherwise."""
    if not isinstance(value, dict) or value.keys() != names:
        return None
    right = (
        isinstance(word, str) and len(word) <= LONGEST and re.fullmatch("(?:[0-9a-f]{2})+", word)
        for word in value.values()
    )
    return value if all(right) else None
