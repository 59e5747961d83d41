"""Overhead of the engine: a federated run, compared with a bare PyTorch loop over the same batches and views.

    ATOLL_DATA=… python benchmarks/engine.py [--json FILE]

Time: both train the same number of batches of the same size with the same views, network, loss and optimiser, in
turns, in one process with one worker; the ratio is that of the fastest times. Memory: peak resident size of a
process that simulates 1,000 clients, compared with one that simulates 10, with the same cohort, on CIFAR-10.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from atoll.commands.run import run_recipe
from atoll.components.training import make_optimizer
from atoll.core.rng import stream
from atoll.core.run_folder import Run
from atoll.engines.federation import Federation
from atoll.engines.rounds import RunContext
from atoll.engines.simulation import Simulation
from atoll.functional import nt_xent
from atoll.recipe.recipe import load_recipe
from measured import write

TIME = (
    "method.name=fed_simclr", "data.limit=4000", "train.rounds=2", "train.epochs=1", "train.lr=0.05",
    "engine.workers=1", "engine.device=cpu", "partition.kind=iid", "evaluation.every=0",
)  # fmt: skip
MEMORY = (
    "method.name=fed_simclr", "data.limit=50000", "train.rounds=2", "train.epochs=1", "engine.workers=1",
    "partition.kind=iid", "evaluation.at_end=[]", "evaluation.map_points=0", "engine.device=cpu",
)  # fmt: skip


def federated(federation: Federation) -> float:
    """Time a run in seconds, with checkpoints and metrics, without evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        Simulation().run(RunContext(federation, Run(folder)))
        return time.perf_counter() - started


def bare(federation: Federation) -> float:
    """Time a plain loop in seconds, without clients, server and files."""
    train = federation.recipe.train
    networks = federation.networks.train()
    images = federation.splits.train.images
    draws = stream(0, "bench")
    started = time.perf_counter()
    for _ in range(train.rounds * train.epochs):
        for indices in federation.partition.clients:
            optimizer = make_optimizer(train, networks.parameters())
            order = indices[torch.randperm(len(indices), generator=draws)]
            for rows in order.split(train.batch_size):
                if len(rows) < (train.batch_size if train.drop_last else 2):
                    continue
                pixels = images.gather(rows)
                views = [federation.views(pixels, draws) for _ in range(2)]
                if federation.recipe.engine.channels_last:
                    views = [view.contiguous(memory_format=torch.channels_last) for view in views]
                z1, z2 = (networks["projector"](networks["encoder"](view)) for view in views)
                loss = nt_xent(z1, z2)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
    return time.perf_counter() - started


def peak_mib(clients: int) -> float:
    """Measure the peak resident size of a process that simulates ``clients`` clients, ten of them in each round."""
    command = [sys.executable, __file__, "--child", str(clients)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def child(clients: int) -> None:
    """Run in this process, and print its peak resident size in MiB."""
    settings = [*MEMORY, f"partition.clients={clients}", f"train.participation={10 / clients}"]
    with tempfile.TemporaryDirectory() as folder:
        run_recipe(load_recipe("cifar10-cpu", settings), Path(folder) / "run")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    torch.set_num_threads(1)
    federation = Federation(load_recipe("cifar10-cpu", TIME))
    bare(federation)  # warm-up
    pairs = [(federated(federation), bare(federation)) for _ in range(options.repeats)]
    ours, plain = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    few, many = peak_mib(10), peak_mib(1000)
    results = {
        "federated_seconds": ours,
        "bare_seconds": plain,
        "overhead": ours / plain - 1,
        "overheads_pair_by_pair": [a / b - 1 for a, b in pairs],
        "peak_mib_10_clients": few,
        "peak_mib_1000_clients": many,
        "memory_ratio": many / few,
    }
    for name, value in results.items():
        print(name, value)
    write(options.json, {"results": results})


if __name__ == "__main__":
    main()
