"""Parts of ``atoll bench gpu``, on the CPU."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from atoll.commands.gpu_parts import PRECISIONS, Bench, correctness, overhead, rounds, steps
from atoll.commands.gpu_scale import SCALES
from atoll.core.devices import repeat_results
from atoll.core.process_state import settings_kept
from atoll.methods.registry import METHODS


@pytest.mark.slow
def test_every_method_is_checked_at_full_scale():
    """With fewer images; the list of methods and the settings that some need are the full scale's."""
    full = SCALES["full"]
    scale = replace(full, digits=(*full.digits, "data.limit=160", "train.batch_size=32"))
    found = dict(correctness(Bench(torch.device("cpu"), scale)))
    assert found.keys() == METHODS.keys()
    assert {name: value.get("error") for name, value in found.items() if not value["ok"]} == {}


@pytest.mark.slow
def test_every_method_trains_two_rounds_as_on_a_gpu():
    full = SCALES["full"]
    scale = replace(full, digits=(*full.digits, "data.limit=160", "train.batch_size=32", "model.width=4"))
    found = dict(rounds(Bench(torch.device("cpu"), scale)))
    assert found.keys() == METHODS.keys()
    assert {name: value for name, value in found.items() if not value["ok"]} == {}


def test_a_failure_is_an_error_of_its_own_value_and_known_values_are_not_measured():
    def fails():
        raise torch.OutOfMemoryError("no memory")

    def breaks():
        raise torch.AcceleratorError("an illegal access")

    values = {"known": breaks, "fails": fails, "works": lambda: {"ms": 1.0}, "breaks": breaks}
    found = dict(Bench(torch.device("cpu"), SCALES["test"], known={"known": {"ms": 2.0}}).new(values))
    assert list(found) == ["fails", "works", "breaks"]
    assert found["fails"]["error"] == "OutOfMemoryError: no memory"
    assert "fatal" not in found["fails"]
    assert found["breaks"]["fatal"]
    assert found["works"] == {"ms": 1.0}


def test_steps_are_measured_in_the_precision_they_are_named_after(monkeypatch):
    """Also after the workload chose float32, as a run on a GPU does."""

    class Work:
        def __init__(self, precision):
            self.precision = precision
            repeat_results(torch.device("cuda"))

        def operations(self):
            return 1

        def step(self):
            seen.add((self.precision, torch.backends.cudnn.allow_tf32))

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(
        Bench, "workload", lambda bench, encoder, batch, side, precision, variant: Work(precision)
    )
    seen = set()
    with settings_kept():
        dict(steps(Bench(torch.device("cpu"), SCALES["test"])))
    assert seen == {(name, tf32) for name, (tf32, _) in PRECISIONS.items()}


def test_slow_work_is_called_less_often():
    calls = []
    bench = Bench(torch.device("cpu"), SCALES["full"])
    seconds = bench.seconds(lambda: (calls.append(1), time.sleep(0.3)))
    assert 0.3 <= seconds < 1
    assert len(calls) == bench.scale.warm + 1 + 3


def test_the_overhead_is_relative_to_the_bare_loop():
    (found,) = dict(overhead(Bench(torch.device("cpu"), SCALES["test"]))).values()
    assert found["overhead"] == found["federated_seconds"] / found["bare_seconds"] - 1


def test_a_measured_step_is_one_of_a_run(memory_is_used_again):
    """Compiled encoders learn when it begins."""
    work = Bench(torch.device("cpu"), SCALES["test"]).workload(
        "resnet-narrow", 4, 16, "bf16", "compiled, graphs"
    )
    for _ in range(3):
        work.step()
    work.step_with_views()
    assert len(memory_is_used_again) == 4
    assert memory_is_used_again[1] > 0


def test_a_step_whose_operations_were_counted_is_compiled(graphs):
    """PyTorch 2.11 went on without compiling: the bench would have timed the encoder as it is."""
    bench = Bench(torch.device("cpu"), SCALES["test"])
    plain = bench.workload("resnet-narrow", 4, 16, "bf16").operations()
    work = bench.workload("resnet-narrow", 4, 16, "bf16", "compiled")
    assert work.operations() == plain > 0
    assert graphs == []
    work.step()
    assert graphs
