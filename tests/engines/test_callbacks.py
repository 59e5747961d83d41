"""Callbacks: which hooks are called, when, and what is no callback."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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
    class Misspelt(atoll.Callback):
        def on_round(self, record, line):
            raise AssertionError

    for wrong in (print, Misspelt()):
        with pytest.raises(
            UserError, match=r"at least one of the methods begin, round, step, end, and .* has none"
        ):
            atoll.simulate(tiny(), tmp_path / "run", callbacks=[wrong])
    with pytest.raises(UserError, match=r"write Everything\(\)"):
        Callbacks([Everything])
    assert not (tmp_path / "run").exists()


class Dropping(nn.Module):
    """An encoder whose training depends on PyTorch's random stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 8))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Meddler:
    """Leaves the process's random streams and PyTorch's settings otherwise than it found them."""

    def step(self, images):
        torch.rand(3), np.random.rand(), random.random()

    def round(self, record, line):
        torch.manual_seed(1)
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_dtype(torch.float64)


class OfAnotherForm:
    def begin(self, *rest):
        """Takes what comes."""

    def end(self, run, wall):
        """Would fail when all rounds are done."""


def test_a_hook_that_takes_other_arguments_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^OfAnotherForm\.end\(run, wall\) is .* called with \(run\): missing .*'wall'$"
    ):
        atoll.simulate(tiny(), tmp_path / "run", callbacks=[OfAnotherForm()])
    assert not (tmp_path / "run").exists()


class Awaited:
    async def round(self, record, line):
        """Would never run."""


def test_an_async_hook_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^Awaited\.round is an async function, .*; write def$"):
        atoll.simulate(tiny(), tmp_path / "run", callbacks=[Awaited()])
    assert not (tmp_path / "run").exists()


def test_a_callback_changes_no_result(tmp_path: Path) -> None:
    table = {
        "data": {"source": "digits", "limit": 160, "image_size": 8, "channels": 1},
        "views": {"preset": "digits", "mean": [0.5], "std": [0.5]},
        "method": {"name": "fed_simclr"},
        "partition": {"kind": "iid", "clients": 4},
        "train": {"rounds": 2, "epochs": 1, "batch_size": 20},
        "evaluation": {"every": 0, "at_end": ["knn"], "map_points": 0},
        "engine": {"workers": 1},
    }
    plain = atoll.simulate(table, tmp_path / "plain", encoder=Dropping)
    followed = atoll.simulate(table, tmp_path / "followed", encoder=Dropping, callbacks=[Meddler()])
    assert followed.encoder_path.read_bytes() == plain.encoder_path.read_bytes()
