"""Executors of a simulation in this process; `atoll.engines.worker_pool` trains clients in parallel processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all

from atoll.components.component import declared
from atoll.components.messages import ClientState, Slices, Update
from atoll.core.devices import use_gpu
from atoll.core.tree import as_sent, clone
from atoll.engines.client import train_client
from atoll.engines.client_states import ClientStates
from atoll.engines.federation import Federation
from atoll.engines.jobs import Job, Result

Progress = Callable[[int], None] | None


class InProcess:
    """Trains clients one after another, on the networks of this process."""

    def __init__(self, federation: Federation, states: ClientStates) -> None:
        self._federation = federation
        self._states = states
        self._stateful = federation.recipe.stateful
        aggregation = federation.recipe.composed.aggregation
        # The fold of a user's aggregation may keep updates, unless the class that defines it says otherwise.
        says = declared(type(aggregation), "keeps_updates", "open")
        self._kept = aggregation.keeps_updates or not says

    def start(self, constants: Slices) -> None:
        """Create the client side of the method."""
        self._client = self._federation.client_side(constants)

    def run(self, jobs: Sequence[Job], progress: Progress) -> Generator[Result, None, None]:
        """Train each client in turn."""
        for job in jobs:
            yield Result(job.client, self._train(job, progress))

    def _train(self, job: Job, progress: Progress) -> Update:
        data = self._federation.client_data(job.client)
        return self._store(job, *train_client(self._client, job.message, self._load(job), data, progress))

    def _load(self, job: Job) -> ClientState | None:
        return self._states.load(job.client, job.message["kept"]) if self._stateful else None

    def _store(self, job: Job, update: Update, state: ClientState | None) -> Update:
        """Save the client state, and return the update on the CPU.

        Tensors that are still needed when the next client overwrites the networks are copied.
        """
        if self._stateful:
            self._states.save(job.client, job.round, state)
        sent: Update = clone(update if self._kept else {**update, "weights": {}})
        if not self._kept:
            sent["weights"] = as_sent({name: tensor.cpu() for name, tensor in update["weights"].items()})
        return sent


class OneAhead(InProcess):
    """Trains clients one after another on a thread, so that one trains while the previous update is folded.

    This is for a GPU, which would otherwise wait for the CPU. It holds at most one more update in memory.
    """

    def __init__(self, federation: Federation, states: ClientStates) -> None:
        super().__init__(federation, states)
        self._kept = True  # the next client trains while an update is folded
        # With a number: "cuda" alone means the current GPU, which is the first one in a new thread.
        device = next(federation.networks.parameters()).device
        # One thread for all rounds, because cuDNN's plans belong to a thread.
        self._thread = ThreadPoolExecutor(1, "training", initializer=use_gpu, initargs=(device,))

    def run(self, jobs: Sequence[Job], progress: Progress) -> Generator[Result, None, None]:
        """Train each client in turn; if the caller stops, the client in training stops after its step."""
        stopped = threading.Event()
        begun = deque[tuple[int, Future[Update]]]()

        def step(images: int) -> None:
            if stopped.is_set():
                raise CancelledError
            if progress is not None:
                progress(images)

        def first() -> Result:
            client, update = begun[0]
            result = Result(client, update.result())
            begun.popleft()
            return result

        try:
            for job in jobs:
                begun.append((job.client, self._thread.submit(self._train, job, step)))
                if len(begun) == 2:
                    yield first()
            while begun:
                yield first()
        finally:
            stopped.set()
            wait_for_all([update for _, update in begun if not update.cancel()])


def in_this_process(federation: Federation, states: ClientStates) -> InProcess:
    """Return the faster executor for the device, on the networks of this process.

    `OneAhead` is not used with user code, which may draw from the process's random streams: the fold and the
    training share them. It is not used with CUDA graphs of compiled encoders either: in PyTorch 2.11, only the
    first thread that asks for them can use them, and this is mostly the main thread.
    """
    recipe = federation.recipe
    gpu = recipe.engine.find_device().type == "cuda"
    ahead = gpu and not recipe.own_training_code and not (recipe.train.compile and recipe.train.cuda_graphs)
    return (OneAhead if ahead else InProcess)(federation, states)
