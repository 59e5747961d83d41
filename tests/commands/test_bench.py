import re

import pytest
import torch

from atoll.commands import bench
from atoll.core.errors import UserError
from atoll.methods.registry import METHODS
from atoll.recipe.engine_options import EngineOptions
from tests.harness import printed, tiny
from tests.test_every_method import NEEDS


@pytest.mark.parametrize("setting", ["train.participation=0.25", "train.epochs=0", "method.name=fedema"])
def test_a_recommendation_is_made_for_any_cohort(setting, monkeypatch, graphs):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    shown = printed(bench.recommend(tiny(setting), warm=1, timed=2))
    assert "fastest here: engine.threads=1 engine.channels_last=" in shown
    assert graphs


@pytest.mark.parametrize(("seconds", "recommended"), [(1.8, True), (1.95, False), (3.0, False)])
def test_compiled_encoders_are_recommended_where_they_are_faster(seconds, recommended, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})

    def time_step(recipe, warm, timed):
        return (seconds if recipe.train.compile else 2.0), 20

    monkeypatch.setattr(bench, "time_step", time_step)
    assert f"train.compile={str(recommended).lower()}" in bench.recommend(tiny()).caption


@pytest.mark.parametrize(
    ("settings", "recommended"),
    [
        (["train.participation=1"], "engine.threads=1 .* engine.workers=4"),
        (["train.participation=0.5"], "engine.threads=2 .* engine.workers=2"),
        (["train.participation=0.25"], "engine.threads=4 .* engine.workers=1"),
        (["train.participation=1", "engine.stack=2"], "engine.threads=4 .* train.compile=false;"),
    ],
)
def test_no_more_workers_are_recommended_than_a_round_has_clients(settings, recommended, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3})
    seconds = {1: 2.0, 2: 1.5, 4: 1.2}
    monkeypatch.setattr(bench, "time_step", lambda recipe, warm, count: (seconds[recipe.engine.threads], 20))
    assert re.search(recommended, bench.recommend(tiny("partition.clients=4", *settings)).caption)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("train.checkpoint_gradients=true", "train.compile cannot be used with train.checkpoint_gradients"),
        (
            "train.batch_size=1000",
            "full batches alone are recorded or compiled, and no client has that many images",
        ),
    ],
)
def test_the_recommendation_says_why_nothing_was_compiled(setting, reason, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    caption = bench.recommend(tiny(setting), warm=1, timed=1).caption
    assert reason in caption
    assert "train.compile=false" in caption


@pytest.mark.parametrize(("seconds", "recommended"), [(0.5, True), (3.0, False)])
def test_on_a_gpu_recorded_steps_are_recommended_where_they_are_faster(seconds, recommended, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(EngineOptions, "find_device", lambda _: torch.device("cuda"))
    timed = []

    def time_step(recipe, warm, count):
        timed.append((recipe.engine.threads, recipe.train.cuda_graphs, recipe.train.compile))
        return (seconds if recipe.train.cuda_graphs else 2.0), 20

    monkeypatch.setattr(bench, "time_step", time_step)
    caption = bench.recommend(tiny()).caption
    assert timed == [(1, False, False)] * 2 + [(1, True, False), (1, recommended, True)]
    assert f"train.cuda_graphs={str(recommended).lower()}" in caption
    assert "engine.workers" not in caption


def test_recorded_steps_are_not_timed_where_a_round_has_too_few(monkeypatch):
    few = tiny("train.cuda_graphs=true", "train.epochs=1", "train.batch_size=20")
    with pytest.raises(UserError, match=r"take 5 or more a round; here they take [1-4]$") as refused:
        bench.time_step(few, warm=1, timed=1)
    assert bench.time_step(tiny("train.cuda_graphs=true", "train.epochs=5"), warm=1, timed=1)

    def time_step(recipe, warm, count):
        if recipe.train.cuda_graphs:
            raise refused.value
        return (1.0 if recipe.train.compile else 2.0), 20

    monkeypatch.setattr(EngineOptions, "find_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(bench, "time_step", time_step)
    caption = bench.recommend(tiny()).caption
    assert str(refused.value) in caption
    assert "train.compile=true train.cuda_graphs=false" in caption


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_step_of_every_method_is_timed(name):
    before = torch.random.get_rng_state()
    recipe = tiny(f"method.name={name}", *NEEDS.get(name, ()))
    seconds, images = bench.time_step(recipe, warm=1, timed=1)
    assert 0 < seconds < 60
    assert images == 20
    assert torch.equal(torch.random.get_rng_state(), before)
