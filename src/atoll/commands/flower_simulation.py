"""``atoll run --engine flower-sim``: a run on Flower's simulation, on this machine or on those of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.commands.resume import NOTHING, Recovery
from atoll.commands.run import run_recipe
from atoll.core import run_folder
from atoll.core.run_names import default_folder
from atoll.engines.callbacks import Callback
from atoll.engines.flower import require_simulation
from atoll.recipe.recipe import Recipe

ATTEMPTS = 3  # at a round; more nodes than two do not die in it without a reason that the user should read


def run_on_flower(
    recipe: Recipe,
    out: Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    recovery: Recovery = NOTHING,
    log: Sequence[str] = (),
    address: str = "",
    say: Callable[[str], None] = print,
) -> run_folder.Run:
    """Run a recipe on Flower's simulation; its weights are those of any other engine.

    If a node dies, the run continues from its last complete round on those that are left.

    Args:
        recipe: The recipe.
        out: The run's folder; None for ``runs/NAME-seedN``.
        resume: Whether to continue the run in the folder.
        callback: Follows the run.
        recovery: What the user allows beyond a plain continuation.
        log: Tools that follow the run (`atoll.commands.logs`).
        address: Address of a Ray cluster, of which this machine is a part; empty for this machine alone.
        say: Receives a sentence about each node that died.

    Returns:
        The finished run.

    Raises:
        UserError: The recipe, the data or the folder is invalid, Flower or Ray is not installed, or there is no
            cluster.
        NodeLostError: Nodes died in three attempts at a round.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # nothing is reported unless the user asks for it
    require_simulation()
    from atoll.engines.flower.executor import NodeLostError
    from atoll.engines.flower.simulation import FlowerSimulation

    folder = out or default_folder(recipe.name, recipe.seed)
    rounds = run_folder.Run(folder).completed_rounds
    failures = [rounds()]
    while True:
        try:
            with FlowerSimulation(address) as engine:
                return run_recipe(recipe, folder, resume, callback, engine, recovery, log)
        except NodeLostError as error:
            failures.append(rounds())
            if failures[-ATTEMPTS:] == [rounds()] * ATTEMPTS:
                raise
            say(f"{error}; the run continues on the nodes that are left")
            # Clients are reset until a round has used it.
            reset = recovery.reset_clients if failures[-1] == failures[-2] else ()
        resume, recovery = True, replace(recovery, restart=False, reset_clients=reset)
