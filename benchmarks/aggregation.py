"""Cost of aggregating ten ResNet-18 updates: the server's folds, compared with reading the updates once.

    python benchmarks/aggregation.py [--threads N …] [--json FILE]

All paths run in turns in one process, so that other load on the machine affects them equally; the best of the
repeats counts. "Read" sums every tensor of the ten updates. "Checked" paths first apply the server's update checks
(names, shapes, types, finite values, distance). The plain loop and Flower's `aggregate` check nothing. Memory is
the peak in addition to the updates, in models, including the current global model; each path is measured in a
separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import Aggregation, ServerState, Setting, UpdateGeometry
from atoll.components.training import TrainOptions
from atoll.core.tree import Tree, Weights, num_bytes
from atoll.engines.update_checks import UpdateChecks
from atoll.methods.ldawa import LDAWA, MDAWA
from atoll.methods.method import Method
from atoll.models import ModelOptions, build_encoder
from atoll.objectives.simclr import SimCLR
from measured import write

CLIENTS = 10
UNMEASURED = UpdateGeometry({}, {}, {}, {})  # FedAvg reads none
SAMPLES = [5000 + 37 * client for client in range(CLIENTS)]


def make_updates() -> tuple[Weights, list[Tree]]:
    """Make the global model, and ten updates at a small distance from it."""
    torch.manual_seed(0)
    encoder = build_encoder(ModelOptions(encoder="resnet18", stem="cifar"), channels=3, image_size=32)
    model = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    updates = []
    for samples in SAMPLES:
        moved = {
            name: tensor + 0.01 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor + 1
            for name, tensor in model.items()
        }
        updates.append(
            {"weights": moved, "parts": {}, "losses": {"loss": 1.0, "simclr": 1.0}, "samples": samples}
        )
    return model, updates


def make_paths(model: Weights, updates: list[Tree]) -> dict[str, Callable[[], object]]:
    """Make all measured paths, by name."""
    state: ServerState = {"models": {"global": model}, "parts": {}}
    setting = Setting(0, CLIENTS, (3, 32, 32), 0, 512, 512, TrainOptions(), ModelOptions())
    states = [update["weights"] for update in updates]

    def server(aggregation: Aggregation, checked: bool) -> Callable[[], object]:
        method = Method(objective=SimCLR(), aggregation=aggregation)
        declared = ("weights", "parts", "losses", *aggregation.statistics)
        sent: list[Any] = [{name: update[name] for name in declared} for update in updates]

        def fold() -> Tree:
            checks = UpdateChecks(method, setting, frozenset(model))
            opened = method.open(state, setting, 1)
            for client, update in enumerate(sent):
                verdict = checks.examine(update, state["models"]) if checked else UNMEASURED
                assert not isinstance(verdict, str), verdict
                opened.add(client, update, verdict)
            return opened.close()

        return fold

    def read() -> list[torch.Tensor]:
        return [tensor.sum() for weights in states for tensor in weights.values()]

    def plain() -> Weights:
        shares = [samples / sum(SAMPLES) for samples in SAMPLES]
        mean: Weights = copy.deepcopy(states[0])
        for name in mean:
            mean[name] = mean[name] * shares[0]
            for weights, share in zip(states[1:], shares[1:], strict=True):
                mean[name] += weights[name] * share
        return mean

    paths: dict[str, Callable[[], object]] = {
        "read": read,
        "fedavg": server(FedAvg(), checked=False),
        "fedavg, checked": server(FedAvg(), checked=True),
        "l_dawa, checked": server(LDAWA(), checked=True),
        "m_dawa, checked": server(MDAWA(), checked=True),
        "plain loop": plain,
    }
    with contextlib.suppress(ImportError):
        from flwr.server.strategy.aggregate import aggregate

        arrays = [[tensor.numpy() for tensor in weights.values()] for weights in states]
        paths["flower's aggregate"] = lambda: aggregate(list(zip(arrays, SAMPLES, strict=True)))
    return paths


def measure_memory(name: str) -> float:
    """Measure the peak memory of one path in addition to the updates, in models (Linux only)."""
    model, updates = make_updates()
    path = make_paths(model, updates)[name]
    torch.ones(2**20).sum()  # threads and their stacks
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    path()
    return 1 + (_status("VmHWM") - before) / num_bytes(model)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_time(repeats: int) -> dict[str, float]:
    """Measure the best time of each path in seconds."""
    paths = make_paths(*make_updates())
    best = dict.fromkeys(paths, float("inf"))
    for _ in range(repeats):
        for name, path in paths.items():
            started = time.perf_counter()
            result = path()
            best[name] = min(best[name], time.perf_counter() - started)
            del result
    return best


def compare(threads: int, repeats: int) -> dict[str, dict[str, float]]:
    """Measure the time and the memory of each path."""
    torch.set_num_threads(threads)
    seconds = measure_time(repeats)
    models = dict.fromkeys(seconds, float("nan"))
    if Path("/proc/self/clear_refs").exists():
        # Freed memory is returned to the system at once, so that no path reuses the memory of the preparations.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        for name in seconds:
            command = [sys.executable, __file__, "--threads", str(threads), "--memory-of", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            models[name] = float(done.stdout)
    return {
        name: {
            "milliseconds": round(1000 * seconds[name], 1),
            "times_read": round(seconds[name] / seconds["read"], 2),
            "times_fedavg_checked": round(seconds[name] / seconds["fedavg, checked"], 2),
            "memory_in_models": round(models[name], 2),
        }
        for name in seconds
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        torch.set_num_threads(options.threads[0])
        print(measure_memory(options.memory_of))
        return

    tables = {threads: compare(threads, options.repeats) for threads in options.threads}
    for threads, table in tables.items():
        print(f"ten ResNet-18 updates, {threads} thread(s), best of {options.repeats}")
        print(f"{'':20s} {'ms':>7s} {'× read':>7s} {'× FedAvg, checked':>18s} {'memory, models':>15s}")
        for name, row in table.items():
            print("{:20s} {:7.1f} {:7.2f} {:18.2f} {:15.2f}".format(name, *row.values()))
    write(options.json, {"by_threads": tables})


if __name__ == "__main__":
    main()
