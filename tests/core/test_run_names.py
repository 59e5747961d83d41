"""Folders of runs without ``--out``."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.core.run_names import check_name, default_folder


def test_runs_are_in_the_folder_that_atoll_runs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, folder in (("there", Path("there")), ("~/there", Path.home() / "there"), ("", Path("runs"))):
        monkeypatch.setenv("ATOLL_RUNS", value)
        assert default_folder("mine", 1) == folder / "mine-seed1"
    monkeypatch.delenv("ATOLL_RUNS")
    assert default_folder("mine", 1) == Path("runs/mine-seed1")


def test_a_name_that_is_too_long_is_not_repeated_in_full() -> None:
    with pytest.raises(UserError, match=r"^name = 'nnn.*nnn' cannot name a run's folder") as error:
        check_name("n" * 5000)
    assert len(str(error.value)) < 200
