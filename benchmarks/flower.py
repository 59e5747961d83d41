"""Overhead per round in seconds: an 11-million-parameter ResNet-18, 4 clients, no local steps.

    python benchmarks/flower.py [--deployment] [--rounds N] [--json FILE]

Each client receives the model and returns it, so a round consists only of overhead. Measured are Atoll's engine
in one process, Atoll on Flower's simulation, and Flower's FedAvg on it; with --deployment also the latter two
between a SuperLink and four SuperNodes as processes on this machine, with TLS and node keys, where Flower starts a
process for each request. Atoll checks every update and writes a checkpoint each round; Flower's FedAvg does
neither. The first round is a warm-up; the median of the others counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atoll.commands.run import run_recipe
from atoll.recipe.recipe import Recipe, load_recipe
from measured import write

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

sys.path.append(str(Path(__file__).parents[1]))  # for the tests' deployment
CLIENTS = 4
SETTINGS = (
    "method.name=fed_align_uniform", "model.encoder=resnet18", "data.image_size=32", "data.channels=3",
    f"partition.clients={CLIENTS}", "partition.kind=iid", "train.epochs=0", "evaluation.every=0",
    "evaluation.at_end=['geometry']", "evaluation.map_points=0", "engine.workers=1", "engine.device=cpu",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deployment", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe("digits", [*SETTINGS, f"train.rounds={options.rounds}"])
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        os.environ |= {"FLWR_HOME": str(place / "flwr"), "ATOLL_STATE": str(place / "state")}
        with clock(place / "ours") as found["our engine"]:
            run_recipe(recipe, place / "ours")
        found["Atoll on Flower's simulation"] = simulate_ours(recipe, place)
        found["Flower's FedAvg on its simulation"] = simulate_fedavg(options.rounds, place)
        if options.deployment:
            found["Atoll on Flower's deployment"] = deploy(place / "a", options.rounds, ours=True)
            found["Flower's FedAvg on its deployment"] = deploy(place / "b", options.rounds, ours=False)
    medians = {name: statistics.median(values[1:]) for name, values in found.items()}
    for name, value in medians.items():
        print(f"{name:36} {value:7.2f} s a round")
    write(options.json, {"seed": 0, "median": medians, "rounds": found}, ("flwr",))


@contextmanager
def clock(folder: Path) -> Iterator[list[float]]:
    """Seconds between a run's lines of metrics: the complete duration of a round, with its checkpoint."""
    path, found, over = folder / "metrics.jsonl", [], threading.Event()

    def watch() -> None:
        lines, last = 0, time.perf_counter()
        while not over.is_set():
            now = time.perf_counter()
            if path.is_file() and (count := path.read_bytes().count(b"\n")) > lines:
                found.extend([now - last] if lines else [])  # the first line is of the untrained encoder
                lines, last = count, now
            time.sleep(0.005)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        time.sleep(0.05)
        over.set()
        thread.join()


def simulate(server: ServerApp, client: ClientApp) -> None:
    from flwr.simulation import run_simulation

    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=CLIENTS, backend_config=resources)


def simulate_ours(recipe: Recipe, place: Path) -> list[float]:
    from flwr.serverapp import ServerApp

    from atoll.commands.flower_server_app import run_federation
    from atoll.engines.flower.app_options import FlowerOptions
    from atoll.engines.flower.client_app import app

    (place / "recipe.toml").write_text(recipe.to_toml())
    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        run_federation(grid, FlowerOptions(recipe=str(place / "recipe.toml"), out=str(place / "simulated")))

    with clock(place / "simulated") as found:
        simulate(server, app)
    return found


def simulate_fedavg(rounds: int, place: Path) -> list[float]:
    from flwr.serverapp import ServerApp

    import flower_fedavg

    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        context.run_config = {"rounds": rounds, "out": str(place / "fedavg.json")}
        flower_fedavg.main(grid, context)

    simulate(server, flower_fedavg.client)
    found: list[float] = json.loads((place / "fedavg.json").read_text())
    return found


def deploy(place: Path, rounds: int, ours: bool) -> list[float]:
    from tests.engines.flower.deployment import SITES, Deployment, write_digits

    made = Deployment(place)
    write_digits(place / "images", each=20, held=4)
    out = place / "seconds.json"
    try:
        made.start_superlink()
        made.register(*SITES)
        for site in SITES:
            made.start_node(site)
        if ours:
            settings = ("data.source=clients", "data.path=nowhere", "partition.kind=natural")
            app = made.app(load_recipe("digits", [*SETTINGS, f"train.rounds={rounds}", *settings]))
            with clock(place / "run") as found:
                made.run(app)
                made.finish(900)
            return found
        made.run(fedavg_app(place / "app", rounds, out))
        made.wait_for(out.is_file, 900, "the end")
        seconds: list[float] = json.loads(out.read_text())
        return seconds
    finally:
        made.close()


def fedavg_app(folder: Path, rounds: int, out: Path) -> Path:
    folder.mkdir()
    source = Path(__file__).with_name("flower_fedavg.py").read_text()
    (folder / "flower_fedavg.py").write_text(source)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "fedavg"\nversion = "1.0.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "atoll"\n[tool.flwr.app.components]\n'
        'serverapp = "flower_fedavg:server"\nclientapp = "flower_fedavg:client"\n'
        f'[tool.flwr.app.config]\nrounds = {rounds}\nout = "{out}"\n'
    )
    return folder


if __name__ == "__main__":
    main()
