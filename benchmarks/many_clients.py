"""Many registered clients: start, memory and a round's own time with 1,000 to 100,000 clients, cohort 100.

    python benchmarks/many_clients.py [--clients 1000 10000 100000] [--rounds N] [--json FILE]

A million synthetic images, and clients that take no step, so that what is measured is all that a round does beside
training: with SimCLR, whose clients keep nothing, and with FedEMA and SCAFFOLD, whose clients keep a state on disk.
Each run has a process of its own. ``start`` is from the process's first line to the first round, ``partition`` the
CPU time of a partition of each kind, and ``files`` the number of files in the run's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter(), time.process_time()
IMAGES, COHORT = 1_000_000, 100
METHODS = {
    "fed_simclr": (),
    "fedema": (),
    "scaffold": ("train.optimizer=sgd", "train.momentum=0", "train.lr=0.05"),
}
SETTINGS = (
    "data.source=synthetic", f"data.limit={IMAGES}", "data.test_fraction=0", "data.image_size=8",
    "partition.kind=iid", "model.width=4", "model.stem=strided", "model.projector_hidden=[16]",
    "train.epochs=0", "evaluation.every=0", "evaluation.at_end=[]", "engine.workers=1", "engine.device=cpu",
)  # fmt: skip
PARTITIONS = (
    {"kind": "iid"},
    {"kind": "quantity", "alpha": 10.0},
    {"kind": "dirichlet", "variant": "fedu2", "alpha": 10.0},
    {"kind": "skew", "beta": 0.5},
    {"kind": "shards"},
)


def child(method: str, clients: int, rounds: int) -> dict[str, object]:
    """Run in this process."""
    import torch

    torch.set_num_threads(1)
    from atoll.commands.run import run_recipe
    from atoll.recipe.recipe import load_recipe
    from measured import Clock

    class Start(Clock):
        cpu_seconds = 0.0

        def begin(self, federation: object, server: object) -> None:
            super().begin(federation, server)
            self.cpu_seconds = time.process_time() - STARTED[1]

    settings = [f"partition.clients={clients}", f"train.participation={COHORT / clients}"]
    settings += [f"method.name={method}", f"train.rounds={rounds}", *METHODS[method]]
    clock = Start()
    with tempfile.TemporaryDirectory() as folder:
        run = run_recipe(load_recipe("digits", [*SETTINGS, *settings]), Path(folder) / "run", callback=clock)
        files = sum(path.is_file() for path in run.folder.rglob("*"))
    times = clock.rounds[1:]
    tenth = max(1, len(times) // 5)
    return {
        "start_seconds": round(clock.times[0] - STARTED[0], 2),
        "start_cpu_seconds": round(clock.cpu_seconds, 2),
        "round_seconds": round(statistics.median(times), 4),
        "first_and_last_rounds": [
            round(statistics.median(times[:tenth]), 4),
            round(statistics.median(times[-tenth:]), 4),
        ],
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "files": files,
    }


def partitions(clients: int) -> dict[str, float]:
    """CPU seconds of a partition of each kind."""
    import torch

    from atoll.data.options import PartitionOptions
    from atoll.data.partition.make import make_partition

    labels, found = torch.arange(IMAGES) % 10, {}
    for options in PARTITIONS:
        started = time.process_time()
        make_partition(PartitionOptions(clients=clients, min_size=1, **options), labels, {}, IMAGES, seed=0)
        found[str(options["kind"])] = round(time.process_time() - started, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.clients[0], options.rounds)))
        return
    found: dict[str, dict[str, Any]] = {}
    split = {}
    for clients in options.clients:
        for method in METHODS:
            command = [sys.executable, __file__, "--child", method, "--clients", str(clients)]
            command += ["--rounds", str(options.rounds)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            found.setdefault(method, {})[str(clients)] = json.loads(done.stdout.splitlines()[-1])
            print(method, clients, found[method][str(clients)], flush=True)
        split[str(clients)] = partitions(clients)
        print("partitions", clients, split[str(clients)], flush=True)
    import torch

    from measured import write  # both here, because a child measures its own memory

    torch.set_num_threads(1)
    write(options.json, {"runs": found, "partition_cpu_seconds": split})


if __name__ == "__main__":
    main()
