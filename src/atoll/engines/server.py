"""Server side of every engine: selects clients, sends models, accepts updates, and holds the server state."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from operator import index
from pathlib import Path
from statistics import fmean
from typing import cast

import torch

from atoll.aggregation.secure_sum import SecureSum, vector_size
from atoll.components.base import Component, Deployment, Setting, Trained
from atoll.components.messages import Checkpoint, ServerState, Slices, Update
from atoll.components.training import learning_rate
from atoll.core.errors import RunError, UserError
from atoll.core.process_state import seeded_streams
from atoll.core.remedies import RESTART
from atoll.core.rng import derive_seed, stream
from atoll.core.text import one_line
from atoll.core.tree import Weights, clone, marks, num_bytes
from atoll.engines.client import BASE
from atoll.engines.history import History
from atoll.engines.jobs import Executor, Job, SumExecutor
from atoll.engines.observer import Observer
from atoll.engines.record import Record
from atoll.engines.round_problems import too_few, warn_of_still
from atoll.engines.update_checks import WEIGHTS, UpdateChecks
from atoll.methods.round_fold import RoundFold
from atoll.recipe.recipe import Recipe


class TooFewUpdatesError(RunError):
    """A round ended with fewer usable updates than its recipe or aggregation requires; the model is unchanged."""


class Server:
    """State of the server, which runs one round at a time.

    Args:
        recipe: The run's recipe.
        setting: The run's setting.
        start: The initial model.
        prerequisites: Results of the prerequisite runs, by name.
        scratch: Folder of the disk buffer, for updates that do not fit in memory.
        observer: Keeps and measures the models of a round; None for neither.
    """

    def __init__(
        self,
        recipe: Recipe,
        setting: Setting,
        start: Weights,
        prerequisites: Mapping[str, Trained] | None = None,
        scratch: Path | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.recipe = recipe
        self.setting = setting
        self.round = 0
        self.valid: dict[int, int] = {}
        base = {name: start[name] for name in sorted(setting.base_names)}
        start = {name: weight for name, weight in start.items() if name not in base}
        with seeded_streams(self.seed(0)):
            self.constants = recipe.composed.constants(setting, prerequisites or {})
            self.state = recipe.composed.init(setting, start)
        if base:
            self.constants[BASE] = base
        names = frozenset(start) - setting.local_only
        self.checks = UpdateChecks(recipe.composed, setting, names)
        self._constants_sent: set[int] = set()
        self._missed = 0  # turns in a row
        self._scratch = scratch
        self._observer = observer

    def seed(self, round: int) -> int:
        """Seed of the process's random streams in a round; the user's code at the server may draw from these."""
        return derive_seed(self.recipe.seed, "server", round)

    def cohort(self, round: int) -> list[int]:
        """Return the clients of a round, in the order in which they were drawn.

        Raises:
            UserError: The aggregation's cohort is not a list of different clients.
        """
        aggregation = self.recipe.composed.aggregation
        if (prescribed := aggregation.cohort(self.setting, round)) is not None:
            return _clients(prescribed, self.setting.num_clients, f"{aggregation.name!r}.cohort")
        drawn = torch.randperm(self.setting.num_clients, generator=stream(self.recipe.seed, "cohort", round))
        return [int(client) for client in drawn[: self.setting.cohort_size]]

    def jobs(self, round: int) -> list[Job]:
        """Create the jobs of a round, in the order of client ids, which is the order of the fold."""
        cohort = self.cohort(round)
        method = self.recipe.composed
        sending = [
            component.name for component in method.components if type(component).send is not Component.send
        ]
        parts = self.state["parts"]
        copies: Slices = {}
        unchanged, jobs = None, []
        for client in sorted(cohort):
            if marks(copies) != unchanged:
                # `send` may change them, and the last round's checkpoint may not be written yet.
                copies = {name: clone(tree) for name, tree in parts.items() if name in sending}
                unchanged = marks(copies)
            state: ServerState = {**self.state, "parts": {**parts, **copies}}
            kept = self.valid.get(client, 0)
            jobs.append(Job(method.send(state, self.setting, client, cohort, round, kept)))
        return jobs

    def run_round(self, executor: Executor, progress: Callable[[int], None] | None = None) -> Record:
        """Run the next round.

        Raises:
            TooFewUpdatesError: Too few updates were usable; the state is unchanged. If clients take turns, the
                error is raised once this has happened in as many consecutive turns as a sweep has.
        """
        started = time.perf_counter()
        method = self.recipe.composed
        record = Record(self.round + 1)
        jobs = self.jobs(record.round)
        record.idle = bool(jobs) and not any(job.message["epochs"] for job in jobs)
        fold = method.open(self.state, self.setting, record.round, self._scratch)
        self.checks.open_round()
        if self._observer:
            self._observer.open(record.round)
        aggregation = method.aggregation
        if isinstance(aggregation, SecureSum) and isinstance(executor, SumExecutor):
            accepted = self._fold_total(executor, jobs, aggregation, fold, record)
        else:
            accepted = self._fold_updates(executor, jobs, fold, record, progress)
        share = self.recipe.train.min_accepted
        if jobs and len(accepted) < max(share * len(jobs), aggregation.least_updates):
            if self._missed + 1 >= aggregation.turns(self.setting):
                raise TooFewUpdatesError(too_few(record, len(accepted), len(jobs), share, aggregation))
            self._missed += 1
            self._drop_turn(record)
            accepted = []
        else:
            self._missed = 0
            self.state = fold.close()
        if self._observer:
            record.measures, record.layers = self._observer.close(self.state)
        self.checks.close_round()
        self.valid.update(dict.fromkeys(accepted, record.round))
        self.round = record.round
        record.clients = len(accepted)
        record.privacy = method.spent(self.setting, self.round)
        record.seconds = time.perf_counter() - started
        return record

    def _drop_turn(self, record: Record) -> None:
        """Leave the model unchanged, and remove the turn's few accepted updates from the record."""
        self.checks.open_round()
        record.losses, record.angular_divergence, record.idle = {}, None, True
        if self._observer:
            self._observer.open(record.round)

    def _fold_total(
        self,
        executor: SumExecutor,
        jobs: Sequence[Job],
        aggregation: SecureSum,
        fold: RoundFold,
        record: Record,
    ) -> list[int]:
        """Fold the sum of the clients' terms; return the clients in it."""
        size = vector_size(self.state["models"]["global"], self.setting)
        total = executor.total(jobs, aggregation, size, self.recipe.train.min_accepted * len(jobs))
        record.bytes_up = total.bytes_up
        record.bytes_down = sum(self._download(job) for job in jobs if job.client in total.sent)
        record.lost = {str(client): reason for client, reason in total.lost.items()}
        if total.numbers is not None:
            loss = fold.add_total(total.numbers, len(total.clients))
            record.losses |= {} if loss is None else {"loss": loss}
        return total.clients

    def _fold_updates(
        self,
        executor: Executor,
        jobs: Sequence[Job],
        fold: RoundFold,
        record: Record,
        progress: Callable[[int], None] | None,
    ) -> list[int]:
        """Check and fold the clients' updates; return the accepted clients."""
        method = self.recipe.composed
        accepted: list[int] = []
        cosines: list[float] = []
        changed: set[str] = set()  # weights that some client changed
        reported: Counter[str] = Counter()  # clients by the losses that they reported
        with closing(executor.run(jobs, progress)) as results:
            for job, result in zip(jobs, results, strict=True):
                record.bytes_down += self._download(job) if result.sent else 0
                if result.lost:
                    record.lost[str(job.client)] = result.lost
                    if result.reset:
                        self.valid.pop(job.client, None)
                    continue
                record.bytes_up += num_bytes(result.update)
                sent = method.aggregation.sent(self.state["models"], job.client)
                verdict = self.checks.examine(result.update, sent, job.message)
                if isinstance(verdict, str):
                    record.refused[str(job.client)] = one_line(verdict)  # the reason may quote the update
                    continue
                update = cast(Update, result.update)  # the checks have confirmed its form
                if self._observer:
                    self._observer.update(job.client, update["weights"], verdict)
                fold.add(job.client, self.checks.weighed(update), verdict)
                accepted.append(job.client)
                _average(record.losses, update["losses"], reported)
                changed |= {name for name, moved in verdict.moved.items() if moved}
                if verdict.moved:
                    cosines.append(verdict.cosine())
        if record.losses and learning_rate(self.recipe.train, record.round):
            warn_of_still(self.checks.names - self.setting.buffers, changed)
        if cosines and not method.aggregation.hides_updates:
            record.angular_divergence = fmean(cosines)
        return accepted

    def _download(self, job: Job) -> int:
        """Bytes of a message, with those of the constants if it is the client's first."""
        first = job.client not in self._constants_sent
        self._constants_sent.add(job.client)
        return num_bytes(job.message) + (num_bytes(self.constants) if first else 0)

    def deploy(self) -> Deployment:
        """Return the current models."""
        return self.recipe.composed.deploy(self.state)

    def checkpoint(self) -> Checkpoint:
        """Return all state that a resumed server needs."""
        accepted = dict(self.checks.history.earlier)
        distances = accepted.pop(WEIGHTS, [])
        checkpoint: Checkpoint = {
            "round": self.round,
            "state": self.state,
            "valid": {str(client): round for client, round in self.valid.items()},
            "norms": distances,
            "accepted": accepted,
            "constants_sent": sorted(self._constants_sent),
            "seed": self.recipe.seed,
        }
        if self._missed:
            checkpoint["missed"] = self._missed
        return checkpoint

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state from a checkpoint.

        Raises:
            UserError: The checkpoint belongs to a run with another seed, other networks or clients.
        """
        try:
            models, here = checkpoint["state"]["models"], self.state["models"]
            fits = checkpoint.get("seed", self.recipe.seed) == self.recipe.seed
            fits &= all(_form(models[name]) == _form(here[name]) for name in models.keys() & here.keys())
            self._restore(checkpoint)
        except (AttributeError, KeyError, TypeError, ValueError):
            fits = False
        if not fits or any(client >= self.setting.num_clients for client in self.valid):
            raise UserError(
                f"the newest checkpoint (round {checkpoint['round']}) belongs to another run, with another seed, "
                f"other networks or clients; restore this run's from a copy, or {RESTART}"
            )

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.round = checkpoint["round"]
        self.state = checkpoint["state"]
        self.valid = {int(client): round for client, round in checkpoint["valid"].items()}
        accepted = {WEIGHTS: checkpoint["norms"], **checkpoint.get("accepted", {})}
        self.checks.history = History({name: list(values) for name, values in accepted.items()})
        self._constants_sent = set(checkpoint["constants_sent"])
        self._missed = checkpoint.get("missed", 0)


def _clients(prescribed: Sequence[int], known: int, source: str) -> list[int]:
    """Check a cohort of the user's code; it may hold numpy's integers, which no message holds."""
    try:
        clients = [index(client) for client in prescribed]
    except TypeError:
        clients = [known]
    if len(set(clients)) < len(clients) or not set(clients) <= set(range(known)):
        raise UserError(f"{source} returns {prescribed!r}; return different clients from 0 to {known - 1}")
    return clients


def _form(model: Weights) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.items()}


def _average(means: dict[str, float], values: dict[str, float], counts: Counter[str]) -> None:
    """Continue running means; a client that took no step reports no loss and does not count."""
    for name, value in values.items():
        counts[name] += 1
        means[name] = means.get(name, 0.0) + (value - means.get(name, 0.0)) / counts[name]
