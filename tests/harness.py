"""Small federations on real digits, for tests of whole runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType

from atoll.commands.run import run_recipe
from atoll.core.run_folder import Run
from atoll.core.tree import Tree, Weights, load
from atoll.engines.client_states import ClientStates
from atoll.engines.federation import Federation
from atoll.engines.rounds import RunContext
from atoll.engines.server import Server
from atoll.engines.simulation import Simulation
from atoll.recipe.recipe import Recipe, load_recipe

TINY = (
    "data.limit=160",
    "data.image_size=8",
    "partition.clients=4",
    "partition.kind=iid",
    "model.width=4",
    "model.stem=strided",
    "model.projector_hidden=[16]",
    "train.rounds=2",
    "train.epochs=1",
    "train.batch_size=20",
    "train.lr=0.05",
    "train.drop_last=false",
    "evaluation.every=0",
    "evaluation.at_end=['knn']",
    "evaluation.map_points=0",
    "engine.workers=1",
    "engine.channels_last=false",  # slower for so few channels
)
SSD = ("method.name=ssd", "train.rounds=3", "options.dsr.basis=random")  # what most whole runs add to it


def tiny(*settings: str) -> Recipe:
    """The digits preset cut down to a second's work, with settings laid over it."""
    return load_recipe("digits", [*TINY, *settings])


def run_tiny(folder: Path, *settings: str, resume: bool = False) -> Run:
    """Run it."""
    torch.set_num_threads(1)
    return run_recipe(tiny(*settings), folder, resume=resume)


def run_federation(federation: Federation, folder: Path, **context: Any) -> Server:
    """All rounds of a federation that is built already; the server that they end with."""
    return Simulation().run(RunContext(federation, Run(folder), **context))


def final_models(run: Run) -> dict[str, Weights]:
    """The server's models after the last round."""
    newest = max((run.folder / "checkpoints").glob("round-*.safetensors"))
    models: dict[str, Weights] = load(newest)["state"]["models"]
    return models


def remains(run: Run) -> Tree:
    """All that a run leaves but times: its encoders' bytes, the server's newest state and clients' own states."""
    checkpoint = run.latest()
    assert checkpoint is not None
    states = ClientStates(run.checkpoints / "clients")
    return {
        "encoders": {path.name: path.read_bytes() for path in run.folder.glob("encoder*.safetensors")},
        "server": {
            name: value for name, value in checkpoint.items() if name != "line"
        },  # which holds seconds
        "clients": {
            client: states.load(int(client), round)
            for client, round in checkpoint["valid"].items()
            if states.folder.exists()
        },
    }


def printed(*blocks: RenderableType, width: int = 200) -> str:
    """What a terminal of this width shows."""
    console = Console(width=width, file=io.StringIO())
    for block in blocks:
        console.print(block)
    return console.file.getvalue()
