"""Interleaved clients: one process trains several clients at once, taking a step of each in turn.

Each client has its own networks and random streams, so its weights are those of a client that trains alone. On a
GPU, each also has its own CUDA stream, so that kernels of several small networks run at the same time.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from atoll.components.base import Batch, ClientData
from atoll.components.messages import ClientState, Slices, Update
from atoll.core.devices import make_stream
from atoll.core.process_state import random_streams, seed_streams, set_random_streams, streams_kept
from atoll.engines.client import Client, train_batch, training_seed
from atoll.engines.executors import InProcess, Progress
from atoll.engines.jobs import Job, Result
from atoll.models.gradient_checkpointing import checkpointed


class Interleaved(InProcess):
    """Trains ``engine.streams`` clients at once."""

    def start(self, constants: Slices) -> None:
        """Create the client sides, each with its own networks."""
        federation = self._federation
        self._others = federation.recipe.trains_with_own_code
        size = min(federation.recipe.engine.at_once, federation.setting.cohort_size)
        networks = [copy.deepcopy(federation.networks) for _ in range(size)]
        self._clients = [federation.client_side(constants, own) for own in networks]
        self._streams = self._make_streams()

    def run(self, jobs: Sequence[Job], progress: Progress) -> Generator[Result, None, None]:
        """Train the jobs group by group."""
        size = len(self._clients)
        for first in range(0, len(jobs), size):
            group = jobs[first : first + size]
            updates = self._train_group(group, progress)
            for job in group:
                yield Result(job.client, updates[job.client])

    def _make_streams(self) -> list[torch.cuda.Stream | None]:
        device = self._clients[0].device
        if device.type != "cuda":
            return [None] * len(self._clients)
        return [make_stream(device) for _ in self._clients]

    def _train_group(self, jobs: Sequence[Job], progress: Progress) -> dict[int, Update]:
        # Clients with the most steps come first, so that those that still train are always the first ones.
        data = {job.client: self._federation.client_data(job.client) for job in jobs}
        by_steps = sorted(
            jobs, key=lambda job: job.message["epochs"] * data[job.client].num_batches(), reverse=True
        )
        recompute = self._federation.recipe.train.checkpoint_gradients
        with streams_kept(), ExitStack() as contexts:
            members = []
            for row, (job, client, stream) in enumerate(
                zip(by_steps, self._clients, self._streams, strict=False)
            ):
                retained, samples = self._load(job), data[job.client]
                members.append(Member(row, client, stream, self._others, job, retained, samples))
                # Only now, so that copies that `start` makes of the networks are plain ones.
                contexts.enter_context(checkpointed(client.networks["encoder"], recompute))
            while active := [member for member in members if member.next_batch()]:
                self._step(active)
                if progress is not None:
                    for member in active:
                        progress(len(member.batch.indices))
            updates = {}
            for member in members:
                with member.turn():
                    updates[member.job.client] = self._store(member.job, *member.client.finish())
            return updates

    def _step(self, active: Sequence[Member]) -> None:
        """Take one step of each client that has a batch left."""
        for member in active:
            with member.turn():
                train_batch(member.client, member.batch)


class Member:
    """A client of a group.

    Args:
        row: Its position in the group.
        client: Its client side.
        stream: Its CUDA stream; None for the current one, and without a GPU.
        others: Whether it also draws from the streams of numpy and random, which Atoll's own code never does.
        job: Its job.
        retained: Its client state, or None.
        data: Its samples.
    """

    def __init__(
        self,
        row: int,
        client: Client,
        stream: torch.cuda.Stream | None,
        others: bool,
        job: Job,
        retained: ClientState | None,
        data: ClientData,
    ) -> None:
        self.row = row
        self.client = client
        self.job = job
        self._stream = stream
        if stream is not None:  # the networks and the images come from the current stream
            stream.wait_stream(torch.cuda.current_stream(client.device))
        seed_streams(training_seed(client.setting, job.message))
        self._others = others
        self._random = random_streams(others)
        with self.turn():
            client.start(job.message, retained, data)
        self._batches = data.batches(job.round, job.message["epochs"], client.method.images)

    def next_batch(self) -> bool:
        """Make the next batch, if there is one."""
        with self.turn():
            batch = next(self._batches, None)
        if batch is None:
            return False
        self.batch: Batch = batch
        return True

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within the context, the client draws the same numbers as when alone, and computes on its stream."""
        set_random_streams(self._random)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield
        self._random = random_streams(self._others)
