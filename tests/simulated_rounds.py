"""Every method on the simulated GPU and on the CPU, an evaluation and a dry run.

python -m tests.simulated_rounds METHOD...     # one line of JSON a method
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.simulated_gpu import NAME, Device, install


def phases(client_type) -> list:
    """Patches by which a client's round tells its phase: a step runs from its loss to its last hook."""

    def told(name, before, method, after):
        def wrapped(*args, **kwargs):
            earlier, Device.phase = Device.phase, before
            Device.steps += name == "step"
            try:
                return method(*args, **kwargs)
            finally:
                Device.phase = after or earlier

        return wrapped

    table = [("start", "start", "data"), ("step", "step", "step"), ("after_step", "step", "data")]
    table += [("_end_epoch", "epoch", None), ("finish", "finish", "after")]
    return [
        patch.object(client_type, name, told(name, before, getattr(client_type, name), after))
        for name, before, after in table
    ]


def play(name: str, settings: list[str], on_device: bool) -> dict:
    """Two rounds of a method; its first loss, the final models, and what was noted."""
    from contextlib import ExitStack

    from atoll.components.base import Trained
    from atoll.data.images import DevicePixels
    from atoll.engines.client import Client
    from atoll.engines.client_states import ClientStates
    from atoll.engines.executors import InProcess
    from atoll.engines.federation import Federation
    from atoll.engines.server import Server
    from atoll.recipe.engine_options import EngineOptions
    from tests.harness import tiny

    recipe = tiny(*settings, f"method.name={name}")
    Device.notes, Device.phase, Device.steps = Counter(), "before", 0
    with ExitStack() as stack:
        if on_device:
            stack.enter_context(Device())
            device = torch.device(NAME, 0)
            stack.enter_context(patch.object(EngineOptions, "find_device", lambda self: device))
            for one in phases(Client):
                stack.enter_context(one)
        federation = Federation(recipe)
        trained = {
            needed: Trained(federation.initial_weights(), federation.splits.test.images)
            for needed in recipe.composed.prerequisites()
        }
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = Server(federation.recipe, federation.setting, federation.initial_weights(), trained)
        server.checks.names = frozenset(federation.update_names())
        executor = InProcess(federation, ClientStates(Path(folder)))
        executor.start(server.constants)
        for _ in range(recipe.train.rounds):
            server.run_round(executor)
        resident = isinstance(federation.placed_images.images, DevicePixels)
        return {"state": server.state, "notes": Device.notes, "steps": Device.steps, "resident": resident}


def evaluate() -> dict:
    """A whole run's evaluation, here and there, and where the device was read."""
    from atoll.commands.run import run_recipe
    from atoll.recipe.engine_options import EngineOptions
    from tests.harness import tiny

    protocols = ["knn", "probe", "probe-ssd", "probe-l-dawa", "finetune-10", "geometry"]
    settings = (f"evaluation.at_end={protocols}", "evaluation.max_epochs=4")
    recipe = tiny("method.name=fed_sl", "train.rounds=1", "data.limit=80", *settings)

    def results() -> dict:
        with tempfile.TemporaryDirectory() as folder:
            return run_recipe(recipe, Path(folder) / "run").read_json("evaluation.json")

    here = results()
    Device.notes, Device.phase = Counter(), "evaluation"
    device = torch.device(NAME, 0)
    with Device(), patch.object(EngineOptions, "find_device", lambda self: device):
        there = results()
    return {"here": here, "there": there, "notes": [what for _, what in Device.notes]}


def cost() -> dict:
    """The bytes that a dry run expects, here and there."""
    from atoll.commands.cost import estimate
    from atoll.recipe.engine_options import EngineOptions
    from tests.harness import tiny

    def expected() -> list[int]:
        (found,) = estimate(tiny("method.name=fed_byol"), warm=1, timed=1)
        return [found.up, found.down, found.states]

    here, device = expected(), torch.device(NAME, 0)
    with Device(), patch.object(EngineOptions, "find_device", lambda self: device):
        return {"here": here, "there": expected()}


def bare() -> dict:
    """Where the device was read in the loop that a federated round is compared with."""
    from atoll.commands.gpu_workloads import bare_round, synthetic_workload
    from atoll.recipe.engine_options import EngineOptions
    from tests.harness import tiny

    device = torch.device(NAME, 0)
    with Device(), patch.object(EngineOptions, "find_device", lambda self: device):
        work = synthetic_workload(tiny("method.name=fed_simclr"), (), torch.device("cpu"), 2, 3)
        Device.notes, Device.phase = Counter(), "bare"
        bare_round(work)
    return {"notes": dict(Counter(what.split(" (")[0] for _, what in Device.notes.elements()))}


def difference(a: Any, b: Any) -> float:
    """The largest difference of two trees' tensors."""
    from atoll.core.tree import leaves

    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel())


WHOLE = {"evaluation": evaluate, "cost": cost, "bare": bare}


def main(names: list[str]) -> None:
    """Play each method here and there."""
    from tests.test_simulated_gpu import settings_of

    torch.set_num_threads(1)
    install()
    for name in names:
        told = {"method": name}
        if name in WHOLE:
            print(json.dumps(told | WHOLE[name]()), flush=True)
            continue
        try:
            there, here = (play(name, settings_of(name), on) for on in (True, False))
            told["difference"] = difference(there["state"]["models"], here["state"]["models"])
            told["steps"] = there["steps"]
            told["resident"] = there["resident"]
            told["notes"] = {
                phase: {what: n for (p, what), n in sorted(there["notes"].items()) if p == phase}
                for phase in sorted({phase for phase, _ in there["notes"]})
            }
        except Exception:
            told["error"] = traceback.format_exc()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
