"""A round's own cost: 11 million weights, clients that do no work, cohorts of 10, 100 and 1,000.

    pip install pfl==0.6.0   # into an environment of its own: it needs an older accountant of privacy
    python benchmarks/no_work.py [--cohorts N …] [--systems bare atoll pfl flower] [--repeats N] [--json FILE]

Each client of a cohort gets the model and returns it without a step. ``bare`` is a mean in place and nothing else:
one model, one mean, a ``lerp_`` for each client. Atoll also checks each update, measures its geometry and writes a
checkpoint for each round; ``pfl`` (0.6) and Flower's FedAvg (on its simulation) do neither. Each system runs in a
process of its own, with one thread, by turns; the first round is a warm-up, and the median of all other rounds
counts. Memory is the peak resident size of that process; Flower's is not comparable, because Ray's processes share
memory, and with more than 100 clients it is not measured, because each of its rounds takes minutes. A peer that
cannot be imported is left out, and its error is recorded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

SETTINGS = (
    "data.source=synthetic", "data.image_size=32", "data.channels=3", "partition.kind=iid", "train.epochs=0",
    "method.name=fed_simclr", "model.encoder=resnet18", "model.projector_hidden=[]", "model.projector_dim=10",
    "evaluation.every=0", "evaluation.at_end=[]", "evaluation.map_points=0",
    "engine.workers=1", "engine.device=cpu", "engine.channels_last=false",
)  # fmt: skip


FLOWER = 100  # the largest cohort that Flower is measured with


def network() -> torch.nn.Module:
    from torchvision.models import resnet18

    model: torch.nn.Module = resnet18(num_classes=10)
    return model


def bare(cohort: int, rounds: int) -> list[float]:
    model = [tensor.detach() for tensor in network().state_dict().values() if tensor.is_floating_point()]
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        mean = [tensor.clone() for tensor in model]
        for client in range(1, cohort):
            for tensor, update in zip(mean, model, strict=True):
                tensor.lerp_(update, 1 / (client + 1))
        seconds.append(time.perf_counter() - started)
    return seconds


def atoll(cohort: int, rounds: int) -> list[float]:
    from atoll.commands.run import run_recipe
    from atoll.recipe.recipe import load_recipe
    from measured import Clock

    settings = [f"data.limit={2 * cohort}", "data.test_fraction=0", f"partition.clients={cohort}"]
    recipe = load_recipe("digits", [*SETTINGS, *settings, f"train.rounds={rounds}"])
    with tempfile.TemporaryDirectory() as folder:
        run_recipe(recipe, Path(folder) / "run", callback=(clock := Clock()))
    return clock.rounds


def pfl(cohort: int, rounds: int) -> list[float]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def loss(self, images: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.inner(images), labels)

        def metrics(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            return {}

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        times: ClassVar[list[float]] = []

        def after_central_iteration(self, *_: object, central_iteration: int) -> tuple[bool, Any]:
            self.times.append(time.perf_counter())
            return False, Metrics()

    trained = Network()
    central = torch.optim.SGD(trained.parameters(), 1.0)
    model = PyTorchModel(trained, torch.optim.SGD, central)
    data = [torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)]
    users = iter(range(10**9))
    training = FederatedDataset(lambda user: Dataset(raw_data=data), lambda: next(users))
    params = NNAlgorithmParams(
        central_num_iterations=rounds + 1,
        evaluation_frequency=10**9,
        train_cohort_size=cohort,
        val_cohort_size=0,
    )
    steps = NNTrainHyperParams(local_num_epochs=0, local_learning_rate=0.1, local_batch_size=2)
    backend = SimulatedBackend(training, training)
    FederatedAveraging().run(
        params, backend, model, steps, NNEvalHyperParams(local_batch_size=2), callbacks=[Clock()]
    )
    return [end - start for start, end in zip(Clock.times, Clock.times[1:], strict=False)]


def flower(cohort: int, rounds: int) -> list[float]:
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    import flower_fedavg

    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    server = ServerApp()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"

        @server.main()
        def main(grid: Any, context: Any) -> None:
            context.run_config = {"rounds": rounds, "out": str(out)}
            flower_fedavg.main(grid, context)

        resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, flower_fedavg.client, num_supernodes=cohort, backend_config=resources)
        found: list[float] = json.loads(out.read_text())
    return found


SYSTEMS: dict[str, Callable[[int, int], list[float]]] = {
    "bare": bare,
    "atoll": atoll,
    "pfl": pfl,
    "flower": flower,
}


def measure(system: str, cohort: int, rounds: int) -> dict[str, object]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--child", system, "--cohorts", str(cohort), "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(options: argparse.Namespace) -> dict[str, dict[str, dict[str, object]]]:
    """Measure all systems by turns, for each cohort."""
    found: dict[str, dict[str, dict[str, object]]] = {}
    for cohort in options.cohorts:
        rounds = options.rounds or max(3, min(6, 600 // cohort))
        systems = [system for system in options.systems if system != "flower" or cohort <= FLOWER]
        runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
        for _ in range(options.repeats):
            for system in systems:
                if not any("error" in run for run in runs[system]):
                    runs[system].append(measure(system, cohort, rounds))
        rows: dict[str, dict[str, object]] = {}
        for system, measured in runs.items():
            if any("error" in run for run in measured):
                rows[system] = {"error": measured[-1]["error"]}
                print(cohort, system, rows[system], flush=True)
                continue
            seconds = [second for run in measured for second in run["seconds"][1:]]
            middle = statistics.median(seconds)
            rows[system] = {
                "seconds": round(middle, 4),
                "times_bare": round(middle / rows["bare"]["seconds"], 2) if "bare" in rows else None,
                "fastest_and_slowest": [round(min(seconds), 4), round(max(seconds), 4)],
                "peak_mib": round(max(run["peak_mib"] for run in measured)),
            }
            print(cohort, system, rows[system], flush=True)
        found[str(cohort)] = rows
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=0, help="default: 6, fewer with large cohorts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        seconds = SYSTEMS[options.child](options.cohorts[0], options.rounds)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "peak_mib": peak}))
        return
    cohorts = table(options)
    from measured import write  # here, because it imports parts of Atoll, and a child measures its own memory

    peers = [name for name in ("pfl", "flwr") if importlib.util.find_spec(name)]
    write(options.json, {"cohorts": cohorts}, tuple(peers))


if __name__ == "__main__":
    main()
