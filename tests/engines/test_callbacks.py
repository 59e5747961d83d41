"""Callbacks: which hooks are called, when, and what is no callback."""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll
from atoll.core.errors import UserError
from atoll.engines.callbacks import Callbacks
from tests.harness import tiny


class Everything(atoll.Callback):
    def __init__(self) -> None:
        self.said: list[object] = []

    def begin(self, federation, server):
        self.said.append(("begin", federation.recipe.name, server.round))

    def round(self, record, line):
        self.said.append(("round", record.round, line["loss"]))

    def end(self, run):
        self.said.append(("end", run.finished))


class OnlyTheEnd:  # of no class of Atoll's, with one hook
    def __init__(self) -> None:
        self.accuracy = self.width = None

    def end(self, run):
        self.accuracy = run.results["knn/accuracy"]
        self.width = run.encoder().dim  # the run that `simulate` returns


def test_hooks_are_called_in_order_and_none_is_mandatory(tmp_path: Path) -> None:
    everything, last = Everything(), OnlyTheEnd()
    run = atoll.simulate(tiny(), tmp_path / "run", callbacks=[everything, last])
    losses = [line["loss"] for line in run.metrics[1:]]
    assert everything.said == [
        ("begin", "digits", 0),
        ("round", 1, losses[0]),
        ("round", 2, losses[1]),
        ("end", True),
    ]
    assert (last.accuracy, last.width) == (run.results["knn/accuracy"], run.encoder().dim)


def test_a_resumed_run_calls_the_hooks_of_its_remaining_rounds(tmp_path: Path) -> None:
    class Stop:
        def round(self, record, line):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atoll.simulate(tiny(), tmp_path / "run", callbacks=[Stop()])
    everything = Everything()
    atoll.simulate(tiny(), tmp_path / "run", resume=True, callbacks=[everything])
    assert [said[:2] for said in everything.said] == [("begin", "digits"), ("round", 2), ("end", True)]
    assert everything.said[0][2] == 1


def test_what_has_no_hook_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one of the methods begin, round, end"):
        atoll.simulate(tiny(), tmp_path / "run", callbacks=[print])
    with pytest.raises(UserError, match=r"write Everything\(\)"):
        Callbacks([Everything])
    assert not (tmp_path / "run").exists()
