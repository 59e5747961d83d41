"""The ServerApp, which ``flwr run`` starts at the coordinator; an entry point, like the ``atoll`` command."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from atoll.commands.resume import Recovery
from atoll.commands.run import run_recipe
from atoll.core.errors import RunError, UserError
from atoll.core.files import private_files
from atoll.core.run_folder import Run
from atoll.core.run_names import default_folder
from atoll.core.text import plural
from atoll.engines.callbacks import Callback
from atoll.engines.federation import Federation
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.flower.engine import FlowerEngine
from atoll.engines.record import Record
from atoll.engines.server import Server
from atoll.recipe.recipe import load_recipe
from atoll.report import write_report

log = logging.getLogger("flwr")
IN_APP = {  # what takes the place of the options of `atoll run`, which a sentence may name
    "--out": "--out is 'out'",
    "--resume": "--resume is not needed, because a run in 'out' is continued",
    "--restart": "in place of --restart, choose another 'out'",
    "--other-environment": "--other-environment is 'other-environment = true'",
    "--set": "--set is 'set'",
}
app = ServerApp()


class LogLines(Callback):
    """Callback that writes a line to Flower's log for each round."""

    def begin(self, federation: Federation, server: Server) -> None:
        """Log the rounds that are already complete."""
        self._rounds = federation.recipe.train.rounds
        self._names = federation.partition.names
        if server.round:
            log.info("continuing after round %d of %d", server.round, self._rounds)

    def round(self, record: Record, line: dict[str, Any]) -> None:
        """Log a complete round."""
        loss = record.losses.get("loss")
        clients = plural(record.clients, "client")
        facts = f"round {record.round}/{self._rounds}: {clients}, {record.seconds:.1f} s"
        if loss is not None:
            facts += f", loss {loss:.4f}"
        if record.privacy:
            facts += ", ε = {epsilon:.3g} at δ = {delta:g}".format(**record.privacy)
        log.info(facts)
        for client, reason in {**record.refused, **record.lost}.items():
            name = self._names[int(client)]
            who = f"client {client}" + (f" ({name})" if name != client else "")
            log.warning("round %d continued without %s: %s", record.round, who, reason)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a recipe, or continue the run in its folder."""
    try:
        run_federation(grid, FlowerOptions.read(context.run_config))
    except (UserError, RunError) as error:
        log.error("%s", _for_app(str(error)))
        raise


def _for_app(sentence: str) -> str:
    """A sentence with the app's keys for the options that it names."""
    named = [words for option, words in IN_APP.items() if re.search(rf"{option}\b", sentence)]
    return f"{sentence} (in the app's pyproject.toml: {'; '.join(named)})" if named else sentence


def run_federation(grid: Grid, options: FlowerOptions) -> Path:
    """Run a recipe on the grid's nodes, and return the run's folder."""
    recipe = load_recipe(_find(options.recipe), _settings(options.set))
    folder = Path(options.out) if options.out else default_folder(recipe.name, recipe.seed)
    engine = FlowerEngine(grid, options, recipe.to_toml())
    recovery = Recovery(other_environment=options.other_environment)
    with private_files():
        run = run_recipe(
            recipe, folder, Run(folder).exists(), LogLines(), engine, recovery, options.log.split()
        )
        report = write_report([run.folder], run.folder / "report.html")
    log.info("run: %s, report: %s", run.folder, report)
    return run.folder


def _settings(text: str) -> list[str]:
    """Split ``key=value`` pairs; a value extends to the next key, so it may contain blanks, and tables."""
    settings: list[str] = []
    for part in re.split(r"\s+(?=[\w.-]+=)", text.strip()) if text.strip() else []:
        if settings and _is_open(settings[-1]):
            settings[-1] += f" {part}"
        else:
            settings.append(part)
    return settings


def _is_open(value: str) -> bool:
    """Whether a quote, a list or a table in a text is not closed."""
    rest = re.sub(r"\"[^\"]*\"|'[^']*'", "", value)
    return bool(set(rest) & set("\"'")) or sum(rest.count(c) for c in "[{") > sum(rest.count(c) for c in "]}")


def _find(recipe: str) -> str:
    """Find a recipe's file in the app's folder, which is on Python's path; otherwise return the name unchanged."""
    folders = [Path(entry) for entry in sys.path if entry]
    return next((str(folder / recipe) for folder in folders if (folder / recipe).is_file()), recipe)
