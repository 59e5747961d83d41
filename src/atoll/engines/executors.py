"""Executors of a simulation: train clients in this process, or in parallel worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import cloudpickle
import torch

from atoll.components.messages import Slices, Update
from atoll.core.devices import use_gpu
from atoll.core.errors import RunError, UserError
from atoll.core.processes import why_ended
from atoll.core.tree import Tree, escape, map_tensors, pack, resolve, unpack
from atoll.engines.client import train_client
from atoll.engines.client_states import ClientStates
from atoll.engines.federation import Federation
from atoll.engines.jobs import Job, Result
from atoll.recipe.recipe import Recipe

Progress = Callable[[int], None] | None
_TO_END = 10.0  # seconds that a process may take from closing its pipe to its end
_SENT = "→"  # marks a tensor in a message to a worker: it is sent with the message or was sent before


class InProcess:
    """Trains clients one after another, on the networks of this process."""

    def __init__(self, federation: Federation, states: ClientStates) -> None:
        self._federation = federation
        self._states = states

    def start(self, constants: Slices) -> None:
        """Create the client side of the method."""
        self._client = self._federation.client_side(constants)

    def run(self, jobs: Sequence[Job], progress: Progress) -> Generator[Result, None, None]:
        """Train each client in turn; an update may share tensors with the networks until the next one starts."""
        for job in jobs:
            yield Result(job.client, self._train(job, progress))

    def close(self) -> None:
        """Do nothing: there is nothing to stop."""

    def _train(self, job: Job, progress: Progress) -> Update:
        stateful = self._client.method.stateful(self._client.setting.train)
        retained = self._states.load(job.client, job.message["kept"]) if stateful else None
        data = self._federation.client_data(job.client)
        update, state = train_client(self._client, job.message, retained, data, progress)
        if stateful:
            self._states.save(job.client, job.round, state)
        sent: Update = map_tensors(lambda tensor: tensor.cpu(), update)
        return sent


class WorkerPool:
    """Trains clients in parallel, in processes that share only the image cache.

    A client is assigned to any free worker; its result does not depend on the worker. Results are yielded in client
    order, and at most two updates per worker wait for their turn.

    Args:
        recipe: The run's recipe.
        states: Folder of the client states.
        devices: Device of each process.
    """

    def __init__(self, recipe: Recipe, states: Path, devices: Sequence[torch.device]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[_Pipe] = []
        self._processes = []
        pickled = cloudpickle.dumps(recipe)
        with _interrupts_blocked():
            for device in devices:
                here, there = context.Pipe()
                process = context.Process(
                    target=_work, args=(there, pickled, str(device), states, os.getpid()), daemon=True
                )
                process.start()
                there.close()
                self._pipes.append(_Pipe(here, process))
                self._processes.append(process)

    def start(self, constants: Slices) -> None:
        """Send the constants to every worker."""
        for pipe in self._pipes:
            pipe.send("constants", constants)

    def run(self, jobs: Sequence[Job], progress: Progress) -> Generator[Result, None, None]:
        """Train the clients of the jobs in parallel."""
        for pipe in self._pipes:
            pipe.forget()
        waiting = list(reversed(jobs))
        free = list(self._pipes)
        done: dict[int, Update] = {}
        yielded = 0
        while yielded < len(jobs):
            started = len(jobs) - len(waiting)
            while free and waiting and started - yielded < 2 * len(self._pipes):
                job = waiting.pop()
                free.pop().send("job", {"client": job.client, "round": job.round, "message": job.message})
                started += 1
            if jobs[yielded].client in done:
                client = jobs[yielded].client
                yielded += 1
                yield Result(client, done.pop(client))
                continue
            for pipe in self._ready():
                kind, body = pipe.receive()
                if kind == "progress":
                    if progress is not None:
                        progress(body)
                    continue
                done[body["client"]] = body["update"]
                free.append(pipe)

    def close(self) -> None:
        """Stop the workers."""
        for pipe in self._pipes:
            pipe.connection.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def _ready(self) -> list[_Pipe]:
        ready = set(wait([pipe.connection for pipe in self._pipes]))
        return [pipe for pipe in self._pipes if pipe.connection in ready]


class _Pipe:
    """Sends trees to a process over a connection; a tensor is sent to it only once per round."""

    def __init__(self, connection: Connection[bytes, bytes], process: BaseProcess) -> None:
        self.connection = connection
        self._process = process
        self._sent: dict[int, torch.Tensor] = {}
        self._forget = False

    def forget(self) -> None:
        self._sent = {}
        self._forget = True

    def send(self, kind: str, body: Tree) -> None:
        new: dict[str, torch.Tensor] = {}

        def refer(tensor: torch.Tensor) -> dict[str, int]:
            if id(tensor) not in self._sent:
                self._sent[id(tensor)] = tensor  # a reference, so that its id remains unique
                new[str(id(tensor))] = tensor
            return {_SENT: id(tensor)}

        body = map_tensors(refer, escape(body, _SENT))
        # If a worker has died, the next receive fails.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pack({"kind": kind, "body": body, "new": new, "forget": self._forget}))
        self._forget = False

    def receive(self) -> tuple[str, Tree]:
        try:
            answer = unpack(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join(_TO_END)
            raise RunError(
                f"a worker process {why_ended(self._process.exitcode)}; resume the run to continue from its last "
                "complete round"
            ) from None
        if answer["kind"] == "user error":
            raise UserError(answer["body"])
        if answer["kind"] == "failure":
            reason, trace = answer["body"]
            raise RuntimeError(f"a worker process failed with {reason}\n\n{trace}")
        return answer["kind"], answer["body"]


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C while workers start: they inherit the block, and cannot be killed before they ignore Ctrl-C."""
    resource_tracker.ensure_running()  # otherwise the first process start does so, and unblocks interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(
    connection: Connection[bytes, bytes], pickled: bytes, device: str, states: Path, parent: int
) -> None:
    """Run a worker process: build the federation, then train the jobs that the pipe delivers until it closes.

    The recipe is unpickled here, so that the failure of an object that it carries is answered as any other.
    """
    for name in ("SIGINT", "SIGHUP"):  # the main process handles Ctrl-C and a closed terminal
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    warnings.simplefilter("ignore", UserWarning)  # the main process has shown them

    def answer(kind: str, body: Tree) -> None:
        connection.send_bytes(pack({"kind": kind, "body": body}))

    def progress(images: int) -> None:
        if os.getppid() != parent:
            os._exit(1)  # the run was killed; a state written now would not belong to any run
        answer("progress", images)

    try:
        recipe: Recipe = cloudpickle.loads(pickled)
        torch.set_num_threads(recipe.engine.threads)
        recipe = replace(recipe, engine=recipe.engine.on(device))
        use_gpu(recipe.engine.find_device())
        federation = Federation(recipe)
        executor = InProcess(federation, ClientStates(states, resettable=True))
        known: dict[int, torch.Tensor] = {}
        while True:
            request = unpack(connection.recv_bytes())
            if request["forget"]:
                known.clear()
            known.update({int(key): tensor for key, tensor in request["new"].items()})
            body = resolve(request["body"], _SENT, known.__getitem__)
            if request["kind"] == "constants":
                executor.start(body)
                continue
            job = Job(body["client"], body["round"], body["message"])
            (result,) = executor.run([job], progress)
            answer("update", {"client": result.client, "update": result.update})
    except (EOFError, ConnectionResetError, BrokenPipeError):
        return
    except UserError as error:
        answer("user error", str(error))
    except Exception as error:
        answer("failure", [f"{type(error).__name__}: {error}", traceback.format_exc()])
