"""What worker processes need before their first job, beside the import of PyTorch itself.

    python benchmarks/start.py [--turns N] [--json FILE]

Each turn is a process of its own with one thread. First the CPU seconds of each step of a worker: the imports
of PyTorch and Atoll, a recipe of 5,000 synthetic images and its federation, and a step of an optimiser; of all
steps after the imports that commands and Atoll's workers begin with (`atoll.engines.preload`); and of what
Atoll leaves out: PyTorch's compiler, which PyTorch's own optimisers import with their first step, and
torchvision. Then, on the clock, the time until N workers have done all that, and their memory: as forks, which
is what Atoll's workers are, and if each imports for itself. Last, a run's start: the main process does all that
too, as that of ``atoll run`` does, while what its workers are forks of imports PyTorch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from atoll.core.processes import process_context

STEPS = {
    "import torch": "import torch; torch.set_num_threads(1)",
    "import Atoll's worker": "import atoll.engines.worker_pool",
    "recipe and federation": (
        "from atoll.engines.federation import Federation; from atoll.recipe.recipe import load_recipe;"
        "Federation(load_recipe('digits', ['data.source=synthetic', 'data.limit=5000', 'data.image_size=32',"
        "'data.channels=3', 'partition.kind=iid']))"
    ),
    "first optimiser step": (
        "from atoll.core.optimizers import SGD;"
        "w = torch.zeros(3, requires_grad=True); w.sum().backward(); SGD([w], 0.1).step()"
    ),
}
LEFT_OUT = {"PyTorch's compiler": "import torch._dynamo", "torchvision": "import torchvision"}
PRELOADED = {"all of it, preloaded": "; ".join(["import atoll.engines.preload", *STEPS.values()])}
CHILD = """
import json, sys, time
names, found = json.loads(sys.argv[1]), {}
for name, code in names.items():
    before = time.process_time()
    exec(code)
    found[name] = time.process_time() - before
print(json.dumps(found))
"""


COUNTS = 1, 2, 8
CONTEXTS: dict[str, Callable[[], Any]] = {
    "forks": process_context,
    "each imports": lambda: multiprocessing.get_context("spawn"),
    "run": process_context,
}


def prepare() -> None:
    """Do what a process does before its first job."""
    names: dict[str, Any] = {}
    for code in STEPS.values():
        exec(code, names)


def work(connection: Connection) -> None:
    """Do what a worker does before its first job, and then wait."""
    prepare()
    connection.send(True)
    connection.recv()  # never comes: the main process ends, and with it this one


def start(way: str, count: int) -> dict[str, float]:
    """Start workers, and prepare this process too for a run.

    Returns:
        The seconds until all of them are ready, and their share of the machine's memory in MiB, with that of the
        process that they are forks of.
    """
    before = time.perf_counter()
    context: Any = CONTEXTS[way]() if count else None
    if way == "run":
        importlib.import_module("atoll.engines.preload")
        prepare()
    connections = []
    for _ in range(count):
        here, there = multiprocessing.Pipe()
        context.Process(target=work, args=(there,), daemon=True).start()
        there.close()
        connections.append(here)
    for connection in connections:
        connection.recv()
    seconds = time.perf_counter() - before
    memory = sum(process.memory_full_info().pss for process in psutil.Process().children(recursive=True))
    return {"seconds": round(seconds, 3), "mib": round(memory / 2**20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(start(*json.loads(options.child))))
        return
    rows: dict[str, list[float]] = {name: [] for name in (*STEPS, *PRELOADED, *LEFT_OUT)}
    starts = [(way, count) for count in COUNTS for way in CONTEXTS] + [("run", 0)]
    found: dict[str, dict[str, list[float]]] = {
        f"{way}, {count}": {"seconds": [], "mib": []} for way, count in starts
    }
    for _ in range(options.turns):
        for steps in ({**STEPS, **LEFT_OUT}, PRELOADED):
            for name, seconds in run("-c", CHILD, json.dumps(steps)).items():
                rows[name].append(round(seconds, 3))
        for way, count in starts:
            for unit, value in run(__file__, "--child", json.dumps([way, count])).items():
                found[f"{way}, {count}"][unit].append(value)
    for name, turns in rows.items():
        print(f"{name:24} {statistics.median(turns):.2f} s ({min(turns):.2f} to {max(turns):.2f})")
    for name, values in found.items():
        taken, mib = values["seconds"], statistics.median(values["mib"])
        print(f"{name:24} {statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f}), {mib} MiB")
    from measured import write  # imports PyTorch, which the processes that are timed start without

    write(options.json, {"cpu_seconds": rows, "processes": found})


def run(*arguments: str) -> dict[str, float]:
    """Run Python with one thread; the object that its last line is."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True, env=one_thread
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
