"""``--dry-run`` of ``atoll run`` and ``atoll federate init``: what a run will cost, from a few timed steps.

Nothing is written but decoded images, to the cache.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor

from atoll.commands.bench import Enough, Stopwatch, largest_cohort
from atoll.commands.egress import stand_ins
from atoll.components.messages import Message, Update
from atoll.core.errors import UserError
from atoll.core.run_folder import RETAINED_ROUNDS
from atoll.core.text import byte_size
from atoll.core.threads import threads
from atoll.core.tree import map_tensors, num_bytes
from atoll.data.client_data import num_batches
from atoll.engines.client import Client, train_client
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.recipe.prerequisites import prerequisite_recipes
from atoll.recipe.recipe import Recipe
from atoll.report.wording import plural

WARM, TIMED = 2, 5  # steps


@dataclass(frozen=True)
class Cost:
    """What a run is expected to cost, without its evaluations.

    Attributes:
        name: Name of the recipe.
        rounds: Number of rounds.
        cohort: Clients in a round.
        clients: Number of clients.
        steps: Training steps of all clients in all rounds.
        step_seconds: Duration of a step: the median of the timed ones.
        switch_seconds: Duration of what a client costs beside its steps: load, return, check and fold its model.
        workers: Names of the devices of the worker processes.
        at_once: Clients that a process trains at once.
        memory: Peak bytes of one process after these steps.
        checkpoints: Bytes of the retained checkpoints.
        states: Bytes of the client states at the end.
        down: Bytes that a client receives in a round.
        up: Bytes that a client sends in a round.
        once: Bytes that a client receives once.
    """

    name: str
    rounds: int
    cohort: int
    clients: int
    steps: int
    step_seconds: float
    switch_seconds: float
    workers: tuple[str, ...]
    at_once: int
    memory: int
    checkpoints: int
    states: int
    down: int
    up: int
    once: int

    @property
    def seconds(self) -> float:
        """Expected duration, as if workers did not slow each other."""
        training = self.steps * self.step_seconds + self.rounds * self.cohort * self.switch_seconds
        return training / len(self.workers)

    def lines(self) -> Iterator[str]:
        """Describe the costs, a line each."""
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
        """Describe the costs of a federation of real sites of so many images each, a line each."""
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
    before = [
        cost for other in prerequisite_recipes(recipe).values() for cost in estimate(other, warm, timed)
    ]
    with threads(recipe.engine.threads):
        return [*before, _cost(recipe, warm, timed)]


def _cost(recipe: Recipe, warm: int, timed: int) -> Cost:
    federation = Federation(recipe)
    recipe, train, setting = federation.recipe, federation.recipe.train, federation.setting
    start, prerequisites = federation.initial_weights(), stand_ins(federation, recipe.train.batch_size)
    server = Server(recipe, setting, start, prerequisites)
    client = federation.client_side(server.constants)
    method, cohort = recipe.composed, largest_cohort(federation)
    largest = cohort[0]
    message = method.send(server.state, setting, largest, cohort, 1)
    batches = fmean(num_batches(samples, train.batch_size, train.drop_last) for samples in setting.sizes)
    epochs = sum(method.epochs(setting, largest, cohort, number) for number in range(1, train.rounds + 1))
    steps = round(epochs * len(cohort) * batches)
    seconds, update, retained = _timed_steps(federation, client, message, warm, timed)
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
        steps=steps,
        step_seconds=seconds if steps else 0.0,
        switch_seconds=_switch(federation, server, client, message),
        workers=tuple(map(str, recipe.engine.worker_devices(len(cohort)))),
        at_once=min(recipe.engine.at_once, len(cohort)),
        memory=_peak(federation.device),
        checkpoints=RETAINED_ROUNDS * num_bytes(server.checkpoint()),
        states=round(states * num_bytes(retained)),
        down=num_bytes(message),
        up=num_bytes(update),
        once=num_bytes(server.constants),
    )


def _timed_steps(
    federation: Federation, client: Client, message: Message, warm: int, timed: int
) -> tuple[float, Update, object]:
    """Time steps of a client; return their median, the update after them, and what the client retains."""
    watch = Stopwatch(warm + timed, federation.device)
    data = federation.client_data(message["client"])
    enough: Message = {**message, "epochs": warm + timed}
    with suppress(Enough):
        train_client(client, enough, None, data, watch)
    update, retained = client.finish()
    return median(watch.seconds[warm:]), update, retained


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
