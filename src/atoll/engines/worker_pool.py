"""Worker processes of a simulation, which train clients in parallel."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import cloudpickle
import torch

from atoll.components.messages import Slices, Update
from atoll.core.devices import use_gpu
from atoll.core.errors import RunError, UserError, warn
from atoll.core.imports import import_attribute
from atoll.core.process_state import standard_settings
from atoll.core.processes import interrupts_blocked, process_context, why_ended
from atoll.core.tree import Tree, escape, map_tensors, num_bytes, pack, resolve, unpack
from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess, Progress
from atoll.engines.federation import Federation
from atoll.engines.job_times import JobTimes, Schedule
from atoll.engines.jobs import Job, Result
from atoll.recipe.recipe import Recipe

HELD_BYTES = 2**28  # limit of the updates that wait for their turn
_TO_END = 10.0  # seconds that a process may take to end after its pipe is closed
_SENT = "→"  # marks a tensor in a message to a worker: it is sent with the message or was sent before


class WorkerPool:
    """Trains clients in parallel, in processes that share only the image cache.

    A client is assigned to any free worker; its result does not depend on the worker. Results are yielded in client
    order, while the longest jobs start first (see `Schedule`). A pool serves one run after another.

    Args:
        devices: Device of each process.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        context = process_context()
        self.devices = list(devices)
        self._pipes: list[_Pipe] = []
        self._processes = []
        with interrupts_blocked():
            for device in devices:
                here, there = multiprocessing.Pipe()
                process = context.Process(
                    target=_work, args=(there, str(device), dict(os.environ)), daemon=True
                )
                process.start()
                there.close()
                self._pipes.append(_Pipe(here, process))
                self._processes.append(process)

    def assign(self, recipe: Recipe, states: Path, times: JobTimes) -> None:
        """Assign the workers to a run, with its recipe, the folder of its client states, and its job times.

        Raises:
            UserError: The recipe names code of the main module, and this is in no file.
        """
        main = sys.modules["__main__"]
        if not getattr(main, "__file__", None) and not getattr(main, "__spec__", None):
            for name in recipe.own_training_code:
                if name.startswith("__main__:"):
                    raise UserError(
                        f"a worker process cannot import {name}, because a notebook or a shell is no file; set "
                        "engine.workers = 1, or put the code into a file"
                    )
        self._times = times
        pickled = cloudpickle.dumps(recipe)
        for pipe in self._pipes:
            pipe.send("run", {"states": str(states)})
            pipe.send_raw(pickled)

    def start(self, constants: Slices) -> None:
        """Send the constants to every worker."""
        for pipe in self._pipes:
            pipe.send("constants", constants)

    def run(self, jobs: Sequence[Job], progress: Progress) -> Generator[Result, None, None]:
        """Train the clients of the jobs in parallel."""
        for pipe in self._pipes:
            pipe.forget()
        schedule = Schedule(jobs, self._times, self._most_held(jobs))
        free = list(self._pipes)
        done: dict[int, Update] = {}
        seconds: dict[int, float] = {}
        yielded = 0
        while yielded < len(jobs):
            while free and (job := schedule.next(yielded)):
                free.pop().send("job", job.message)
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
                for text in body["warnings"]:
                    warn(text)
                client = body["client"]
                seconds[client] = body["seconds"]
                done[client] = body["update"]
                free.append(pipe)
        self._times.learn(seconds, jobs)

    def _most_held(self, jobs: Sequence[Job]) -> int:
        """Number of updates that may be in memory, if each is as large as the models that a client receives."""
        size = num_bytes(dict(jobs[0].message["models"])) if jobs else 0
        return max(2 * len(self._pipes), HELD_BYTES // max(1, size))

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
        self.send_raw(pack({"kind": kind, "body": body, "new": new, "forget": self._forget}))
        self._forget = False

    def send_raw(self, data: bytes) -> None:
        # If a worker has died, the next receive fails.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(data)

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


def _work(connection: Connection[bytes, bytes], device: str, environment: dict[str, str]) -> None:
    """Run a worker process: train the jobs that the pipe delivers, of one run after another, until it closes.

    The recipe is unpickled here, so that an error of an object in it is reported like any other.
    """
    for name in ("SIGINT", "SIGHUP"):  # the main process handles Ctrl-C and a closed terminal
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)  # the main process may have changed its own since the fork server started
    noticed: list[str] = []  # warnings of jobs, which the main process shows

    def notice(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, UserWarning):
            noticed.append(str(message))
        else:
            show(message, category, filename, lineno, file, line)

    show, warnings.showwarning = warnings.showwarning, notice

    def answer(kind: str, body: Tree) -> None:
        connection.send_bytes(pack({"kind": kind, "body": body}))

    def progress(images: int) -> None:
        # Fails if the run was killed; a state written now would not belong to any run.
        answer("progress", images)

    executor: InProcess | None = None
    settings = ExitStack()
    known: dict[int, torch.Tensor] = {}
    try:
        while True:
            request = unpack(connection.recv_bytes())
            if request["forget"]:
                known.clear()
            known.update({int(key): tensor for key, tensor in request["new"].items()})
            body = resolve(request["body"], _SENT, known.__getitem__)
            if request["kind"] == "run":
                executor = None  # frees the networks of the run before
                settings.close()
                executor = _executor(connection.recv_bytes(), device, Path(body["states"]), settings)
            elif executor is None:
                raise RuntimeError("a worker process was sent a job before a run")
            elif request["kind"] == "constants":
                executor.start(body)
            else:
                started = time.perf_counter()  # here, because the parent does not know when this begins
                (result,) = executor.run([Job(body)], progress)
                seconds = time.perf_counter() - started
                found = {"client": result.client, "update": result.update, "seconds": seconds}
                answer("update", {**found, "warnings": list(noticed)})
                noticed.clear()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        return
    except UserError as error:
        failure: tuple[str, Tree] = ("user error", str(error))
    except Exception as error:
        failure = ("failure", [f"{type(error).__name__}: {error}", traceback.format_exc()])
    # If another worker failed first, the main process may have ended.
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        answer(*failure)


def _executor(pickled: bytes, device: str, states: Path, settings: ExitStack) -> InProcess:
    """Build the federation of a pickled recipe in a worker process.

    The user's modules, which may change PyTorch's settings, are imported before the run's settings are entered, as
    in the main process, which has shown the warnings of all this.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        recipe: Recipe = cloudpickle.loads(pickled)
        for name in recipe.own_training_code:
            import_attribute(name, "code")
        settings.enter_context(standard_settings())
        torch.set_num_threads(recipe.engine.threads)
        recipe = replace(recipe, engine=recipe.engine.on(device))
        use_gpu(recipe.engine.find_device())
        return InProcess(Federation(recipe), ClientStates(states, resettable=True, synced=False))
