"""Tasks beside the rounds: in order, their errors raised, and a run whose checkpoints are written late."""

import threading
import time

import pytest

from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.engines.background import Background
from atoll.engines.callbacks import Callbacks
from atoll.engines.server import Server
from tests.harness import run_tiny, tiny


def test_tasks_run_in_order_on_another_thread():
    done, first = [], threading.Event()

    def slow():
        first.wait(10)
        done.append(("slow", threading.current_thread() is threading.main_thread()))

    with Background() as background:
        background.run(slow)
        assert done == []
        first.set()
        background.run(lambda: done.append(("fast", False)))
    assert done == [("slow", False), ("fast", False)]


def fail():
    raise UserError("the disk is full")


def run_tasks(*tasks):
    with Background() as background:
        for task in tasks:
            background.run(task)


def test_an_error_of_a_task_is_raised_by_the_next_call_or_the_end():
    done = []
    with pytest.raises(UserError, match="disk is full"):
        run_tasks(fail, lambda: done.append(1))
    assert done == []
    with pytest.raises(UserError, match="disk is full"):
        run_tasks(fail)


def test_the_error_of_the_block_goes_first():
    def end_with_an_error():
        with Background() as background:
            background.run(fail)
            raise KeyError

    with pytest.raises(KeyError):
        end_with_an_error()


class Disk:
    """Delays or refuses the checkpoint of a round."""

    def __init__(self, monkeypatch, round, refuse):
        self.trained, self.blocked, self.latest = threading.Event(), round, 0
        write = Run.checkpoint
        disk = self

        def checkpoint(run, number, tree):
            if number == disk.blocked:
                assert disk.trained.wait(30), "the next round waits for the checkpoint"
                if refuse:
                    raise UserError("the disk is full")
            write(run, number, tree)

        monkeypatch.setattr(Run, "checkpoint", checkpoint)

    def begin(self, federation, server):
        pass

    def step(self, images):
        if self.latest == self.blocked:
            self.trained.set()

    def round(self, record, line):
        self.latest = record.round


SETTINGS = ("method.name=fedema", "train.rounds=4", "evaluation.at_end=[]")


@pytest.mark.parametrize("refuse", [False, True])
def test_a_round_trains_while_the_one_before_is_saved(tmp_path, monkeypatch, refuse):
    straight = run_tiny(tmp_path / "straight", *SETTINGS)
    with monkeypatch.context() as patch:
        disk = Disk(patch, 2, refuse)
        if refuse:
            with pytest.raises(UserError, match="disk is full"):
                run_recipe(tiny(*SETTINGS), tmp_path / "late", callback=disk)
            late = Run(tmp_path / "late")
            assert late.completed_rounds() == 1
            assert [line["round"] for line in late.metrics] == [0, 1]
        else:
            late = run_recipe(tiny(*SETTINGS), tmp_path / "late", callback=disk)
    if refuse:
        late = run_tiny(tmp_path / "late", *SETTINGS, resume=True)
    assert [line["round"] for line in late.metrics] == [0, 1, 2, 3, 4]
    assert late.encoder_path.read_bytes() == straight.encoder_path.read_bytes()


@pytest.mark.parametrize(
    ("settings", "before_the_next"),
    [
        (("method.name=fedema", "evaluation.every=2", "evaluation.during=['knn']"), {2, 4}),
        (("method.aggregation=private_fedavg", "train.bn_buffers=leave"), {1, 2, 3, 4}),
    ],
    ids=["evaluated", "private"],
)
def test_a_round_whose_repetition_would_matter_is_saved_before_the_next_one_trains(
    tmp_path, monkeypatch, settings, before_the_next
):
    """A repeated private round spends privacy again; an evaluated one waits for all rounds before it."""
    saved, trained, write, run_round = [], threading.Event(), Run.checkpoint, Server.run_round

    def noted(server, *arguments):
        record = run_round(server, *arguments)
        if record.round == 2:
            trained.set()
        return record

    def checkpoint(run, number, tree):
        here = threading.current_thread() is threading.main_thread()
        if number == 1 and not here:
            assert trained.wait(30)
            time.sleep(0.3)  # the second round is complete, and must wait
        write(run, number, tree)
        saved.append((number, here))

    monkeypatch.setattr(Server, "run_round", noted)

    monkeypatch.setattr(Run, "checkpoint", checkpoint)
    run = run_tiny(tmp_path, *settings, "train.rounds=4", "evaluation.at_end=[]")
    assert [number for number, _ in saved] == [0, 1, 2, 3, 4]
    assert {number for number, here in saved if here} == {0} | before_the_next
    assert [line["round"] for line in run.metrics] == [0, 1, 2, 3, 4]


class Meddler:
    """Changes what it receives of each round, whose checkpoint waits for that."""

    def __init__(self, monkeypatch):
        self.changed = threading.Event()
        write = Run.checkpoint

        def checkpoint(run, number, tree):
            assert number == 0 or self.changed.wait(30)
            self.changed.clear()
            write(run, number, tree)

        monkeypatch.setattr(Run, "checkpoint", checkpoint)

    def round(self, record, line):
        line["mine"] = record.losses["mine"] = line["losses"]["mine"] = 1.0
        self.changed.set()


def test_a_callback_changes_neither_the_metrics_nor_the_checkpoint(tmp_path, monkeypatch):
    run = run_recipe(tiny(*SETTINGS), tmp_path, callback=Callbacks([Meddler(monkeypatch)]))
    for line in (*run.metrics[1:], run.latest()["line"]):
        assert "mine" not in line
        assert "mine" not in line["losses"]
