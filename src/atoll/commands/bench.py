"""``atoll bench``: recommends threads, memory layout, recording and compilation for a recipe on this machine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from rich.markup import escape
from rich.table import Table

from atoll.commands.noise import stand_ins
from atoll.commands.stopwatch import Enough, Stopwatch, largest_cohort
from atoll.core.errors import UserError
from atoll.core.processes import num_cores
from atoll.core.threads import threads
from atoll.engines.client import train_client
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.engines.step_graphs import LEAST
from atoll.recipe.recipe import Recipe

WARM, TIMED = 3, 12  # steps
MARGIN = 1.05  # how much faster compiled steps have to be


def recommend(recipe: Recipe, warm: int = WARM, timed: int = TIMED) -> Table:
    """Time a client's training step for each number of threads and each memory layout.

    The fastest of them is also timed with compilation and, on a GPU, with recorded steps. A GPU's steps are started
    by one thread.

    Args:
        recipe: The recipe whose training steps are timed.
        warm: Number of first steps that are not timed.
        timed: Number of timed steps, of which the fastest counts.
    """
    gpu, cores = recipe.engine.find_device().type == "cuda", num_cores()
    ways = ("threads", "channels_last", *(("cuda_graphs",) if gpu else ()), "compile")
    table = Table(*ways, "ms a step", "images/s a worker", "images/s all cores")
    best = (0.0, Way(1, False))
    # Clients that train at once in one process need that process alone; how many may share a GPU is not timed.
    alone = gpu or recipe.engine.at_once > 1
    most = 1 if alone else len(largest_cohort(Federation(recipe)))

    def workers(way: Way) -> int:
        return max(1, min(cores // way.threads, most))

    def measure(way: Way) -> int:
        nonlocal best
        seconds, images = time_step(way.of(recipe), warm, timed)
        together = images / seconds * workers(way)
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
    shared = "" if alone else f" engine.workers={workers(best[1])}"
    slowed = "the last column assumes that workers do not slow each other"
    table.caption = f"{note}fastest here: {best[1]}{graphs}{shared}; {slowed}"
    return table


@dataclass(frozen=True, order=True)
class Way:
    """Options of the recipe that determine how a step is computed, but for rounding not its result.

    Attributes:
        threads: ``engine.threads``.
        channels_last: ``engine.channels_last``.
        compile: ``train.compile``.
        cuda_graphs: ``train.cuda_graphs``.
    """

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
