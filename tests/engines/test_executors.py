"""Worker processes when something happens to them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll.core.errors import RunError, UserError
from atoll.core.tree import pack
from atoll.engines import executors
from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess, OneAhead, WorkerPool, _Pipe, _work, in_this_process
from atoll.engines.federation import Federation
from atoll.engines.job_times import JobTimes
from atoll.engines.jobs import Job
from atoll.engines.server import Server
from atoll.recipe.engine_options import EngineOptions
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


@pytest.mark.parametrize("module", ["atoll.engines.executors", "atoll.commands.run", "atoll.cli.tables"])
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
        return "update", {"client": self.client, "update": {}, "seconds": self.seconds[self.client]}


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


AHEAD = {
    "stateless": ("method.name=ssd",),
    "client states": ("method.name=fed_moco", "options.moco.queue=40"),
    "personal weights": ("method.name=fed_simclr", "method.share=['encoder.*']"),
}


def rounds_of(executor_class, folder, random, settings):
    """The server's state and its records after three rounds; the second client sends garbage in round 2."""
    if random:
        torch.manual_seed(0)  # of its first weights
        dropping = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5))
        federation = Federation(give(tiny(*settings, "views.mean=[0]", "views.std=[1]"), encoder=dropping))
    else:
        federation = Federation(tiny(*settings))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    server.checks.names = frozenset(federation.update_names())

    class Hostile(executor_class):
        def _train(self, job, progress):
            update = super()._train(job, progress)
            if (job.client, job.round) == (1, 2):
                name, weight = next(iter(update["weights"].items()))
                update["weights"][name] = torch.full_like(weight, float("nan"))
            return update

    executor = Hostile(federation, ClientStates(folder))
    executor.start(server.constants)
    images = []
    records = [replace(server.run_round(executor, images.append), seconds=0.0) for _ in range(3)]
    return server.checkpoint(), records, images


@pytest.mark.parametrize("settings", AHEAD.values(), ids=AHEAD)
@pytest.mark.filterwarnings("ignore:model.* does not apply")  # those of the narrow ResNet
@pytest.mark.parametrize("random", [False, True], ids=["narrow", "dropout"])
def test_clients_that_train_ahead_give_the_same_bytes(random, settings, tmp_path):
    ahead = rounds_of(OneAhead, tmp_path / "ahead", random, settings)
    plain = rounds_of(InProcess, tmp_path / "plain", random, settings)
    assert same(ahead[0], plain[0])
    assert ahead[1:] == plain[1:]
    assert [list(record.refused) for record in plain[1]] == [[], ["1"], []]


@pytest.fixture
def ahead(tmp_path):
    """An executor that trains ahead, and the four jobs of a round, each of several steps."""
    federation = Federation(tiny("train.epochs=20"))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    executor = OneAhead(federation, ClientStates(tmp_path))
    executor.start(server.constants)
    return executor, server.jobs(1)


def test_a_client_trains_while_the_update_before_is_with_the_caller(ahead):
    executor, jobs = ahead
    begun = threading.Event()

    def step(images):
        if executor._client.context.client == 1:
            begun.set()

    with closing(executor.run(jobs, step)) as results:
        assert next(results).client == 0
        assert begun.wait(60)
        assert [result.client for result in results] == [1, 2, 3]


def test_a_caller_that_stops_stops_the_client_that_trains(ahead):
    executor, jobs = ahead
    begun, go_on = threading.Event(), threading.Event()
    steps = []

    def step(images):
        steps.append(images)
        if executor._client.context.client == 1:
            begun.set()
            assert go_on.wait(60)

    results = executor.run(jobs, step)
    assert next(results).client == 0
    assert begun.wait(60)
    before = len(steps)
    threading.Timer(0.2, go_on.set).start()
    results.close()
    assert len(steps) == before  # a step that had begun was the last
    assert [result.client for result in executor.run(jobs, None)] == [0, 1, 2, 3]  # and may run again


def test_the_thread_that_trains_is_on_the_gpu_of_the_networks(monkeypatch, tmp_path):
    """A new thread's current GPU is the first one, and the recipe's "cuda" is the caller's."""
    federation = Federation(tiny())
    used = []
    monkeypatch.setattr(executors, "use_gpu", used.append)
    monkeypatch.setattr(EngineOptions, "find_device", lambda _: torch.device("cuda"))
    OneAhead(federation, ClientStates(tmp_path))._thread.submit(len, "").result()
    assert used == [torch.device("cpu")]


def test_only_a_gpu_is_worth_training_ahead(monkeypatch, tmp_path):
    federation = Federation(tiny())
    assert type(in_this_process(federation, ClientStates(tmp_path))) is InProcess
    monkeypatch.setattr(EngineOptions, "find_device", lambda _: torch.device("cuda:1"))
    assert type(in_this_process(federation, ClientStates(tmp_path))) is OneAhead


def test_cuda_graphs_are_replayed_on_the_thread_that_made_the_client(monkeypatch, tmp_path):
    """On another one, PyTorch 2.11 ends the first step with an AssertionError: it keeps the graphs of a thread."""
    federation = Federation(tiny("train.compile=true", "train.cuda_graphs=true"))
    monkeypatch.setattr(EngineOptions, "find_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    marked = []
    monkeypatch.setattr(
        torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(threading.current_thread())
    )
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    executor = in_this_process(federation, ClientStates(tmp_path))
    executor.start(server.constants)
    assert len(list(executor.run(server.jobs(1), None))) == 4
    assert set(marked) == {threading.current_thread()}
