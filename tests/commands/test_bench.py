import io

import pytest
from rich.console import Console

from atoll.commands import bench
from tests.harness import tiny


@pytest.mark.parametrize("setting", ["train.participation=0.25", "train.epochs=0", "method.name=fedema"])
def test_a_recommendation_is_made_for_any_cohort(setting, monkeypatch):
    monkeypatch.setattr(bench, "WARM", 1)
    monkeypatch.setattr(bench, "TIMED", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    console = Console(width=200, file=io.StringIO())
    console.print(bench.recommend(tiny(setting)))
    assert "fastest here: engine.threads=1 engine.channels_last=" in console.file.getvalue()
