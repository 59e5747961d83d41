"""The ServerApp: what ``flwr run`` starts at the coordinator's. An entry point, like the ``atoll`` command."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from atoll.core.errors import UserError
from atoll.engines.federation import Federation
from atoll.engines.flower.engine import FlowerEngine, FlowerOptions
from atoll.engines.server import Record, Server, TooFewUpdatesError

log = logging.getLogger("flwr")
app = ServerApp()


class LogLines:
    """A line in Flower's log for each round."""

    def begin(self, federation: Federation, server: Server) -> None:
        """Before the first round that runs now."""
        self._rounds = federation.recipe.train.rounds
        self._names = federation.partition.names
        if server.round:
            log.info("going on after round %d of %d", server.round, self._rounds)

    def step(self, images: int) -> None:
        """Steps are not shown."""

    def round(self, record: Record, line: dict[str, Any]) -> None:
        """A round is complete."""
        loss = record.losses.get("loss")
        facts = f"round {record.round}/{self._rounds}: {record.clients} clients, {record.seconds:.1f} s"
        if loss is not None:
            facts += f", loss {loss:.4f}"
        if record.privacy:
            facts += ", ε = {epsilon:.3g} at δ = {delta:g}".format(**record.privacy)
        log.info(facts)
        for client, reason in {**record.refused, **record.lost}.items():
            name = self._names[int(client)]
            who = f"client {client}" + (f" ({name})" if name != client else "")
            log.warning("round %d went on without %s: %s", record.round, who, reason)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play a run, or go on with the one in its folder."""
    try:
        run_federation(grid, FlowerOptions.read(context.run_config))
    except (UserError, TooFewUpdatesError) as error:
        log.error("%s", error)
        raise


def run_federation(grid: Grid, options: FlowerOptions) -> Path:
    """Play a run on the grid's nodes; the folder that holds it."""
    # An entry point may look at the floors above.
    from atoll.commands.run import run_recipe
    from atoll.core.run_folder import Run, default_folder
    from atoll.recipe.recipe import load_recipe
    from atoll.report import write_report

    recipe = load_recipe(_find(options.recipe), _settings(options.set))
    folder = Path(options.out) if options.out else default_folder(recipe.name, recipe.seed)
    engine = FlowerEngine(grid, options, recipe.to_toml())
    run = run_recipe(recipe, folder, Run(folder).exists(), LogLines(), engine)
    report = write_report([run.folder], run.folder / "report.html")
    log.info("run: %s, report: %s", run.folder, report)
    return run.folder


def _settings(text: str) -> list[str]:
    """``key=value`` pairs; a value goes on to the next key, so that it may hold blanks."""
    return re.split(r"\s+(?=[\w.]+=)", text.strip()) if text.strip() else []


def _find(recipe: str) -> str:
    """A recipe's file in the app's folder, which Flower puts on Python's path; otherwise its name as it is."""
    folders = [Path(entry) for entry in sys.path if entry]
    return next((str(folder / recipe) for folder in folders if (folder / recipe).is_file()), recipe)
