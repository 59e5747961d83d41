"""``atoll bench``: recommends threads, memory layout, recording and compilation for a recipe on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import torch
from rich.markup import escape
from rich.table import Table

from atoll.commands.egress import stand_ins
from atoll.core.errors import UserError
from atoll.core.processes import num_cores
from atoll.core.threads import threads
from atoll.data.batch import Batch, ClientData
from atoll.data.client_data import FederatedClient
from atoll.engines.client import train_client
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.engines.step_graphs import LEAST
from atoll.recipe.recipe import Recipe

WARM, TIMED = 3, 12  # steps
MARGIN = 1.05  # how much faster compiled steps have to be


def recommend(recipe: Recipe, warm: int = WARM, timed: int = TIMED) -> Table:
    """Time a client's training step for each number of threads and each memory layout; the fastest further ways.

    The fastest is also recorded, on a GPU, and compiled. A GPU's steps are started by one thread.

    Args:
        recipe: The recipe whose training steps are timed.
        warm: Number of first steps that are not timed.
        timed: Number of timed steps, of which the fastest counts.
    """
    gpu, cores = recipe.engine.find_device().type == "cuda", num_cores()
    ways = ("threads", "channels_last", *(("cuda_graphs",) if gpu else ()), "compile")
    table = Table(*ways, "ms a step", "images/s a worker", "images/s all cores")
    best = (0.0, Way(1, False))

    def measure(way: Way) -> int:
        nonlocal best
        seconds, images = time_step(way.of(recipe), warm, timed)
        together = images / seconds * max(1, cores // way.threads)
        # Each run has to compile first.
        best = max(best, (together / MARGIN if way.compile else together, way))
        table.add_row(
            *(str(getattr(way, name)).lower() for name in ways),
            f"{1000 * seconds:.1f}",
            f"{images / seconds:,.0f}",
            f"{together:,.0f}",
        )
        return images

    for count in (1,) if gpu else sorted({1, max(1, cores // 2), cores}):
        for channels_last in (False, True):
            images = measure(Way(count, channels_last))
    note = ""
    if images < recipe.train.batch_size:
        note = "full batches alone are recorded or compiled, and no client has that many images\n"
    else:
        for option in ways[2:]:
            try:
                measure(replace(best[1], **{option: True}))
            except UserError as error:
                note += f"{escape(str(error))}\n"
    graphs = f" train.cuda_graphs={str(best[1].cuda_graphs).lower()}" if gpu else ""
    # Clients that train at once in one process need that process alone; how many may share a GPU is not timed.
    alone = gpu or recipe.engine.at_once > 1
    workers = "" if alone else f" engine.workers={max(1, cores // best[1].threads)}"
    slowed = "the last column assumes that workers do not slow each other"
    table.caption = f"{note}fastest here: {best[1]}{graphs}{workers}; {slowed}"
    return table


@dataclass(frozen=True, order=True)
class Way:
    """A way to compute a step, by the recipe's options of these names."""

    threads: int
    channels_last: bool
    compile: bool = False
    cuda_graphs: bool = False

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with these options."""
        engine = replace(recipe.engine, threads=self.threads, channels_last=self.channels_last)
        train = replace(recipe.train, compile=self.compile, cuda_graphs=self.cuda_graphs)
        return replace(recipe, engine=engine, train=train)

    def __str__(self) -> str:
        return (
            f"engine.threads={self.threads} engine.channels_last={str(self.channels_last).lower()} "
            f"train.compile={str(self.compile).lower()}"
        )


def time_step(recipe: Recipe, warm: int = WARM, timed: int = TIMED) -> tuple[float, int]:
    """Time the fastest training step of the largest client in seconds, and count the images of a step.

    The steps are those of `train_client` in round 1. Stand-ins on noise replace prerequisite runs.

    Raises:
        UserError: The recipe is invalid, or asks for recorded steps and the client takes too few.
    """
    steps = warm + timed
    with threads(recipe.engine.threads):
        federation = Federation(recipe)
        method, setting = federation.recipe.composed, federation.setting
        prerequisites = stand_ins(federation, recipe.train.batch_size)
        server = Server(federation.recipe, setting, federation.initial_weights(), prerequisites)
        cohort = largest_cohort(federation)
        largest = cohort[0]
        message = method.send(server.state, setting, largest, cohort, 1)
        epochs, data = message["epochs"], federation.client_data(largest)
        a_round = epochs * data.num_batches()
        if recipe.train.cuda_graphs and a_round < LEAST:
            raise UserError(
                f"train.cuda_graphs records the steps of clients that take {LEAST} or more a round; "
                f"here they take {a_round}"
            )
        message["epochs"] = steps  # enough: each epoch has a batch of the full size
        watch = Stopwatch(steps, federation.device)
        client = federation.client_side(server.constants)
        with suppress(Enough):
            train_client(client, message, None, watch.over(data, epochs), watch)
    return watch.step_seconds(warm, min), watch.images


def largest_cohort(federation: Federation) -> list[int]:
    """The largest clients, the largest first, as many as take part in a round: a round's own draw may be empty."""
    setting = federation.setting
    return sorted(range(setting.num_clients), key=lambda client: -setting.sizes[client])[
        : setting.cohort_size
    ]


class Enough(Exception):  # noqa: N818
    """Stops the training when all steps are timed; not an error."""


class Stopwatch:
    """Times a client's steps on full batches, and the passes that make its batches, of which one makes several.

    It is the progress callback of a client's training, on the data that `over` returns.

    Args:
        steps: Number of steps on full batches after which the training stops.
        device: Device of the training.

    Attributes:
        seconds: Duration of each of these steps, without the making of its batch.
        images: Number of images of a full batch.
        making: Seconds an image of each pass.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.seconds: list[float] = []
        self.images = 0
        self.making: list[float] = []
        self._steps = steps
        self._device = device
        self._last = time.perf_counter()

    def over(self, data: FederatedClient, epochs: int) -> ClientData:
        """Return the data with timed batches, made as in rounds of so many epochs: short ones have small passes."""
        return cast(ClientData, _TimedData(data, self, max(1, epochs)))

    def step_seconds(self, warm: int, choose: Callable[[list[float]], float]) -> float:
        """Duration of a step on a full batch and of the batch's making, each chosen among those that are timed."""
        return choose(self.seconds[warm:]) + choose(self.making) * self.images

    def __call__(self, images: int) -> None:
        """Record a step of ``images`` images."""
        seconds = self.lap()
        if images >= self.images:
            self.images = images
            self.seconds.append(seconds)
        if len(self.seconds) == self._steps:
            raise Enough

    def lap(self) -> float:
        """Return the seconds since the last call."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        last, self._last = self._last, time.perf_counter()
        return self._last - last


class _TimedData:
    """A client's data, with timed batches."""

    def __init__(self, data: FederatedClient, watch: Stopwatch, epochs: int) -> None:
        self._data, self._watch, self._epochs = data, watch, epochs

    def __getattr__(self, name: str) -> object:
        return getattr(self._data, name)

    def batches(self, round: int, epochs: int, images: Sequence[str]) -> Iterator[Batch]:
        """Iterate over the batches of the round's epochs, again and again; see `FederatedClient.batches`."""
        together = self._data.batches_in_a_pass(images)
        next(self._data.batches(round, self._epochs, images))  # a first pass takes longer
        for start in range(0, epochs, self._epochs):
            batches = self._data.batches(round, min(self._epochs, epochs - start), images)
            self._watch.lap()
            while made := list(islice(batches, together)):
                self._watch.making.append(self._watch.lap() / sum(len(batch.indices) for batch in made))
                for batch in made:
                    yield batch
                    self._watch.lap()
