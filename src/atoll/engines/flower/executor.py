"""A round over Flower: jobs out, updates in as they arrive, folded in client order."""

from __future__ import annotations

import logging
import reprlib
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from atoll.core.tree import Tree, load, save
from atoll.engines.flower.exchange import EVALUATE, TRAIN, Exchange, Lost, words
from atoll.engines.flower.site import digest_of
from atoll.engines.flower.site_registry import SiteRegistry
from atoll.engines.server import Job, Result
from atoll.engines.update_checks import is_count, is_number

log = logging.getLogger("flwr")


class RemoteStates:
    """What clients keep lies with them: the server knows which round's is valid, and no more."""

    def __init__(self) -> None:
        self.needed: dict[int, int] = {}

    def load(self, client: int, round: int) -> Tree:
        """Nothing: what a client keeps does not leave it."""
        return None

    def prune(self, valid: Mapping[int, int]) -> None:
        """Remember what clients may delete; they are told with their next job."""
        self.needed = dict(valid)

    def clear(self) -> None:
        """Nothing to do: a run that begins anew has a new name, and so new folders."""


class FlowerExecutor:
    """Runs jobs on the nodes of a registry.

    An answer that comes before its turn waits on disk, so that memory holds the update that is folded and the next,
    however many clients there are. A client that does not answer in time is lost for the round, and what it sends
    later is not read.

    Args:
        registry: which node speaks for which client.
        states: what clients may delete.
        scratch: a folder for early answers.
        deadline: seconds that a round may take.
        classes: the federation's.
        most_bytes: of an update (see `max_update_bytes`); None: no limit.
    """

    def __init__(
        self,
        registry: SiteRegistry,
        states: RemoteStates,
        scratch: Path,
        deadline: float,
        classes: Sequence[str],
        most_bytes: int | None = None,
    ) -> None:
        self._registry = registry
        self._states = states
        self._scratch = scratch
        self._deadline = deadline
        self._classes = list(classes)
        self._most_bytes = most_bytes
        self._agreed: dict[str, Tree] = {}
        self._digest = ""
        self._told: set[int] = set()

    def start(self, constants: Tree) -> None:
        """Settle what every client must know. It goes out with a client's first request, and stays on its disk."""
        self._agreed = {
            "recipe": self._registry.recipe,
            "clients": len(self._registry.clients),
            "classes": self._classes,
            "constants": constants,
        }
        digest = digest_of(self._agreed)
        if digest != self._digest:
            self._digest, self._told = digest, set()

    def run(
        self, jobs: Sequence[Job], progress: Callable[[int], None] | None
    ) -> Generator[Result, None, None]:
        """Results in the order of the jobs."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        requests = {
            job.client: {"message": job.message, "needed": self._states.needed.get(job.client, 0)}
            for job in jobs
        }
        waiting: dict[int, Result | Path] = {}
        turn = iter([job.client for job in jobs])
        current = next(turn, None)
        for client, answer in self.ask(TRAIN, requests):
            if progress is not None and not isinstance(answer, Lost) and "update" in answer:
                progress(self._registry.clients[client].train)
            waiting[client] = (
                self._put_aside(client, answer) if client != current else _result(client, answer)
            )
            while current in waiting:
                yield self._take_up(current, waiting.pop(current))
                current = next(turn, None)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def ask(
        self, kind: str, requests: Mapping[int, dict[str, Tree]]
    ) -> Generator[tuple[int, dict[str, Tree] | Lost], None, None]:
        """One request to each of some clients; the answers as they arrive, one each."""
        self._registry.refresh()
        most_bytes = self._most_bytes if kind == TRAIN else None
        exchange = Exchange(self._registry.grid, self._deadline, most_bytes)
        common = {"federation": self._registry.federation, "digest": self._digest}
        nodes = self._registry.connected()
        unprepared = set(requests) - self._told  # they lack what the run agreed on
        for client, request in requests.items():
            if client not in nodes:
                yield client, Lost("its site is not connected")
                continue
            agreed = {"agreed": self._agreed} if client in unprepared else {}
            exchange.send(client, nodes[client], kind, {**common, **request, **agreed})
        for client, answer in exchange.answers():
            if not isinstance(answer, Lost):
                self._told.add(client)
                if "unprepared" in answer and client not in unprepared:  # its disk was lost since
                    unprepared.add(client)
                    again = {**common, **requests[client], "agreed": self._agreed}
                    exchange.send(client, nodes[client], kind, again)
                    continue
            yield client, answer

    def name(self, client: int) -> str:
        """A client's site."""
        return self._registry.clients[client].name

    def close(self) -> None:
        """Nothing to stop: nodes are their sites' own."""

    def _put_aside(self, client: int, answer: dict[str, Tree] | Lost) -> Result | Path:
        result = _result(client, answer)
        if result.lost:
            return result
        path = self._scratch / f"{client}.safetensors"
        save(path, {"update": result.update})
        return path

    def _take_up(self, client: int, waiting: Result | Path) -> Result:
        if isinstance(waiting, Result):
            return waiting
        result = Result(client, load(waiting)["update"])
        waiting.unlink()
        return result


def _result(client: int, answer: dict[str, Tree] | Lost) -> Result:
    if isinstance(answer, Lost) or "update" not in answer:
        reset = not isinstance(answer, Lost) and answer.get("afresh") is True
        return Result(client, lost=_reason(answer), reset=reset)
    return Result(client, answer.pop("update"))  # out of the answer, which others hold until the next comes


def _reason(answer: dict[str, Tree] | Lost) -> str:
    """Why an answer is none."""
    if isinstance(answer, Lost):
        return answer.reason
    lost = answer.get("lost")
    return words(lost) if lost and isinstance(lost, str) else "its answer is none"


def measure_sites(
    executor: FlowerExecutor, requests: Mapping[int, dict[str, Tree]]
) -> dict[int, tuple[dict[str, float], int]]:
    """What sites measured, by client: numbers, and on how many images. Sites that do not answer are left out."""
    found = {}
    for client, answer in executor.ask(EVALUATE, requests):
        measured = _measured(answer)
        if isinstance(measured, str):
            log.warning("%s is left out of the evaluation: %s", executor.name(client), measured)
        elif measured[0]:
            found[client] = measured
    return dict(sorted(found.items()))


def _measured(answer: dict[str, Tree] | Lost) -> tuple[dict[str, float], int] | str:
    """A site's numbers and its held-out images, or why they cannot be used."""
    if isinstance(answer, Lost) or not isinstance(answer.get("results"), dict):
        return _reason(answer)
    results, images = answer["results"], answer.get("images")
    # What is not a protocol's, or cannot be averaged, has no place in a report.
    numbers = {name: value for name, value in results.items() if "/" in name and is_number(value)}
    if numbers and not is_count(images):
        return f"it says that it measured on {reprlib.repr(images)} images"
    return numbers, images or 0
