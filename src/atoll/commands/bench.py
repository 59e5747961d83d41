"""``atoll bench``: recommends threads, memory layout and compilation for a recipe on this machine."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

import torch
from rich.markup import escape
from rich.table import Table

from atoll.commands.egress import stand_ins
from atoll.core.errors import UserError
from atoll.core.processes import num_cores
from atoll.core.threads import threads
from atoll.engines.client import train_client
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.recipe.recipe import Recipe

WARM, TIMED = 3, 12  # steps
MARGIN = 1.05  # how much faster compiled steps have to be, because each run has to compile first


def recommend(recipe: Recipe, warm: int = WARM, timed: int = TIMED) -> Table:
    """Time a client's training step for each number of threads and each memory layout; the fastest also compiled.

    Args:
        recipe: The recipe whose training steps are timed.
        warm: Number of first steps that are not timed.
        timed: Number of timed steps, of which the fastest counts.
    """
    table = Table(
        "threads", "channels_last", "compile", "ms a step", "images/s a worker", "images/s all cores"
    )
    cores = num_cores()
    best = (0.0, 1, False, False)

    def measure(count: int, channels_last: bool, compile: bool) -> int:
        nonlocal best
        engine = replace(recipe.engine, threads=count, channels_last=channels_last)
        train = replace(recipe.train, compile=compile)
        seconds, images = time_step(replace(recipe, engine=engine, train=train), warm, timed)
        together = images / seconds * max(1, cores // count)
        worth = together / MARGIN if compile else together
        best = max(best, (worth, count, channels_last, compile))
        table.add_row(
            str(count),
            str(channels_last).lower(),
            str(compile).lower(),
            f"{1000 * seconds:.1f}",
            f"{images / seconds:,.0f}",
            f"{together:,.0f}",
        )
        return images

    for count in sorted({1, max(1, cores // 2), cores}):
        for channels_last in (False, True):
            images = measure(count, channels_last, False)
    note = ""
    if images < recipe.train.batch_size:
        note = "train.compile compiles full batches alone, and no client has that many images\n"
    else:
        try:
            measure(*best[1:3], True)
        except UserError as error:
            note = f"{escape(str(error))}\n"
    # Clients that train at once in one process need that process alone.
    workers = f" engine.workers={max(1, cores // best[1])}" if recipe.engine.at_once == 1 else ""
    table.caption = (
        f"{note}fastest here: engine.threads={best[1]} engine.channels_last={str(best[2]).lower()} "
        f"train.compile={str(best[3]).lower()}{workers}; "
        "the last column assumes that workers do not slow each other"
    )
    return table


def time_step(recipe: Recipe, warm: int = WARM, timed: int = TIMED) -> tuple[float, int]:
    """Time the fastest training step of the largest client in seconds, and count the images of a step.

    The steps are those of `train_client` in round 1. Stand-ins on noise replace prerequisite runs.
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
        message["epochs"] = steps  # enough: each epoch has a batch of the full size
        watch = Stopwatch(steps, federation.device)
        client, data = federation.client_side(server.constants), federation.client_data(largest)
        with suppress(Enough):
            train_client(client, message, None, data, watch)
    return min(watch.seconds[warm:]), watch.images


def largest_cohort(federation: Federation) -> list[int]:
    """The largest clients, the largest first, as many as take part in a round: a round's own draw may be empty."""
    setting = federation.setting
    return sorted(range(setting.num_clients), key=lambda client: -setting.sizes[client])[
        : setting.cohort_size
    ]


class Enough(Exception):  # noqa: N818
    """Stops the training when all steps are timed; not an error."""


class Stopwatch:
    """Progress callback of a client's training that records the duration of each step on a full batch."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.seconds: list[float] = []
        self.images = 0
        self._steps = steps
        self._device = device
        self._last = time.perf_counter()

    def __call__(self, images: int) -> None:
        """Record a step of ``images`` images."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if images >= self.images:
            self.images = images
            self.seconds.append(now - self._last)
        if len(self.seconds) == self._steps:
            raise Enough
        self._last = now
