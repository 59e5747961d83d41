"""Executor of a round over Flower: sends jobs, receives updates as they arrive, and yields them in client order."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

from atoll.aggregation.secure_sum import SecureSum
from atoll.components.declaration import LARGEST
from atoll.core.errors import RunError, UserError
from atoll.core.given import names_code
from atoll.core.text import one_line, short
from atoll.core.tree import Tree, load, num_bytes, save
from atoll.engines.flower.agreed import digest_of
from atoll.engines.flower.enrolment import Site, is_count, is_number
from atoll.engines.flower.exchange import EVALUATE, SMALL_ANSWER, TRAIN, Exchange, Lost
from atoll.engines.flower.ledger import ASKED, LOST, RECEIVED, received, round_of
from atoll.engines.flower.secure_round import SecureRound
from atoll.engines.flower.site_registry import SiteRegistry
from atoll.engines.jobs import Job, Result, Total
from atoll.engines.state_packs import Key
from atoll.engines.update_checks import SizeLimit
from atoll.evaluation.own import LONGEST_NAME

ROUNDING = 0.01  # tolerance for a result at its bound
log = logging.getLogger("flwr")


class NodeLostError(RunError):
    """A node of a simulation died, so its client's update is missing."""


class RemoteStates:
    """Client states at the sites: the server only knows which round's state is valid."""

    def __init__(self) -> None:
        self.needed: dict[int, int] = {}

    def load(self, client: int, round: int) -> Tree:
        """Return None, because a client state never leaves its site."""
        return None

    def sync(self, states: Iterable[Key]) -> None:
        """Do nothing: a site answers when its state is on the disk."""

    def prune(self, valid: Mapping[int, int]) -> None:
        """Record which states clients may delete, for their next jobs."""
        self.needed = dict(valid)

    def clear(self) -> None:
        """Do nothing: a run that is reset has a new id, and therefore new folders at the sites."""


class FlowerExecutor:
    """Runs jobs on the nodes of a registry.

    An answer that arrives before its turn waits in a disk buffer, so that memory contains at most two updates,
    regardless of the number of clients. A client that does not answer in time is lost for the round, and its later
    answer is not read.

    Args:
        registry: The site registry, which knows the node of each client.
        states: Record of the valid client states; clients may delete older ones.
        scratch: Folder of the disk buffer, for early answers.
        deadline: Maximum duration of a round in seconds.
        classes: Classes of the federation.
        limit: Maximum size of an update (see `max_update_size`); None for no limit.
        complete: Whether a lost client ends the run; otherwise, the round continues without it.
    """

    def __init__(
        self,
        registry: SiteRegistry,
        states: RemoteStates,
        scratch: Path,
        deadline: float,
        classes: Sequence[str],
        limit: SizeLimit | None = None,
        complete: bool = False,
    ) -> None:
        self._registry = registry
        self._states = states
        self._scratch = scratch
        self._deadline = deadline
        self._classes = list(classes)
        self._limit = limit
        self._complete = complete
        self._agreed: dict[str, Tree] = {}
        self._digest = ""
        self._prepared: set[int] = set()

    def start(self, constants: Tree) -> None:
        """Define the data that all clients agree on; each gets them with its first request, and saves them."""
        self._agreed = {
            "recipe": self._registry.recipe,
            "clients": len(self._registry.clients),
            "classes": self._classes,
            "constants": constants,
        }
        digest = digest_of(self._agreed)
        if digest != self._digest:
            self._digest, self._prepared = digest, set()

    def run(
        self, jobs: Sequence[Job], progress: Callable[[int], None] | None
    ) -> Generator[Result, None, None]:
        """Yield results in the order of the jobs."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        requests = self._train_requests(jobs)
        waiting: dict[int, Result | Path] = {}
        turn = iter([job.client for job in jobs])
        current = next(turn, None)
        for client, answer in self.ask(TRAIN, requests):
            if progress is not None and not isinstance(answer, Lost) and "update" in answer:
                progress(self._registry.clients[client].train)
            waiting[client] = self._buffer(client, answer) if client != current else _result(client, answer)
            while current in waiting:
                yield self._unbuffer(current, waiting.pop(current))
                current = next(turn, None)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def total(self, jobs: Sequence[Job], aggregation: SecureSum, size: int, least: float) -> Total:
        """Return the sum of the clients' terms, by secure aggregation."""
        requests = self._train_requests(jobs)
        round = jobs[0].round if jobs else 0
        return SecureRound(self.ask, round, requests, aggregation, size, least).total()

    def _train_requests(self, jobs: Sequence[Job]) -> dict[int, dict[str, Tree]]:
        needed = self._states.needed
        return {job.client: {"message": job.message, "needed": needed.get(job.client, 0)} for job in jobs}

    def ask(
        self, kind: str, requests: Mapping[int, dict[str, Tree]]
    ) -> Generator[tuple[int, dict[str, Tree] | Lost], None, None]:
        """Send one request to each client, and yield one answer for each, in the order of arrival.

        Raises:
            NodeLostError: A client was lost, and the round must be complete.
            UserError: A client reports an error, and the round must be complete.
        """
        for client, answer in self._ask(kind, requests):
            if self._complete:
                if isinstance(answer, Lost):
                    raise NodeLostError(f"client {client} was lost: {answer.reason}")
                if "lost" in answer:
                    raise UserError(f"client {client}: {_reason(answer)}")
            yield client, answer

    def _ask(
        self, kind: str, requests: Mapping[int, dict[str, Tree]]
    ) -> Generator[tuple[int, dict[str, Tree] | Lost], None, None]:
        self._registry.refresh()
        limit = self._limit if kind == TRAIN else SMALL_ANSWER
        exchange = Exchange(self._registry.grid, self._deadline, limit)
        common = {"federation": self._registry.federation, "digest": self._digest}
        nodes = self._registry.connected()
        unprepared = set(requests) - self._prepared  # they do not have the agreed data yet
        for client, request in requests.items():
            if reason := self._registry.excluded(client):
                yield client, Lost(reason, sent=False)
                continue
            if client not in nodes:
                yield client, Lost("its site is not connected", sent=False)
                continue
            agreed = {"agreed": self._agreed} if client in unprepared else {}
            exchange.send(client, nodes[client], kind, {**common, **request, **agreed})
            self._registry.record(ASKED, **self._facts(client, kind, request), bytes=num_bytes(request))
        for client, answer in exchange.answers():
            if isinstance(answer, Lost):
                self._registry.record(LOST, **self._facts(client, kind, requests[client]), why=answer.reason)
            else:
                self._prepared.add(client)
                if "unprepared" in answer and client not in unprepared:  # it has since lost its disk
                    unprepared.add(client)
                    again = {**common, **requests[client], "agreed": self._agreed}
                    exchange.send(client, nodes[client], kind, again)
                    continue
                facts = self._facts(client, kind, requests[client])
                self._registry.record(RECEIVED, **facts, **received(answer))
                if answer.get("withdrawn") is True:
                    self._registry.withdraw(client)
            yield client, answer

    def _facts(self, client: int, kind: str, request: dict[str, Tree]) -> dict[str, object]:
        """The client and the kind of request, for the audit log."""
        return {"site": self.site(client).name, "for": kind, **round_of(request)}

    def site(self, client: int) -> Site:
        """Return a client's site."""
        return self._registry.clients[client]

    def close(self) -> None:
        """Do nothing: the sites run their nodes themselves."""

    def _buffer(self, client: int, answer: dict[str, Tree] | Lost) -> Result | Path:
        result = _result(client, answer)
        if result.lost:
            return result
        path = self._scratch / f"{client}.safetensors"
        try:
            save(path, {"update": result.update})
        except TypeError as error:  # no check has seen the update yet
            return Result(client, lost=f"its answer cannot be stored: {one_line(error)}")
        return path

    def _unbuffer(self, client: int, waiting: Result | Path) -> Result:
        if isinstance(waiting, Result):
            return waiting
        result = Result(client, load(waiting)["update"])
        waiting.unlink()
        return result


def _result(client: int, answer: dict[str, Tree] | Lost) -> Result:
    if isinstance(answer, Lost):
        return Result(client, lost=answer.reason, sent=answer.sent)
    if "update" not in answer:
        return Result(client, lost=_reason(answer), reset=answer.get("reset") is True)
    return Result(client, answer.pop("update"))  # removed, because callers hold the answer until the next one


def _reason(answer: dict[str, Tree] | Lost) -> str:
    """Reason why an answer cannot be used."""
    if isinstance(answer, Lost):
        return answer.reason
    lost = answer.get("lost")
    return one_line(lost) if lost and isinstance(lost, str) else "its answer is invalid"


def measure_sites(
    executor: FlowerExecutor, requests: Mapping[int, dict[str, Tree]], protocols: Iterable[str]
) -> dict[int, tuple[dict[str, float], int]]:
    """Collect each client's results under the protocols, with the number of its held-out images.

    Sites without an answer, or without results, are left out.
    """
    # Geometry replaces protocols that the images do not support.
    names = "|".join(map(re.escape, {*protocols, "geometry"}))
    allowed = re.compile(rf"(?:{names})/\w{{1,{LONGEST_NAME}}}", re.ASCII)
    found = {}
    for client, answer in executor.ask(EVALUATE, requests):
        site = executor.site(client)
        measured = _measured(answer, site.test, allowed)
        if isinstance(measured, str):
            log.warning("%s is left out of the evaluation: %s", site.name, measured)
        elif measured:
            found[client] = measured, site.test
    return dict(sorted(found.items()))


def _measured(answer: dict[str, Tree] | Lost, held: int, allowed: re.Pattern[str]) -> dict[str, float] | str:
    """A site's results on its held-out images, or the reason why they cannot be used."""
    if isinstance(answer, Lost) or not isinstance(answer.get("results"), dict):
        return _reason(answer)
    images = answer.get("images")
    numbers = {
        name: value
        for name, value in answer["results"].items()
        if allowed.fullmatch(name) and is_number(value)
    }
    if numbers and not (is_count(images) and images == held):
        return f"it reports results on {short(images)} images, and it enrolled with {held}"
    wrong = next((name for name, value in numbers.items() if not _is_possible(name, value, held)), None)
    return numbers if wrong is None else f"it reports {numbers[wrong]:.6g} as {wrong}, which cannot be"


def _is_possible(name: str, value: float, held: int) -> bool:
    """Whether a number can be a site's result, or a constant of one, on its held-out images."""
    kind = name.rpartition("/")[2]
    if names_code(name) and not kind.endswith("accuracy"):  # the user's code gives names their meaning
        return -LARGEST <= value <= LARGEST
    if kind.endswith("test_images"):
        return value == held
    if kind.endswith(("images", "labels")):
        return is_count(value, 0)
    if kind.endswith("accuracy"):
        return 0 <= value <= 1
    least, most = {
        "uniformity": (-8.0, 0.0),  # −t ‖ĥ − ĥ'‖² for t = 2
        "alignment": (0.0, 4.0),
        "effective_rank": (0.0, held),
    }.get(kind, (-LARGEST, LARGEST))
    return least - ROUNDING <= value <= most + ROUNDING
