"""Worker processes when something happens to them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import types
import warnings
from contextlib import closing

import pytest
import torch

from atoll.core.errors import RunError, UserError
from atoll.core.tree import pack
from atoll.engines.federation import Federation
from atoll.engines.job_times import JobTimes
from atoll.engines.jobs import Job
from atoll.engines.server import Server
from atoll.engines.worker_pool import WorkerPool, _Pipe, _work
from atoll.methods.registry import METHODS
from atoll.models import load_encoder
from atoll.recipe.recipe import give
from tests.harness import TINY, tiny
from tests.trees import same

CPU = torch.device("cpu")


def test_a_worker_outlives_ctrl_c_and_its_death_is_a_sentence(tmp_path):
    federation = Federation(tiny())
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    with closing(WorkerPool([CPU])) as pool:
        pool.assign(federation.recipe, tmp_path, JobTimes(federation.setting.sizes))
        (worker,) = pool._processes
        os.kill(worker.pid, signal.SIGINT)  # as a terminal does, and while the worker is still importing
        pool.start(server.constants)
        assert server.run_round(pool).clients == 4
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"was killed by signal 9 \(SIGKILL\), likely .* ran out; resume"):
            server.run_round(pool)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("module", ["atoll.engines.worker_pool", "atoll.commands.run", "atoll.cli.tables"])
def test_a_worker_and_a_run_import_no_more_than_they_need(module):
    """Scikit-learn takes as long as PyTorch where pandas is installed, and each worker and each site starts so."""
    heavy = {"sklearn", "pandas", "matplotlib", "scipy.special", "torchvision", "torch._dynamo"}
    code = f"import sys, {module}; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_each_worker_trains_on_its_own_device(tmp_path, monkeypatch):
    """Here the second device is a GPU that is not there, as only the second worker finds out."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    federation = Federation(tiny())
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    with closing(WorkerPool([CPU])) as pool:
        pool.assign(federation.recipe, tmp_path, JobTimes(federation.setting.sizes))
        pool.start(server.constants)
        server.run_round(pool)
    with closing(WorkerPool([CPU, torch.device("cuda:1")])) as pool:
        pool.assign(federation.recipe, tmp_path, JobTimes(federation.setting.sizes))
        pool.start(server.constants)
        with pytest.raises(UserError, match="names cuda:1, and PyTorch finds no GPU; name cpu instead"):
            server.run_round(pool)


class Answering:
    """A pipe to a worker that takes as long to start as the test likes, and says how long each job took."""

    def __init__(self, seconds):
        self.seconds = seconds

    def forget(self):
        pass

    def send(self, kind, body):
        self.client = body["client"]

    def receive(self):
        return "update", {
            "client": self.client,
            "update": {},
            "seconds": self.seconds[self.client],
            "warnings": [],
        }


def test_the_pace_of_a_client_is_that_of_its_job_alone(monkeypatch):
    """Not of the import of PyTorch in a process that has just started."""
    pipe, times, pool = Answering({0: 1.0, 1: 3.0}), JobTimes([10, 10]), WorkerPool([])
    pool._pipes, pool._times = [pipe], times
    monkeypatch.setattr(pool, "_ready", lambda: [pipe])
    jobs = [Job({"client": client, "round": 1, "epochs": 1, "models": {}}) for client in (0, 1)]
    assert [result.client for result in pool.run(jobs, None)] == [0, 1]
    assert times.paces == pytest.approx({0: 0.5, 1: 1.5})


class Ended:
    """A process that has ended."""

    def __init__(self, exitcode):
        self.exitcode = exitcode

    def join(self, timeout):
        assert timeout


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (-9, r"was killed by signal 9 \(SIGKILL\), likely because memory ran out; resume"),
        (-15, r"was killed by signal 15 \(SIGTERM\); resume"),
        (3, r"ended with exit code 3; .* resume"),
    ],
)
def test_why_a_worker_ended_is_said(exit_code, words):
    here, there = multiprocessing.Pipe()
    there.close()
    with closing(here), pytest.raises(RunError, match=words):
        _Pipe(here, Ended(exit_code)).receive()


def fails_in_a_worker(how):
    """A transform that fails, in a class that only its process knows."""

    class Local:
        def __call__(self, image):
            if multiprocessing.current_process().daemon:
                exec(how)
            return image

        def __setstate__(self, state):
            if how == "unpickled":
                raise KeyError(how)

        def __getstate__(self):
            return {"how": how}

    return Local()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise LookupError('no such colour')", UserError, r"LookupError: no such colour \(.*line 1\)"),
        ("unpickled", RuntimeError, r"failed with KeyError: 'unpickled'\n\nTraceback"),
        ("import os; os.kill(os.getpid(), 11)", RunError, r"was killed by signal 11 \(SIGSEGV\); resume"),
        ("import os; os._exit(3)", RunError, "ended with exit code 3"),
    ],
)
def test_a_worker_that_fails_says_why(how, kind, words, tmp_path):
    recipe = give(tiny(), transform=fails_in_a_worker(how))
    with pytest.warns(UserWarning, match="one image at a time"):
        federation = Federation(recipe)
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    with closing(WorkerPool([CPU])) as pool:
        pool.assign(federation.recipe, tmp_path, JobTimes(federation.setting.sizes))
        pool.start(server.constants)
        with pytest.raises(kind, match=words):
            server.run_round(pool)


def test_a_worker_that_fails_when_the_run_has_ended_is_silent(monkeypatch):
    """Another worker may have failed first."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    parent, connection = multiprocessing.Pipe()
    parent.send_bytes(pack({"forget": False, "new": {}, "kind": "constants", "body": {}}))  # before any run
    parent.close()
    _work(connection, "cpu", dict(os.environ))


@pytest.mark.slow
def test_a_script_without_a_guard_is_told(tmp_path):
    settings = [*TINY, "engine.workers=2", "train.rounds=1"]
    script = tmp_path / "script.py"
    script.write_text(
        f"import atoll\nrecipe = atoll.load_recipe('digits', {settings!r})\n"
        f"atoll.simulate(recipe, {str(tmp_path / 'run')!r})\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1
    assert "put its code under if __name__ == '__main__':" in done.stderr


OWN = """
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch

from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR

torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)


@dataclass(frozen=True)
class Mine(SimCLR):
    name: ClassVar[str] = "mine"

    def loss(self, context, batch, passes):
        warnings.warn("the loss warns")
        return super().loss(context, batch, passes)


METHOD = Method(objective=Mine())
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_train_and_warn_as_the_main_process_does(workers, tmp_path):
    """The module's settings do not count, and a warning of the training is shown once."""
    (tmp_path / "own.py").write_text(OWN)
    settings = [*TINY, f"engine.workers={workers}", "train.rounds=1", "evaluation.at_end=[]"]
    found = []
    for name in ("own:METHOD", "fed_simclr"):
        folder = tmp_path / name[:3]
        command = [sys.executable, "-m", "atoll", "run", "digits", "--out", str(folder), "--set"]
        command += [*settings, f"method.name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        assert done.stderr.count("the loss warns") == (name == "own:METHOD")
        found.append(load_encoder(folder / "encoder.safetensors").state_dict())
    assert same(*found)


def test_code_of_a_notebook_is_not_sent_to_workers(tmp_path, monkeypatch):
    main = types.ModuleType("__main__")
    main.METHOD = METHODS["fed_simclr"]
    monkeypatch.setitem(sys.modules, "__main__", main)
    recipe = tiny("method.name=__main__:METHOD")
    pool = WorkerPool([])
    with pytest.raises(
        UserError, match=r"^a worker process cannot import __main__:METHOD, .* engine\.workers = 1"
    ):
        pool.assign(recipe, tmp_path, JobTimes([1]))
    main.__file__ = "script.py"
    pool.assign(recipe, tmp_path, JobTimes([1]))
