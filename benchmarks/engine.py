"""The engine's share of training: federated runs, compared with bare PyTorch loops; and memory by clients.

    ATOLL_DATA=… python benchmarks/engine.py [--repeats N] [--json FILE]

A bare loop is one model in a process of its own, without clients, copies, folds, checks and checkpoints: the same
batches, views, network, loss and optimiser. Two kinds of it are measured: with the memory that the C library keeps
by default, and with as much as Atoll's processes keep (`atoll.core.allocator`). With two workers, two such loops
train half of the clients each. All run by turns, each with one thread; the first round is a warm-up, and the
seconds of the other rounds count. Memory is the peak resident size of a process that simulates 1,000 clients,
beside one with 10, with the same cohort.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from atoll.commands.run import run_recipe
from atoll.core.allocator import keep_freed_memory
from atoll.core.rng import stream
from atoll.engines.federation import Federation
from atoll.recipe.recipe import Recipe, load_recipe
from measured import Clock, write

QUIET = (
    "evaluation.every=0", "evaluation.at_end=[]", "evaluation.map_points=0", "engine.device=cpu",
    "partition.kind=iid",
)  # fmt: skip
WORKLOADS: dict[str, tuple[str, tuple[str, ...]]] = {
    "SimCLR, narrow ResNet, K = 10": (
        "cifar10-cpu", ("method.name=fed_simclr", "data.limit=2500", "train.rounds=4", "train.epochs=1"),
    ),
    "cross-entropy, FedQuad's CNN, K = 100, cohort of 10": (
        "fedquad-paper",
        (
            "method.name=fed_sl", "data.limit=5000", "partition.clients=100", "train.participation=0.1",
            "train.rounds=5", "train.epochs=1", "train.batch_size=25",
        ),
    ),
}  # fmt: skip
MEMORY = (
    "method.name=fed_simclr",
    "data.limit=50000",
    "train.rounds=2",
    "train.epochs=1",
    "engine.workers=1",
)


def recipe_of(workload: str, workers: int) -> Recipe:
    """The recipe of a workload."""
    base, settings = WORKLOADS[workload]
    return load_recipe(base, [*settings, *QUIET, f"engine.workers={workers}"])


def federated(workload: str, workers: int) -> float:
    """Seconds of the rounds after the first, with checks, checkpoints and metrics."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        run_recipe(recipe_of(workload, workers), Path(folder) / "run", callback=clock)
    return sum(clock.rounds[1:])


def bare(workload: str, part: int, parts: int, keeps: bool) -> float:
    """Seconds of the rounds after the first of a plain loop over one of several parts of the cohort."""
    if keeps:
        keep_freed_memory()
    recipe = recipe_of(workload, 1)
    federation = Federation(recipe)
    train, networks = recipe.train, federation.networks.train()
    loss_of = cross_entropy if recipe.composed.objective.name == "cross_entropy" else contrast
    cohort = federation.setting.cohort_size
    draws, ends = stream(0, "bench"), []
    for number in range(train.rounds):
        first = number * cohort % len(federation.partition.clients)
        for indices in federation.partition.clients[first : first + cohort][part::parts]:
            optimizer = optimizer_of(recipe, networks)
            for rows in batches(indices, recipe, draws):
                optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(loss_of(federation, rows, draws))
                optimizer.step()
        ends.append(time.perf_counter())
    return ends[-1] - ends[0]


def batches(indices: torch.Tensor, recipe: Recipe, draws: torch.Generator) -> Iterator[torch.Tensor]:
    """The batches of a client's local epochs, of the sizes that the federated run has."""
    train = recipe.train
    for _ in range(train.epochs):
        for rows in torch.split(indices[torch.randperm(len(indices), generator=draws)], train.batch_size):
            if len(rows) >= (train.batch_size if train.drop_last else 2):
                yield rows


def optimizer_of(recipe: Recipe, networks: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimiser, from PyTorch."""
    train, weights = recipe.train, networks.parameters()
    if train.optimizer == "adam":
        return torch.optim.Adam(weights, train.lr, weight_decay=train.weight_decay)
    return torch.optim.SGD(weights, train.lr, train.momentum, weight_decay=train.weight_decay)


def contrast(federation: Federation, rows: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    """SimCLR's loss of a batch."""
    pixels, networks = federation.splits.train.images.gather(rows), federation.networks
    views = federation.views.make(pixels, [draws, draws])
    views = [view.contiguous(memory_format=federation.layout) for view in views]
    z = F.normalize(torch.cat([networks["projector"](networks["encoder"](view)) for view in views]))
    itself = torch.eye(len(z), dtype=torch.bool)
    return F.cross_entropy(
        (z @ z.T / 0.5).masked_fill(itself, -torch.inf), torch.arange(len(z)).roll(len(rows))
    )


def cross_entropy(federation: Federation, rows: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    """Cross-entropy of a batch."""
    images, networks = federation.splits.train, federation.networks
    assert images.labels is not None
    x = federation.views.plain(images.images.gather(rows)).contiguous(memory_format=federation.layout)
    return F.cross_entropy(networks["classifier"](networks["encoder"](x)), images.labels[rows])


def peak_mib(clients: int) -> float:
    """Peak resident size of this process, which simulates ``clients`` clients, ten of them in each round."""
    settings = [*MEMORY, *QUIET, f"partition.clients={clients}", f"train.participation={10 / clients}"]
    with tempfile.TemporaryDirectory() as folder:
        run_recipe(load_recipe("cifar10-cpu", settings), Path(folder) / "run")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


MEASURES: dict[str, Callable[..., float]] = {"federated": federated, "bare": bare, "peak_mib": peak_mib}


def in_processes(calls: Sequence[Sequence[Any]]) -> float:
    """Measure in processes of their own, which start together; the largest number."""
    commands = [[sys.executable, __file__, "--child", json.dumps(call)] for call in calls]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    found = [process.communicate()[0].split()[-1] for process in running]
    return max(map(float, found))


def compare(workload: str, workers: int, repeats: int) -> dict[str, Any]:
    """Time a workload's federated run and bare loops by turns."""
    calls: dict[str, Sequence[Sequence[Any]]] = {
        "federated": [("federated", workload, workers)],
        "bare": [("bare", workload, part, workers, False) for part in range(workers)],
        "bare_keeping_memory": [("bare", workload, part, workers, True) for part in range(workers)],
    }
    turns = [{name: in_processes(call) for name, call in calls.items()} for _ in range(repeats)]
    found: dict[str, Any] = {}
    for name in ("bare", "bare_keeping_memory"):
        ratios = [turn["federated"] / turn[name] for turn in turns]
        found[f"times_{name}"] = round(statistics.median(ratios), 3)
        found[f"times_{name}_by_turn"] = [round(ratio, 3) for ratio in ratios]
    return found | {f"{name}_seconds": [round(turn[name], 3) for turn in turns] for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        name, *arguments = options.child
        print(MEASURES[name](*arguments))
        return
    times: dict[str, dict[str, Any]] = {}
    for workload in WORKLOADS:
        for workers in (1, 2):
            times.setdefault(workload, {})[str(workers)] = compare(workload, workers, options.repeats)
            print(f"{workload}, {workers} worker(s):", times[workload][str(workers)], flush=True)
    few, many = in_processes([("peak_mib", 10)]), in_processes([("peak_mib", 1000)])
    memory = {"peak_mib": {"10": round(few), "1000": round(many)}, "ratio": round(many / few, 3)}
    print("memory:", memory)
    write(options.json, {"times": times, "memory": memory})


if __name__ == "__main__":
    main()
