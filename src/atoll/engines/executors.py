"""Where a simulation trains its clients: in this process, or in worker processes side by side."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from atoll.components.messages import Slices, Update
from atoll.core.errors import RunError, UserError
from atoll.core.tree import Tree, map_tensors, pack, resolve, unpack
from atoll.engines.client import train_client
from atoll.engines.client_states import ClientStates
from atoll.engines.federation import Federation
from atoll.engines.server import Job, Result
from atoll.recipe.recipe import Recipe

Progress = Callable[[int], None] | None
_SENT = "→"  # marks, in a message to a worker, a tensor that travels beside it or went before


class InProcess:
    """Clients one after the other, on this process's networks."""

    def __init__(self, federation: Federation, states: ClientStates) -> None:
        self._federation = federation
        self._states = states

    def start(self, constants: Slices) -> None:
        """Take the client's side of the method."""
        self._client = self._federation.client_side(constants)

    def run(self, jobs: Sequence[Job], progress: Progress) -> Generator[Result, None, None]:
        """Train each client in turn; the update's tensors are the networks' own until the next."""
        for job in jobs:
            yield Result(job.client, self._train(job, progress))

    def close(self) -> None:
        """Nothing to stop."""

    def _train(self, job: Job, progress: Progress) -> Update:
        stateful = self._client.method.stateful(self._client.setting.train)
        retained = self._states.load(job.client, job.message["kept"]) if stateful else None
        data = self._federation.client_data(job.client)
        update, kept = train_client(self._client, job.message, retained, data, progress)
        if stateful:
            self._states.save(job.client, job.round, kept)
        sent: Update = map_tensors(lambda tensor: tensor.cpu(), update)
        return sent


class WorkerPool:
    """Clients side by side in processes that share the image cache and nothing else.

    A client goes to whichever worker is free; its result does not depend on which. Results are handed on in client
    order, and at most two updates a worker wait their turn.
    """

    def __init__(self, recipe: Recipe, states: Path, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[_Pipe] = []
        self._processes = []
        with _interrupts_held():
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work, args=(theirs, recipe, states, os.getpid()), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(_Pipe(ours))
                self._processes.append(process)

    def start(self, constants: Slices) -> None:
        """Give every worker the constants."""
        for pipe in self._pipes:
            pipe.send("constants", constants)

    def run(self, jobs: Sequence[Job], progress: Progress) -> Generator[Result, None, None]:
        """Train the jobs' clients side by side."""
        for pipe in self._pipes:
            pipe.forget()
        waiting = list(reversed(jobs))
        free = list(self._pipes)
        done: dict[int, Update] = {}
        handed = 0
        while handed < len(jobs):
            begun = len(jobs) - len(waiting)
            while free and waiting and begun - handed < 2 * len(self._pipes):
                job = waiting.pop()
                free.pop().send("job", {"client": job.client, "round": job.round, "message": job.message})
                begun += 1
            if jobs[handed].client in done:
                client = jobs[handed].client
                handed += 1
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
        """End the workers."""
        for pipe in self._pipes:
            pipe.connection.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def _ready(self) -> list[_Pipe]:
        ready = set(wait([pipe.connection for pipe in self._pipes]))
        return [pipe for pipe in self._pipes if pipe.connection in ready]


class _Pipe:
    """Trees over a connection. A tensor that went to this worker in this round is not sent again."""

    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        self.connection = connection
        self._sent: dict[int, torch.Tensor] = {}
        self._forget = False

    def forget(self) -> None:
        self._sent = {}
        self._forget = True

    def send(self, kind: str, body: Tree) -> None:
        new: dict[str, torch.Tensor] = {}

        def refer(tensor: torch.Tensor) -> dict[str, int]:
            if id(tensor) not in self._sent:
                self._sent[id(tensor)] = tensor  # held, so that its id stays its own
                new[str(id(tensor))] = tensor
            return {_SENT: id(tensor)}

        body = map_tensors(refer, body)
        # A worker's death shows at the next receive.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pack({"kind": kind, "body": body, "new": new, "forget": self._forget}))
        self._forget = False

    def receive(self) -> tuple[str, Tree]:
        try:
            answer = unpack(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise RunError(
                "a worker process died (was it killed for lack of memory?); resume the run, and it goes on from "
                "its last complete round"
            ) from None
        if answer["kind"] == "mistake":
            raise UserError(answer["body"])
        if answer["kind"] == "failure":
            raise RuntimeError(f"a worker process failed:\n{answer['body']}")
        return answer["kind"], answer["body"]


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while workers start: they inherit that, and do not die of it before they can ignore it."""
    resource_tracker.ensure_running()  # otherwise the first start does so, and lets interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection[bytes, bytes], recipe: Recipe, states: Path, parent: int) -> None:
    """A worker process: build the federation, then train what comes through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    torch.set_num_threads(recipe.engine.threads)

    def answer(kind: str, body: Tree) -> None:
        connection.send_bytes(pack({"kind": kind, "body": body}))

    def progress(images: int) -> None:
        if os.getppid() != parent:
            os._exit(1)  # the run was killed; a state written now would only be in the way
        answer("progress", images)

    try:
        federation = Federation(recipe)
        executor = InProcess(federation, ClientStates(states))
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
        answer("mistake", str(error))
    except Exception:
        answer("failure", traceback.format_exc())
