"""Whole runs on damaged, full and dying disks: damage is never used, and the earlier round survives."""

import contextlib
import io
import os
import random
import shutil
import sys
import warnings
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from atoll.commands.check import check_run
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.engines.server import TooFewUpdatesError
from atoll.report import write_report
from tests.harness import run_tiny
from tests.kills import kill_and_resume

# Each client keeps a state: its optimiser's.
SMALL = ("data.limit=40", "partition.clients=2", "train.keep_optimizer=true", "evaluation.map_points=20")
FLIPS = 1000


def small(folder, rounds, *settings, resume=False):
    return run_tiny(folder, *SMALL, f"train.rounds={rounds}", *settings, resume=resume)


@pytest.fixture(scope="module")
def one_round(tmp_path_factory):
    return small(tmp_path_factory.mktemp("one") / "run", 1).folder


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory):
    return small(tmp_path_factory.mktemp("two") / "run", 2)


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.slow
def test_no_flipped_bit_of_any_file_is_used_silently(one_round, two_rounds, tmp_path):
    """Files are chosen evenly, so that the small ones, of digits in JSON and TOML, are hit as often as weights."""
    chance = random.Random(0)
    copy = shutil.copytree(one_round, tmp_path / "run")
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.name != ".lock")
    assert {path.suffix for path in files} == {".json", ".jsonl", ".toml", ".safetensors"}
    for number in range(FLIPS):
        path = files[number % len(files)]
        whole = path.read_bytes()
        flip(path, chance.randrange(8 * len(whole)))
        damaged = check_run(Run(copy)).damaged
        assert len(damaged) >= 1, f"{path.name} passes the check"
        if number % 50 == 0:  # what a run makes of it: a sentence, or the same bytes, because nothing read it
            resumed = shutil.copytree(copy, tmp_path / f"resumed{number}")
            with warnings.catch_warnings(record=True) as said, contextlib.suppress(UserError):
                warnings.simplefilter("always")
                run = small(resumed, 2, resume=True)
                assert run.encoder_path.read_bytes() == two_rounds.encoder_path.read_bytes(), path.name
                assert said or path.name not in ("round-000001.safetensors", "recipe.toml", "partition.json")
        path.write_bytes(whole)
    assert check_run(Run(copy)).damaged == []


class Disk:
    """Counts the writes, syncs and renames of files, and lets the n-th one fail."""

    def __init__(self, monkeypatch, failing):
        self.count, self.failing = 0, failing
        sync, replace, unwrapped = os.fsync, Path.replace, Path.open
        disk = self

        class File(io.BufferedWriter):
            def write(self, data):
                disk.step()
                return super().write(data)

            def writelines(self, pieces):
                disk.step()
                super().writelines(pieces)

        def open_file(path, mode="r", *arguments, **keywords):
            if mode in ("wb", "ab"):
                return File(io.FileIO(path, mode))
            return unwrapped(path, mode, *arguments, **keywords)

        monkeypatch.setattr(os, "fsync", lambda descriptor: self.step() or sync(descriptor))
        monkeypatch.setattr(Path, "replace", lambda path, target: self.step() or replace(path, target))
        monkeypatch.setattr(Path, "open", open_file)

    def step(self):
        self.count += 1
        if self.count == self.failing:
            raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_step_leaves_the_earlier_round(
    one_round, two_rounds, tmp_path, monkeypatch
):
    """In the manner of SQLite's tests: the n-th write, sync or rename fails, for all n."""
    failing, failed = 1, True
    while failed:
        folder = shutil.copytree(one_round, tmp_path / f"{failing}")
        with monkeypatch.context() as patch:
            disk, said = Disk(patch, failing), ""
            try:
                small(folder, 2, resume=True)
            except UserError as error:
                said = str(error)
        failed = "disk is full" in said
        assert failed == (disk.count >= failing)
        state = Run(folder).latest()
        assert state["round"] >= 1
        run = small(folder, 2, resume=True)
        assert run.encoder_path.read_bytes() == two_rounds.encoder_path.read_bytes()
        assert [line["round"] for line in run.metrics] == [0, 1, 2]
        assert check_run(run).damaged == []
        shutil.rmtree(folder)
        failing += 1
    assert failing > 20


ONE, TWO, FLOWER = "one worker", "two workers", "Flower"
RUNS = {ONE: 50, TWO: 20, FLOWER: 30}


def pictures(folder):
    """Files of images, so that a run decodes them into its cache."""
    folder.mkdir()
    for i, digit in enumerate(load_digits().images[:60]):
        Image.fromarray((digit * 15).astype("uint8")).save(folder / f"{i:02d}.png")
    return (
        "data.source=images",
        f"data.path={folder}",
        "evaluation.every=1",
        "evaluation.during=['geometry']",
    )


def worker(engine, place, rounds):
    """A function that starts or resumes a whole run, the report included; its cache is the run's own."""
    settings = (*SMALL, *pictures(place / "images"), f"train.rounds={rounds}")
    if engine == TWO:
        settings = (*settings, "engine.workers=2")
    if engine == FLOWER:
        pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")
        settings = (*settings, "train.min_accepted=1")

    def work(folder, resume):
        os.environ["ATOLL_CACHE"] = f"{folder}-cache"
        os.environ["ATOLL_STATE"] = f"{folder}-state"
        if engine == FLOWER:
            from tests.engines.flower.grid import shares
            from tests.engines.flower.test_engine import play

            run = play(shares(2), folder, *settings, resume=resume, wait=600.0, deadline=600.0)
        else:
            run = run_tiny(folder, *settings, resume=resume)
        write_report([run.folder], run.folder / "report.html")

    return work


def left(folder):
    """All that a finished run left, but times."""
    run = Run(folder)
    assert check_run(run).damaged == []
    results = {key: value for key, value in run.results.items() if key != "seconds"}
    lines = [{**line, "seconds": None} for line in run.metrics]
    return run.encoder_path.read_bytes(), results, lines


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("engine", RUNS)
def test_a_hundred_killed_runs_end_as_one_that_was_not(engine, tmp_path):
    """Decoding into the cache, training, checkpoints, evaluations and the report: each kill may hit any of them.

    Flower's server and its nodes die together here; `tests/engines/flower/test_deployment.py` kills each alone.
    """
    kills = kill_and_resume(RUNS[engine], worker(engine, tmp_path, 6), left, tmp_path)
    sys.stdout.write(f"{engine}: {kills} kills, {RUNS[engine]} equal ends\n")


@pytest.mark.slow
@pytest.mark.parametrize("engine", [ONE, FLOWER])
def test_a_disk_that_is_full_at_any_step_of_a_whole_run_is_said(engine, tmp_path, monkeypatch):
    """From the cache and the recipe to the report, at a coordinator and at sites that share its disk."""
    monkeypatch.setenv("ATOLL_CACHE", "")  # and what else the work sets, is restored
    monkeypatch.setenv("ATOLL_STATE", "")
    work = worker(engine, tmp_path, 1)
    work(tmp_path / "whole", False)
    whole, failing, failed = left(tmp_path / "whole"), 1, True
    while failed:
        folder = tmp_path / f"run{failing}"
        with monkeypatch.context() as patch:
            disk, said = Disk(patch, failing), ""
            try:
                work(folder, False)
            except (TooFewUpdatesError, UserError) as error:
                said = str(error)
        failed = "disk is full" in said
        assert failed == (disk.count >= failing), said
        work(folder, Run(folder).exists())
        assert left(folder) == whole
        shutil.rmtree(folder)
        failing += 1
    assert failing > 30
