"""Folders of runs without ``--out``."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.run_names import default_folder


def test_runs_are_in_the_folder_that_atoll_runs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, folder in (("there", Path("there")), ("~/there", Path.home() / "there"), ("", Path("runs"))):
        monkeypatch.setenv("ATOLL_RUNS", value)
        assert default_folder("mine", 1) == folder / "mine-seed1"
    monkeypatch.delenv("ATOLL_RUNS")
    assert default_folder("mine", 1) == Path("runs/mine-seed1")
