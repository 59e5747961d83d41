"""The promises of the design, on whole runs."""

import gc
import os
import random
from pathlib import Path

import pytest
import torch

from atoll.commands.run import run_recipe
from atoll.core import tree
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.engines.client_states import ClientStates
from atoll.engines.federation import Federation
from atoll.engines.server import Server, TooFewUpdatesError
from atoll.engines.simulation import Simulation
from atoll.engines.worker_pool import WorkerPool
from tests.harness import SSD, final_models, run_tiny, tiny
from tests.trees import same


def encoder_bytes(run):
    return run.encoder_path.read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run in one process."""
    return run_tiny(tmp_path_factory.mktemp("straight") / "run", *SSD)


def test_a_run_folder_is_complete(straight):
    names = {path.name for path in straight.folder.iterdir()}
    assert {
        "recipe.toml",
        "metrics.jsonl",
        "partition.json",
        "checkpoints",
        "encoder.safetensors",
        "evaluation.json",
    } <= names
    assert [line["round"] for line in straight.metrics] == [0, 1, 2, 3]
    assert all(line["bytes_up"] > 0 and line["bytes_down"] > 0 for line in straight.metrics[1:])


def test_training_changes_the_weights(straight):
    federation = Federation(tiny(*SSD))
    start = federation.initial_weights()
    end = final_models(straight)["global"]
    assert not torch.equal(start["encoder.conv1.weight"], end["encoder.conv1.weight"])


@pytest.mark.parametrize("settings", [(), ("engine.streams=2",), ("engine.stack=2",)], ids=str)
def test_a_finished_run_leaves_no_networks(settings, tmp_path):
    """Ten runs of a comparison would share the memory of a GPU: Python's collector comes seldom."""

    def living():
        """By their types: isinstance asks a weak proxy, of which other libraries leave dead ones."""
        networks = (Federation, torch.nn.Conv2d)
        return {id(one): one for one in gc.get_objects() if issubclass(type(one), networks)}

    gc.collect()
    before = living()
    gc.disable()
    try:
        run_tiny(tmp_path / "run", "train.rounds=1", *settings)
        assert living().keys() <= before.keys()
    finally:
        gc.enable()


def test_two_workers_give_the_same_bytes(straight, tmp_path):
    run = run_tiny(tmp_path / "run", *SSD, "engine.workers=2")
    assert encoder_bytes(run) == encoder_bytes(straight)


def test_several_devices_give_the_bytes_of_one(straight, tmp_path):
    """Devices of one kind: here the CPU under three names, two of them equal."""
    run_tiny(tmp_path / "run", *SSD, "train.rounds=2", "engine.devices=['cpu', 'cpu:0', 'cpu']")
    run = run_tiny(tmp_path / "run", *SSD, "engine.devices=auto", resume=True)
    assert encoder_bytes(run) == encoder_bytes(straight)


@pytest.mark.slow
def test_kept_workers_serve_one_run_after_another(straight, tmp_path, monkeypatch):
    """A failed run costs its workers, because they may be at a job of it."""
    pools = []

    class Pool(WorkerPool):
        def __init__(self, devices):
            super().__init__(devices)
            pools.append(self)

    def run(name, *settings):
        recipe = tiny(*SSD, "engine.workers=2", *settings)
        return run_recipe(recipe, tmp_path / name, engine=engine)

    monkeypatch.setattr("atoll.engines.simulation.WorkerPool", Pool)
    with Simulation().keep() as engine:
        run("other", "seed=3", "train.rounds=1")
        assert encoder_bytes(run("first")) == encoder_bytes(straight)
        assert len(pools) == 1
        with pytest.raises(TooFewUpdatesError):
            run("failed", "train.first_norm=1e-9")
        assert not any(process.is_alive() for process in pools[0]._processes)
        assert encoder_bytes(run("second")) == encoder_bytes(straight)
    assert len(pools) == 2
    assert not any(process.is_alive() for process in pools[1]._processes)


def test_what_was_learned_of_clients_serves_the_next_run(tmp_path, monkeypatch):
    """Also a run with other workers."""

    class Pool:
        def __init__(self, devices):
            self.devices = devices

        def assign(self, recipe, states, times):
            seen.append(dict(times.paces))
            times.paces[0] = 1.0 + len(seen)

        def close(self):
            pass

    seen = []
    monkeypatch.setattr("atoll.engines.simulation.WorkerPool", Pool)
    with Simulation().keep() as engine:
        for workers in (2, 2, 3):
            federation = Federation(tiny(f"engine.workers={workers}"))
            with engine._executor(federation, ClientStates(tmp_path)):
                pass
    assert seen == [{}, {0: 2.0}, {0: 3.0}]


def test_an_extended_run_gives_the_same_bytes(straight, tmp_path, recwarn):
    run_tiny(tmp_path / "run", *SSD, "train.rounds=1")
    run = run_tiny(tmp_path / "run", *SSD, resume=True)
    assert not [one for one in recwarn if "damaged" in str(one.message)]
    assert encoder_bytes(run) == encoder_bytes(straight)
    assert [line["round"] for line in run.metrics] == [0, 1, 2, 3]


def test_another_seed_gives_other_bytes(straight, tmp_path):
    run = run_tiny(tmp_path / "run", *SSD, "seed=1")
    assert encoder_bytes(run) != encoder_bytes(straight)


def test_the_global_random_state_decides_nothing(straight, tmp_path):
    torch.manual_seed(99)
    random.seed(99)
    before = torch.random.get_rng_state()
    run = run_tiny(tmp_path / "run", *SSD)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert encoder_bytes(run) == encoder_bytes(straight)


def test_a_recipe_that_differs_is_not_resumed(straight):
    with pytest.raises(UserError, match=r"started with train\.lr = 0\.05.*0\.5"):
        run_tiny(straight.folder, *SSD, "train.lr=0.5", resume=True)


def test_a_folder_with_a_run_is_not_overwritten(straight):
    with pytest.raises(UserError, match="already holds a run; add --resume"):
        run_tiny(straight.folder, *SSD)


def test_two_processes_do_not_share_a_folder(tmp_path):

    run = Run(tmp_path)
    with run.locked(), pytest.raises(UserError, match="another process"), Run(tmp_path).locked():
        pass


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(straight, tmp_path):
    run_tiny(tmp_path / "run", *SSD, "train.rounds=2")
    newest = max((tmp_path / "run/checkpoints").glob("round-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.warns(UserWarning, match=r"round-000002.* is damaged.*from round 1 instead of round 2"):
        run = run_tiny(tmp_path / "run", *SSD, resume=True)
    assert encoder_bytes(run) == encoder_bytes(straight)


def test_a_full_disk_is_a_sentence_and_the_run_resumes(straight, tmp_path, monkeypatch):
    writes = {"left": 15}
    sync = os.fsync

    def full(descriptor):
        writes["left"] -= 1
        if writes["left"] < 0:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        run_tiny(tmp_path / "run", *SSD)
    monkeypatch.undo()
    run = run_tiny(tmp_path / "run", *SSD, resume=True)
    assert encoder_bytes(run) == encoder_bytes(straight)


def lines(run):
    """All metrics but times."""
    return [{**line, "seconds": None} for line in run.metrics]


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize(
    "where", ["atoll.commands.evaluator.Evaluator.during", "atoll.core.run_folder.Run.log"]
)
def test_a_kill_after_a_round_was_kept_loses_none_of_its_metrics(tmp_path, monkeypatch, where, rounds):
    """The round of the kill is the last one, or one before; it is not played again."""
    settings = (*SSD, f"train.rounds={rounds}", "evaluation.every=2")
    whole = run_tiny(tmp_path / "whole", *settings)
    from atoll.commands import evaluator as command
    from atoll.core import run_folder as runs

    original = command.Evaluator.during if "commands" in where else runs.Run.log

    def killed(*arguments):
        server_or_line = arguments[1]
        now = server_or_line["round"] if isinstance(server_or_line, dict) else server_or_line.round
        if now == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(where, killed)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path / "run", *settings)
    monkeypatch.undo()
    completed_rounds = []
    play = Server.run_round
    monkeypatch.setattr(
        Server, "run_round", lambda self, *a: completed_rounds.append(self.round + 1) or play(self, *a)
    )
    run = run_tiny(tmp_path / "run", *settings, resume=True)
    assert completed_rounds == list(range(3, rounds + 1))
    assert lines(run) == lines(whole)
    assert "evaluation" in lines(run)[2]
    assert encoder_bytes(run) == encoder_bytes(whole)


def test_nothing_leaks_from_one_client_to_the_next():
    """A client's update does not depend on whom the same networks trained before (promise 3)."""
    federation = Federation(tiny("method.name=ssd"))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    client = federation.client_side(server.constants)
    from atoll.engines.client import train_client

    def update(job):
        made, _ = train_client(client, job.message, None, federation.client_data(job.client))
        return tree.clone(made)

    jobs = server.jobs(1)
    alone = update(jobs[2])
    update(jobs[0])
    assert same(update(jobs[2]), alone)


@pytest.mark.parametrize("policy", ["average", "local", "leave"])
def test_batchnorm_buffers_follow_the_policy(policy, tmp_path):
    run = run_tiny(tmp_path / "run", "method.name=fed_simclr", f"train.bn_buffers={policy}")
    model = final_models(run)["global"]
    mean, counter = model["encoder.bn1.running_mean"], model["encoder.bn1.num_batches_tracked"]
    assert counter.dtype == torch.int64
    if policy == "average":
        # 2 rounds × 1 epoch × 2 batches of 40 samples × 2 views, counted on top of each other by every client.
        assert counter == 8
        assert mean.abs().sum() > 0
    else:
        assert counter == 0
        assert mean.abs().sum() == 0
    if policy == "local":
        assert len(list(run.folder.glob("encoder-client-*.safetensors"))) == 4


def test_participation_draws_part_of_the_clients(tmp_path):
    run = run_tiny(tmp_path / "run", "train.participation=0.5", "train.rounds=3")
    assert [line["clients"] for line in run.metrics[1:]] == [2, 2, 2]
    server = Server(*_parts("train.participation=0.5"))
    cohorts = [tuple(server.cohort(round)) for round in range(1, 9)]
    assert len(set(cohorts)) > 1
    assert all(len(set(cohort)) == 2 for cohort in cohorts)


def _parts(*settings):
    federation = Federation(tiny(*settings))
    return federation.recipe, federation.setting, federation.initial_weights()


def test_bytes_are_counted():
    recipe, setting, start = _parts("method.name=ssd", "options.dsr.basis=random")
    server = Server(recipe, setting, start)
    model = sum(tensor.numel() * tensor.element_size() for tensor in start.values())
    basis = setting.embedding_dim**2 * 4
    assert tree.num_bytes(server.constants) == basis
    assert model < tree.num_bytes(server.jobs(1)[0].message) < model + 200


def test_workers_read_the_images_that_their_parent_found(tmp_path, monkeypatch):
    """A run's folder may take the name that led to the images; its workers still find them."""
    from PIL import Image
    from sklearn.datasets import load_digits

    (tmp_path / "shared/digits").mkdir(parents=True)
    for i, digit in enumerate(load_digits().images[:60]):
        Image.fromarray((digit * 15).astype("uint8")).save(tmp_path / f"shared/digits/{i}.png")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path / "shared"))
    run = run_tiny(
        Path("digits"), "data.source=images", "data.path=digits", "data.limit=40", "engine.workers=2"
    )
    assert run.encoder_path.is_file()
