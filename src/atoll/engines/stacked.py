"""Stacked clients: one process trains several clients at once, their encoders as one with an axis for the client.

A GPU needs as many kernels for a stack of small networks as for one of them. Only encoders are stacked: heads,
losses, components and optimisers run for one client after the other. So every method works as it is written, and
its weights are those of clients that train one by one, up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from atoll.components.base import Batch, ClientData, Passes
from atoll.components.forwards import encoder_calls
from atoll.components.messages import ClientState, Slices, Update
from atoll.core.process_state import seed_streams, streams_kept
from atoll.engines.client import Client, training_seed
from atoll.engines.encoder_stack import EncoderStack
from atoll.engines.executors import InProcess, Progress
from atoll.engines.jobs import Job, Result


class Stacked(InProcess):
    """Trains ``engine.stack`` clients at once."""

    def start(self, constants: Slices) -> None:
        """Create the client sides, each with networks of its own."""
        federation = self._federation
        size = min(federation.recipe.engine.stack, federation.setting.cohort_size)
        networks = [copy.deepcopy(federation.networks) for _ in range(size)]
        self._clients = [federation.client_side(constants, own) for own in networks]
        self._stacks: dict[str, EncoderStack] = {}

    def run(self, jobs: Sequence[Job], progress: Progress) -> Generator[Result, None, None]:
        """Train the jobs group by group."""
        size = len(self._clients)
        for first in range(0, len(jobs), size):
            group = jobs[first : first + size]
            updates = self._train_group(group, progress)
            for job in group:
                yield Result(job.client, updates[job.client])

    def _train_group(self, jobs: Sequence[Job], progress: Progress) -> dict[int, Update]:
        # The clients with the most steps are the first rows, so that those which still train remain a slice.
        data = {job.client: self._federation.client_data(job.client) for job in jobs}
        by_steps = sorted(
            jobs, key=lambda job: job.message["epochs"] * data[job.client].num_batches(), reverse=True
        )
        with streams_kept():
            members = [
                _Member(row, self._clients[row], job, self._load(job), data[job.client])
                for row, job in enumerate(by_steps)
            ]
            while active := [member for member in members if member.next_batch()]:
                self._step(active)
                if progress is not None:
                    for member in active:
                        progress(len(member.batch.indices))
            return {member.job.client: self._store(member.job, *member.finish()) for member in members}

    def _step(self, active: Sequence[_Member]) -> None:
        """Take one step of each client that has a batch left."""
        for member in active:
            member.client.optimizer.zero_grad(set_to_none=True)
        with self._clients[0].autocast():
            passes = self._passes(active)
            losses = [member.loss(passes[member.row]) for member in active]
        if reached := [loss for loss in losses if loss.requires_grad]:
            torch.autograd.backward(reached)
        for stack in self._stacks.values():
            stack.pass_on_gradients()
        for member in active:
            member.step()

    def _passes(self, active: Sequence[_Member]) -> dict[int, Passes]:
        """Run the declared passes of each client, by its row; one call encodes all batches of equal shape."""
        for member in active:
            member.prepare()
        client = self._clients[0]
        passes: dict[int, Passes] = {member.row: {} for member in active}
        for call in encoder_calls(client.method.forwards, client.joint):
            groups: dict[torch.Size, dict[_Member, Tensor]] = {}
            for member in active:
                images = call.batch(member.batch.images)
                groups.setdefault(images.shape, {})[member] = images
            for images_of in groups.values():
                rows = [member.row for member in images_of]
                with call.grad():
                    outputs = self._stack(call.network, active)(rows, list(images_of.values()))
                for member, h in zip(images_of, outputs, strict=True):
                    network, after = member.client.networks_by_name[call.network], member.client.context.after
                    passes[member.row] |= call.features(network, h, after)
        return passes

    def _stack(self, network: str, active: Sequence[_Member]) -> EncoderStack:
        """The clients' encoders of one network; a component may make a copy of its networks in any step."""
        encoders = [
            client.networks_by_name[network]["encoder"] for client in self._clients[: active[-1].row + 1]
        ]
        known = self._stacks.get(network)
        if known is None or known.encoders[: len(encoders)] != encoders:
            known = self._stacks[network] = EncoderStack(encoders)
        return known


class _Member:
    """A client in a group, with its row in the stacks and with random generators of its own."""

    def __init__(
        self, row: int, client: Client, job: Job, retained: ClientState | None, data: ClientData
    ) -> None:
        self.row = row
        self.client = client
        self.job = job
        seed_streams(training_seed(client.setting, job.message))
        self._generators = _generator_states(client)
        with self._drawing():
            client.start(job.message, retained, data)
        self._batches = data.batches(job.round, job.message["epochs"], client.method.images)

    def next_batch(self) -> bool:
        """Make the next batch, if there is one."""
        batch = next(self._batches, None)
        if batch is None:
            return False
        self.client.begin_batch(batch)
        self.batch: Batch = batch
        return True

    def prepare(self) -> None:
        """Make the batch's further images."""
        with self._drawing():
            self.client.prepare(self.batch)

    def loss(self, passes: Passes) -> Tensor:
        """Compute the local loss of the batch, given its passes."""
        with self._drawing():
            return self.client.loss(self.batch, passes)

    def step(self) -> None:
        """Take the optimiser's step."""
        self.client.optimizer.step()
        with self._drawing():
            self.client.after_step()

    def finish(self) -> tuple[Update, ClientState | None]:
        """Return the update and the client state, as `Client.finish` does."""
        with self._drawing():
            return self.client.finish()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Within the context, random layers draw what they would if the client trained alone.

        Everything of a client that may draw runs in it. Encoders do not, because a stack refuses those that draw.
        """
        _set_generators(self.client, self._generators)
        yield
        self._generators = _generator_states(self.client)


def _generator_states(client: Client) -> list[Tensor]:
    device = client.device
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_generators(client: Client, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], client.device)
