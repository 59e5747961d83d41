"""``--dry-run`` of ``atoll run`` and ``atoll federate init``: what a run will cost, from a few timed steps.

Nothing is written but decoded images, to the cache.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.commands.noise import stand_ins
from atoll.commands.stopwatch import Enough, Stopwatch, largest_cohort
from atoll.components.messages import ClientState, Message, Update
from atoll.core.errors import UserError
from atoll.core.run_folder import RETAINED_ROUNDS
from atoll.core.text import byte_size, plural
from atoll.core.threads import threads
from atoll.core.tree import clone, map_tensors, num_bytes
from atoll.data.batch import ClientData
from atoll.data.client_data import num_batches
from atoll.engines.client import Client, train_client
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.engines.worker_devices import worker_devices
from atoll.recipe.prerequisites import prerequisite_recipes
from atoll.recipe.recipe import Recipe

WARM, TIMED = 2, 5  # steps
ROUNDS = 3  # the first one, and two later ones, since some methods gather in one round and train in the next


@dataclass(frozen=True)
class Cost:
    """What a run is expected to cost, without its evaluations.

    Attributes:
        name: Name of the recipe.
        rounds: Number of rounds.
        cohort: Clients in a round.
        clients: Number of clients.
        images: Number of their training images.
        steps: Training steps of all clients in all rounds.
        step_seconds: Duration of a step: the median of the timed ones.
        switch_seconds: Time that a client takes in addition to its steps: to load, return, check and fold its
            model.
        workers: Names of the devices of the worker processes.
        at_once: Clients that a process trains at once.
        memory: Peak bytes of one process after these steps.
        checkpoints: Bytes of the retained checkpoints.
        states: Bytes of the client states at the end.
        down: Bytes that a client receives in a round, on average over the rounds.
        up: Bytes that a client sends in a round, likewise.
        once: Bytes that a client receives once.
    """

    name: str
    rounds: int
    cohort: int
    clients: int
    images: int
    steps: int
    step_seconds: float
    switch_seconds: float
    workers: tuple[str, ...]
    at_once: int
    memory: int
    checkpoints: int
    states: int
    down: float
    up: float
    once: int

    @property
    def seconds(self) -> float:
        """Expected duration, as if workers did not slow each other."""
        training = self.steps * self.step_seconds + self.rounds * self.cohort * self.switch_seconds
        return training / len(self.workers)

    def lines(self) -> Iterator[str]:
        """Describe the costs, one per line."""
        yield (
            f"{self.name}: {plural(self.rounds, 'round')}, {self.cohort} of {plural(self.clients, 'client')} each, "
            f"{plural(self.steps, 'step')}"
        )
        yield (
            f"  time    {duration(self.seconds)} with {plural(len(self.workers), 'worker')} on "
            f"{', '.join(dict.fromkeys(self.workers))}: "
            f"{1000 * self.step_seconds:.1f} ms a step, {1000 * self.switch_seconds:.1f} ms a client beside its "
            "steps; evaluations come on top"
        )
        processes = len(self.workers) + (len(self.workers) > 1)
        many = f", {processes} processes" if processes > 1 else ""
        yield f"  memory  {byte_size(self.memory)} a process{many}; evaluations may need more"
        if self.at_once > 1:
            yield f"  at once {self.at_once} clients; time and memory above are those of one at a time"
        yield f"  disk    {byte_size(self.checkpoints)} of checkpoints, {byte_size(self.states)} of client states"
        yield self._traffic()

    def site_lines(self, images: int) -> Iterator[str]:
        """Describe the costs of a federation of real sites with ``images`` images each, one per line."""
        yield (
            f"{self.name}: {plural(self.rounds, 'round')}, {self.cohort} of {plural(self.clients, 'site')} each, "
            f"{plural(images, 'image')} at each"
        )
        each = duration(self.seconds / max(1, self.rounds))
        yield (
            f"  time    {each} of training a round, {duration(self.seconds)} in all, where a step takes "
            f"{1000 * self.step_seconds:.1f} ms, as on this machine; evaluations and the "
            "start of a process for each request come on top"
        )
        yield f"  memory  {byte_size(self.memory)} at a site"
        yield (
            f"  disk    {byte_size(self.checkpoints)} of checkpoints at the coordinator, "
            f"{byte_size(self.states / self.clients)} of state at a site"
        )
        yield self._traffic()

    def _traffic(self) -> str:
        took_part = self.rounds * self.cohort / self.clients
        total = self.once + took_part * (self.down + self.up)
        down, up, once, whole = map(byte_size, (self.down, self.up, self.once, total))
        return (
            f"  a site  {down} down and {up} up a round, {once} once; {whole} in the {took_part:.3g} "
            f"{'round' if took_part == 1 else 'rounds'} of an average site"
        )


def at_sites(recipe: Recipe, sites: int, images: int) -> Recipe:
    """A recipe's training at real sites, over synthetic images, so that its cost is known without theirs.

    Args:
        recipe: The recipe of the federation.
        sites: Number of sites.
        images: Number of training images at each.

    Raises:
        UserError: A number is below 1.
    """
    if sites < 1 or images < 1:
        raise UserError("--dry-run needs the number of --sites and of their --site-images, at least 1 each")
    data = replace(
        recipe.data,
        source="synthetic",
        path=None,
        limit=sites * images,
        test_fraction=0.0,
        validation_fraction=0.0,
    )
    partition = replace(recipe.partition, kind="iid", clients=sites, features="")
    return replace(recipe, data=data, partition=partition)


def estimate_at_sites(
    recipe: Recipe, sites: int, images: int, warm: int = WARM, timed: int = TIMED
) -> list[Cost]:
    """Estimate the costs of a federation of real sites, where each site of a round is a worker; see `at_sites`."""
    costs = estimate(at_sites(recipe, sites, images), warm, timed)
    return [replace(cost, workers=cost.workers[:1] * cost.cohort) for cost in costs]


def estimate(recipe: Recipe, warm: int = WARM, timed: int = TIMED) -> list[Cost]:
    """Estimate the costs of a run and of the runs that it needs first, which come first in the list.

    Args:
        recipe: The run's recipe.
        warm: Number of first steps that are not timed.
        timed: Number of timed steps.

    Raises:
        UserError: The recipe or the data is invalid.
    """
    needed = [estimate(other, warm, timed) for other in prerequisite_recipes(recipe).values()]
    images = max((costs[-1].images for costs in needed), default=0)
    with threads(recipe.engine.threads):
        return [*chain(*needed), _cost(recipe, images, warm, timed)]


def _cost(recipe: Recipe, images: int, warm: int, timed: int) -> Cost:
    """Estimate a run's own costs; ``images`` is the number of training images of the runs that it needs first."""
    federation = Federation(recipe)
    recipe, train, setting = federation.recipe, federation.recipe.train, federation.setting
    start, prerequisites = federation.initial_weights(), stand_ins(federation, images)
    server = Server(recipe, setting, start, prerequisites)
    client = federation.client_side(server.constants)
    method, cohort = recipe.composed, largest_cohort(federation)
    largest = cohort[0]
    message = method.send(server.state, setting, largest, cohort, 1)
    batches = fmean(num_batches(samples, train.batch_size, train.drop_last) for samples in setting.sizes)
    epochs = sum(method.epochs(setting, largest, cohort, number) for number in range(1, train.rounds + 1))
    steps = round(epochs * len(cohort) * batches)
    seconds, retained = _timed_steps(federation, client, message, warm, timed)
    traffic = _traffic(federation, server, client, cohort)
    # Clients are drawn independently in each round, so that some have not taken part at the end. A state is deleted
    # once two checkpoints name a later one: those since the last checkpoint but one remain, and one from before.
    share = len(cohort) / setting.num_clients
    since = min((train.rounds - 1) % recipe.engine.checkpoint_every + 1, train.rounds)
    states = setting.num_clients * (share * since + 1 - (1 - share) ** (train.rounds - since))
    return Cost(
        name=recipe.name,
        rounds=train.rounds,
        cohort=len(cohort),
        clients=setting.num_clients,
        images=sum(setting.sizes),
        steps=steps,
        step_seconds=seconds if steps else 0.0,
        switch_seconds=_switch(federation, server, client, message),
        workers=tuple(map(str, worker_devices(federation))),
        at_once=min(recipe.engine.at_once, len(cohort)),
        memory=_peak(federation.device),
        checkpoints=RETAINED_ROUNDS * num_bytes(server.checkpoint()),
        states=round(states * num_bytes(retained)),
        down=traffic.down,
        up=traffic.up,
        once=traffic.once,
    )


def _timed_steps(
    federation: Federation, client: Client, message: Message, warm: int, timed: int
) -> tuple[float, ClientState | None]:
    """Time steps of a client; return their median, and what the client retains after them."""
    watch = Stopwatch(warm + timed, federation.device)
    data = watch.over(federation.client_data(message["client"]), message["epochs"])
    # Enough epochs: each has a batch of the full size.
    longer: Message = {**message, "epochs": warm + timed}
    _, retained = _train(client, longer, None, data, watch)
    return watch.step_seconds(warm, median), retained


def _train(
    client: Client, message: Message, retained: ClientState | None, data: ClientData, watch: Stopwatch
) -> tuple[Update, ClientState | None]:
    """Train a client until the watch has seen enough; return its update and what it retains."""
    try:
        return train_client(client, message, retained, data, watch)
    except Enough:
        return client.finish()


class _Traffic(NamedTuple):
    """See `Cost`."""

    down: float
    up: float
    once: int


def _traffic(federation: Federation, server: Server, client: Client, cohort: list[int]) -> _Traffic:
    """Measure what a client receives and sends, in rounds of one step in which all clients send the same.

    The server's state afterwards is as large as that of later rounds.
    """
    method, setting, chosen = federation.recipe.composed, federation.setting, cohort[0]
    kept = None
    # A client that trains alone receives a model once, and does not once it has a state.
    first, later = (
        num_bytes(method.send(server.state, setting, chosen, cohort, 1, since)) for since in (0, 1)
    )
    down, up = [], []
    for number in range(1, ROUNDS + 1):
        message = method.send(server.state, setting, chosen, cohort, number, number - 1)
        watch = Stopwatch(1, federation.device)
        trained, retained = _train(client, message, kept, federation.client_data(chosen), watch)
        update, kept = map_tensors(Tensor.cpu, trained), clone(retained)  # as executors do
        down.append(num_bytes(message) if number > 1 else later)
        up.append(num_bytes(update))
        _fold(server, update, message, cohort)
    counts = _occurrences(federation.recipe.train.rounds)
    return _Traffic(fmean(down, counts), fmean(up, counts), num_bytes(server.constants) + first - later)


def _occurrences(rounds: int) -> list[int]:
    """How many of a run's rounds are like the first, the second and the third."""
    rounds = max(rounds, 1)
    return [1, rounds // 2, (rounds - 1) // 2]


def _fold(server: Server, update: Update, message: Message, cohort: list[int]) -> None:
    """End a round in which all clients sent this update; weights alone change no size, and few of them do."""
    method, state = server.recipe.composed, server.state
    sent = method.aggregation.sent(state["models"], message["client"])
    verdict = server.checks.examine(update, sent, message)
    if isinstance(verdict, str):
        return
    with tempfile.TemporaryDirectory() as scratch:
        fold = method.open(state, server.setting, message["round"], Path(scratch))
        for client in cohort if update["parts"] else cohort[: max(1, method.aggregation.least_updates)]:
            fold.add(client, update, verdict)
        server.state = fold.close()


def _switch(federation: Federation, server: Server, client: Client, message: Message) -> float:
    """Time a client without a step, from its message to the fold."""
    found = []
    idle: Message = {**message, "epochs": 0}
    with tempfile.TemporaryDirectory() as scratch:
        fold = server.recipe.composed.open(server.state, server.setting, 1, Path(scratch))
        for _ in range(2):  # the first one allocates memory
            started = time.perf_counter()
            trained, _ = train_client(client, idle, None, federation.client_data(message["client"]))
            update = map_tensors(Tensor.cpu, trained)  # as executors do
            verdict = server.checks.examine(update, message["models"], idle)
            if not isinstance(verdict, str):
                fold.add(message["client"], update, verdict)
            found.append(time.perf_counter() - started)
    return min(found)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource  # not on Windows
    except ImportError:
        raise UserError(
            "--dry-run measures memory with Python's module resource, which this system does not have; "
            "run a few rounds instead"
        ) from None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def duration(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> from atoll.commands.cost import duration
        >>> duration(0.034), duration(12.3), duration(600), duration(90_000)
        ('0.034 s', '12 s', '10 min', '25.0 h')
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
