"""Logs of a run for other tools: TensorBoard's event files, Weights & Biases, MLflow.

Each receives the recipe, the numbers of every round's metrics, and the final results. A resumed run continues
its log.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from atoll.core.config import describe, flatten
from atoll.core.errors import RunError, UserError, did_you_mean
from atoll.core.extras import missing, require
from atoll.core.metrics_lines import numbers
from atoll.core.run_folder import LOGS, Run
from atoll.core.text import error_words
from atoll.engines.callbacks import Callback
from atoll.engines.federation import Federation
from atoll.engines.record import Record
from atoll.engines.server import Server
from atoll.recipe.recipe import Recipe

FINAL = "final/"  # before the names of the finished encoder's results
GO_ON = "resume the run, which also continues this log, or goes on without it if you leave out --log"


class Log(Callback):
    """A callback that writes numbers to another tool.

    The run's folder keeps the id of the tool's run and the last round that was written, so that a resumed run
    continues with the next one.

    Args:
        run: The run's folder.
        recipe: The run's recipe.

    Attributes:
        tool: Name of the tool.
        identity: Id of the tool's run; empty if there is none yet.
        opened: Whether the tool's run is open.
    """

    tool = ""

    def __init__(self, run: Run, recipe: Recipe) -> None:
        self._run = run
        self._recipe = recipe
        self.identity = ""
        self.opened = False
        self._written = -1

    def open(self, rounds: int) -> None:
        """Open or continue the tool's run, which contains ``rounds`` lines of metrics, that of round 0 included."""
        raise NotImplementedError

    def write(self, values: Mapping[str, float], round: int) -> None:
        """Write numbers by name."""
        raise NotImplementedError

    def close(self, finished: bool) -> None:
        """Close the tool's run."""

    def begin(self, federation: Federation, server: Server) -> None:
        """Open the log."""
        saved = self._saved().get(self.tool, {"id": "", "round": -1})
        self.identity, self._written = saved["id"], min(saved["round"], server.round)
        with self._named(UserError, "check its settings"):
            self.open(self._written + 1)
        self.opened = True
        self._save()

    def round(self, record: Record, line: dict[str, Any]) -> None:
        """Write a round's line, and those before it that no hook received, such as the untrained encoder's."""
        if self._written + 1 < record.round:
            self._write_rounds(record.round - 1, self._run.metrics)
        self._write_rounds(record.round, [line])

    def end(self, run: Run) -> None:
        """Write the final results."""
        last = run.results["round"]  # early stopping may have ended it before the last one of the recipe
        self._write_rounds(last, self._run.metrics)
        final = {f"{FINAL}{name}": value for name, value in numbers(run.results).items() if name != "round"}
        with self._named(RunError, GO_ON):
            self.write(final, last)

    def _write_rounds(self, last: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines up to a round that are not written yet."""
        for line in lines:
            if self._written < line["round"] <= last:
                values = {name: value for name, value in numbers(line).items() if name != "round"}
                with self._named(RunError, GO_ON):
                    self.write(values, line["round"])
                self._written = line["round"]
        self._save()

    @contextmanager
    def _named(self, kind: type[Exception], remedy: str) -> Iterator[None]:
        """Give what the tool raises, which may be any exception, the tool's name and a remedy."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise kind(f"--log {self.tool} failed: {error_words(error)}; {remedy}") from error

    def _saved(self) -> dict[str, Any]:
        return self._run.read_json(LOGS) or {}

    def _save(self) -> None:
        state = {"id": self.identity, "round": self._written}
        self._run.write(LOGS, json.dumps({**self._saved(), self.tool: state}) + "\n")


class TensorBoardLog(Log):
    """Writes event files into the folder ``tensorboard`` of the run."""

    tool = "tensorboard"

    def open(self, rounds: int) -> None:
        """See `Log.open`."""
        require("tensorboard", "tensorboard", "--log tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        folder = str(self._run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=rounds or None)
        if not rounds:
            self._writer.add_text("recipe", f"```toml\n{self._recipe.to_toml()}```")

    def write(self, values: Mapping[str, float], round: int) -> None:
        """See `Log.write`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """See `Log.close`."""
        self._writer.close()


class WandbLog(Log):
    """Writes a run of Weights & Biases: into the run's folder ``wandb`` and, unless offline, to its service."""

    tool = "wandb"

    def open(self, rounds: int) -> None:
        """See `Log.open`."""
        wandb = require("wandb", "wandb", "--log wandb")
        self.identity = self.identity or uuid.uuid4().hex[:12]
        self._log = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "atoll"),
            id=self.identity,
            name=self._run.name,
            dir=str(self._run.folder),
            config=describe(self._recipe.completed()),
            resume="allow",
        )

    def write(self, values: Mapping[str, float], round: int) -> None:
        """See `Log.write`."""
        final = {name: value for name, value in values.items() if name.startswith(FINAL)}
        self._log.summary.update(final)
        if len(final) < len(values):
            self._log.log({name: value for name, value in values.items() if name not in final}, step=round)

    def close(self, finished: bool) -> None:
        """See `Log.close`."""
        self._log.finish(exit_code=0 if finished else 1)


class MlflowLog(Log):
    """Writes a run of MLflow, to ``MLFLOW_TRACKING_URI`` or MLflow's local store."""

    tool = "mlflow"

    def open(self, rounds: int) -> None:
        """See `Log.open`."""
        self._mlflow = require("mlflow", "mlflow", "--log mlflow")
        self._client = self._mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "atoll")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        if self.identity:
            self._client.update_run(self.identity, status="RUNNING")
            return
        made = self._client.create_run(experiment, run_name=self._run.name)
        self.identity = made.info.run_id
        settings = flatten(describe(self._recipe.completed()))
        entities = self._mlflow.entities
        params = [entities.Param(key, str(value)[:500]) for key, value in settings.items()]
        for start in range(0, len(params), 100):  # MLflow's limit of a batch
            self._client.log_batch(self.identity, params=params[start : start + 100])

    def write(self, values: Mapping[str, float], round: int) -> None:
        """See `Log.write`."""
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        rows = [metric(name, float(value), now, round) for name, value in values.items()]
        for start in range(0, len(rows), 500):
            self._client.log_batch(self.identity, metrics=rows[start : start + 500])

    def close(self, finished: bool) -> None:
        """See `Log.close`."""
        self._client.set_terminated(self.identity, status="FINISHED" if finished else "FAILED")


TOOLS: dict[str, type[Log]] = {"tensorboard": TensorBoardLog, "wandb": WandbLog, "mlflow": MlflowLog}


def check_logs(tools: Sequence[str]) -> None:
    """Check the names of tools, before anything is trained; see `TOOLS`.

    Raises:
        UserError: There is no such tool, or its library is not installed.
    """
    for tool in tools:
        if str(tool) not in TOOLS:  # Python's callers may pass anything
            raise UserError(f"--log {tool}: no such tool; {did_you_mean(str(tool), TOOLS)}")
        if sentence := missing(tool, tool, f"--log {tool}"):
            raise UserError(sentence)


@contextmanager
def opened_logs(tools: Sequence[str], run: Run, recipe: Recipe) -> Iterator[list[Log]]:
    """Make the logs of a run, and close those that were opened after the block."""
    logs = [TOOLS[tool](run, recipe) for tool in dict.fromkeys(tools)]
    finished = False
    try:
        yield logs
        finished = True
    finally:
        for log in logs:
            if log.opened:
                log.close(finished)
