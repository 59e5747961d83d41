"""``atoll bench``: the threads and memory layout that suit a recipe on this machine; it only recommends."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch
from rich.table import Table

from atoll.core.threads import threads
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.recipe.recipe import Recipe

WARM, TIMED = 3, 12  # steps


def recommend(recipe: Recipe) -> Table:
    """Time training steps of one client for each number of threads and each memory layout."""
    table = Table("threads", "channels_last", "ms a step", "images/s a worker", "images/s all cores")
    cores = os.cpu_count() or 1
    best = (0.0, 1, False)
    for count in sorted({1, max(1, cores // 2), cores}):
        for channels_last in (False, True):
            engine = replace(recipe.engine, threads=count, channels_last=channels_last)
            seconds, images = _step(replace(recipe, engine=engine), count)
            together = images / seconds * max(1, cores // count)
            best = max(best, (together, count, channels_last))
            table.add_row(
                str(count),
                str(channels_last).lower(),
                f"{1000 * seconds:.1f}",
                f"{images / seconds:,.0f}",
                f"{together:,.0f}",
            )
    table.caption = (
        f"fastest here: engine.threads={best[1]} engine.channels_last={str(best[2]).lower()} "
        f"engine.workers={max(1, cores // best[1])}; the last column assumes that workers do not slow each other"
    )
    return table


def _step(recipe: Recipe, count: int) -> tuple[float, int]:
    """The least seconds of a step, and its images."""
    with threads(count), torch.random.fork_rng(devices=[]):
        federation = Federation(recipe)
        server = Server(federation.recipe, federation.setting, federation.initial_weights())
        client = federation.client_side(server.constants)
        largest = max(range(federation.setting.num_clients), key=lambda k: federation.setting.sizes[k])
        message = federation.recipe.composed.send(
            server.state, federation.setting, largest, server.cohort(1), 1
        )
        data = federation.client_data(largest)
        client.start(message, None, data)
        names = [forward.images for forward in client.method.forwards]
        times, images = [], 0
        began = time.perf_counter()
        for batch in data.batches(1, 1000, names):
            loss = client.step(batch)
            client.optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            client.optimizer.step()
            client.after_step()
            if len(batch.indices) >= images:
                images = len(batch.indices)
                times.append(time.perf_counter() - began)
            if len(times) == WARM + TIMED:
                break
            began = time.perf_counter()
    return min(times[WARM:]), images
