import io

import pytest
import torch
from rich.console import Console

from atoll.commands import bench
from atoll.methods.registry import METHODS
from tests.harness import tiny
from tests.test_every_method import NEEDS


@pytest.mark.parametrize("setting", ["train.participation=0.25", "train.epochs=0", "method.name=fedema"])
def test_a_recommendation_is_made_for_any_cohort(setting, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    console = Console(width=200, file=io.StringIO())
    console.print(bench.recommend(tiny(setting), warm=1, timed=2))
    assert "fastest here: engine.threads=1 engine.channels_last=" in console.file.getvalue()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_step_of_every_method_is_timed(name):
    before = torch.random.get_rng_state()
    recipe = tiny(f"method.name={name}", *NEEDS.get(name, ()))
    seconds, images = bench.time_step(recipe, warm=1, timed=1)
    assert 0 < seconds < 60
    assert images == 20
    assert torch.equal(torch.random.get_rng_state(), before)
