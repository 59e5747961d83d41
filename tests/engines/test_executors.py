"""Executors that train in this process, one client after another or one ahead."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll.engines import executors
from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess, OneAhead, in_this_process
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.recipe.engine_options import EngineOptions
from atoll.recipe.recipe import give
from tests.harness import tiny
from tests.trees import same

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
